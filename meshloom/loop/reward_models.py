"""Reward models as scorers: samples wait until their model is asked.

Owns: what waits, and when it is asked. Refuses to know: what a model computes (``rewards.model``), devices. Always holds:
every sample gets the reward of its own input; what is scored together follows from the samples alone, not from who was
faster, so that a run that is repeated repeats its numbers.

Where reward models share devices with the engine, they are asked once all samples of a rollout are there. On devices of their
own they are asked group by group, while others are generated.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from meshloom.rewards.combined import Scoring
from meshloom.rewards.model import Reader, reward_of
from meshloom.rewards.outcome import Reward, RewardRequest

Ask = Callable[[str, Sequence[Sequence[int]]], list[float]]
"""Scores of inputs by the model of a component."""


@dataclass(frozen=True)
class Models:
    """Where reward models are asked.

    Args:
        ask: scores inputs.
        background: asks group by group meanwhile, where the models have devices of their own.
    """

    ask: Ask
    background: ThreadPoolExecutor | None = None


@dataclass(eq=False)
class Waiting:
    """A sample that waits for its model.

    Args:
        scorer: whose it is.
        ids: its input.
        done: gets its reward.
    """

    scorer: "ModelScorer"
    ids: Sequence[int]
    done: "Future[Reward]" = field(default_factory=Future)

    def result(self) -> Reward:
        """Its reward; asks for it and all others that wait, if nobody has yet."""
        self.scorer.ask_for(self)
        return self.done.result()


@dataclass
class ModelScorer:
    """Scores samples by a reward model.

    Args:
        name: of the component.
        reader: makes its inputs.
        ask: scores them.
        background: asks group by group meanwhile; none: all at once when the first reward is wanted.
    """

    name: str
    reader: Reader
    ask: Ask
    background: ThreadPoolExecutor | None = None
    _waiting: dict[Waiting, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, request: RewardRequest) -> Scoring:
        """Take a sample."""
        read = self.reader.read(request)
        if isinstance(read, Reward):
            done: Future[Reward] = Future()
            done.set_result(read)
            return done
        waiting = Waiting(self, read)
        with self._lock:
            self._waiting[waiting] = None
        return waiting

    def begin(self, scorings: Sequence[Scoring]) -> None:
        """Score a group while others are generated, where the models have devices of their own."""
        if self.background is None:
            return
        with self._lock:
            group = [one for one in scorings if isinstance(one, Waiting) and one in self._waiting]
            for one in group:
                del self._waiting[one]
        if group:
            self.background.submit(self._score, group).add_done_callback(partial(_tell_cancelled, group))

    def take_counts(self) -> dict[str, float]:
        """Nothing is counted here."""
        return {}

    def ask_for(self, wanted: Waiting) -> None:
        """Score what waits, if ``wanted`` is among it."""
        with self._lock:
            if wanted not in self._waiting:
                return
            group = list(self._waiting)
            self._waiting.clear()
        self._score(group)

    def _score(self, group: Sequence[Waiting]) -> None:
        # In an order that does not depend on which sample was finished first.
        group = sorted(group, key=lambda one: (len(one.ids), list(one.ids)))
        try:
            found = self.ask(self.name, [one.ids for one in group])
        except BaseException as error:  # whoever waits for a reward must be told
            for one in group:
                one.done.set_exception(error)
            return
        for one, score in zip(group, found, strict=True):
            one.done.set_result(reward_of(score))


def _tell_cancelled(group: Sequence[Waiting], asking: "Future[None]") -> None:
    """Samples that nobody will ask about, as the run ends, get no reward."""
    if asking.cancelled():
        for one in group:
            one.done.set_exception(CancelledError())
