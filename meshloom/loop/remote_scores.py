"""Reward models on ranks of a run, asked by the controller.

Owns: which rank scores what. Refuses to know: what a model computes, when it is asked (``loop.reward_models``). Always holds:
an input is scored by one rank; what a rank computes together follows from the inputs alone.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from meshloom.fabric.workers import Workers
from meshloom.loop.reward_models import Models
from meshloom.samples.compact import Compact

_SCORE_S = 3600.0
"""Seconds that a call may take; dead and silent workers are noticed long before."""


@contextmanager
def asked_on_ranks(workers: Workers, ranks: Sequence[int], *, meanwhile: bool) -> Iterator[Models | None]:
    """Where reward models are asked; none where no rank has any.

    Args:
        workers: of the run.
        ranks: that have the models, all of them each.
        meanwhile: ask group by group while others generate, as no engine is on these ranks.
    """
    if not ranks:
        yield None
        return
    asking = RanksAsked(workers, ranks, whole=meanwhile)
    if not meanwhile:
        yield Models(asking.scores)
        return
    threads = ThreadPoolExecutor(len(ranks), thread_name_prefix="score")
    try:
        yield Models(asking.scores, threads)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


class RanksAsked:
    """Asks ranks for scores.

    Args:
        workers: of the run.
        ranks: that have the models.
        whole: what is asked at once goes to one rank, that which has least to do; else it is shared out over all.
    """

    def __init__(self, workers: Workers, ranks: Sequence[int], *, whole: bool) -> None:
        self._workers, self._ranks, self._whole = workers, list(ranks), whole
        self._tokens = dict.fromkeys(self._ranks, 0)
        self._lock = threading.Lock()

    def scores(self, name: str, inputs: Sequence[Sequence[int]]) -> list[float]:
        """Scores of inputs by the model of a component.

        Raises:
            WorkerFault: if a rank fails.
        """
        return self._by_one(name, inputs) if self._whole else self._by_all(name, inputs)

    def _by_one(self, name: str, inputs: Sequence[Sequence[int]]) -> list[float]:
        tokens = sum(map(len, inputs))
        with self._lock:
            rank = min(self._ranks, key=lambda each: (self._tokens[each], each))
            self._tokens[rank] += tokens
        try:
            return self._call([rank], [_arguments(name, inputs)])[0]
        finally:
            with self._lock:
                self._tokens[rank] -= tokens

    def _by_all(self, name: str, inputs: Sequence[Sequence[int]]) -> list[float]:
        """Shared out by length, so that each rank has as many long ones as the others."""
        order = sorted(range(len(inputs)), key=lambda place: (-len(inputs[place]), place))
        parts = [order[at :: len(self._ranks)] for at in range(len(self._ranks))]
        found = [0.0] * len(inputs)
        told = self._call(self._ranks, [_arguments(name, [inputs[place] for place in part]) for part in parts])
        for part, scores in zip(parts, told, strict=True):
            for place, score in zip(part, scores, strict=True):
                found[place] = score
        return found

    def _call(self, ranks: Sequence[int], arguments: Sequence[dict[str, Any]]) -> list[list[float]]:
        return self._workers.call("score", arguments, ranks=ranks, phase="score", deadline_s=_SCORE_S)


def _arguments(name: str, inputs: Sequence[Sequence[int]]) -> dict[str, Any]:
    flat = Compact.of(torch.tensor([token for ids in inputs for token in ids], dtype=torch.int64))
    return {"name": name, "ids": flat, "lengths": torch.tensor([len(ids) for ids in inputs], dtype=torch.int64)}
