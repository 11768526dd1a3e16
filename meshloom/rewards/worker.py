"""The process reward functions run in.

Owns: calling the function and turning what it returns or raises into a reward. Refuses to know: deadlines, sockets
(``killable.serving``). Always holds: one line of JSON for each request, in order; what the function does to this process costs
no other request, since its keeper starts a new one.

The setup is a ``FunctionSpec``; a message is a batch (a pickled list of pickled requests), each request answered by one line
``[value, reason, detail, parts, leftovers]``, the last being the number of threads and processes that functions left behind in
this process.
"""

import inspect
import json
import math
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any, SupportsFloat

from meshloom.killable import serving
from meshloom.rewards.function import load_function
from meshloom.rewards.outcome import InvalidReason
from meshloom.rewards.sandbox.client import KEPT
from meshloom.rewards.verifiers import Scorer

DETAIL_CHARACTERS = 2000
"""Bound on the text that explains an invalid reward."""
_MAX_PARTS = 64

Outcome = tuple[float | None, InvalidReason | None, str, dict[str, float]]


def serve(descriptor: int) -> None:
    """Answer the setup and all batches on a socket until its other end closes."""
    serving.serve(descriptor, lambda spec: Scoring(load_function(spec)))


class Scoring:
    """What batches are answered with.

    Args:
        scorer: the function.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def results(self, message: bytes) -> Iterator[Outcome]:
        """What the function says of each request of a batch."""
        return (_score(self._scorer, request) for request in pickle.loads(message))

    def line(self, result: Outcome) -> bytes:
        """An outcome, and what functions have left behind by then."""
        return json.dumps([*result, _leftovers()], allow_nan=False).encode()


def _score(scorer: Scorer, request: bytes) -> Outcome:
    try:
        result = scorer(pickle.loads(request))
        if inspect.iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
        return _read_result(result)
    except BaseException as error:  # whatever a reward function raises, SystemExit too, costs its own sample only
        return None, InvalidReason.RAISED, _bounded(serving.error_text(error)), {}


def _read_result(result: Any) -> Outcome:
    parts: dict[str, float] = {}
    score, remark = result, ""
    if isinstance(result, Mapping):
        if "score" not in result:
            names = ", ".join(map(str, list(result)[:10]))
            return None, InvalidReason.NOT_A_NUMBER, _bounded(f"a dict without 'score'; its keys: {names}"), {}
        score = result["score"]
        remark = _bounded(result["remark"]) if isinstance(result.get("remark"), str) else ""
        numbers = {_bounded(str(key), 100): _number(value) for key, value in result.items() if key != "score"}
        parts = {name: number for name, number in list(numbers.items())[:_MAX_PARTS] if number is not None}
    value = _number(score)
    if value is None:
        hint = " (a function without a return?)" if result is None else ""
        return None, InvalidReason.NOT_A_NUMBER, _bounded(f"{type(score).__name__}: {score!r}{hint}"), parts
    return value, None, remark, parts


def _number(value: Any) -> float | None:
    """A finite number, or nothing. Strings are no numbers."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _bounded(text: str, limit: int = DETAIL_CHARACTERS) -> str:
    """Text that any file can hold: no lone surrogates, no more than ``limit`` characters."""
    text = text[: limit + 1].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _leftovers() -> int:
    """Threads and processes that functions left behind, those that have ended but were not waited for included."""
    threads = threading.active_count() - 1
    if KEPT and not _others(KEPT):
        return threads
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return threads
    import psutil

    return threads + len([child for child in psutil.Process().children(recursive=True) if child.pid not in KEPT])


def _others(kept: set[int]) -> bool:
    """Whether there are children besides those of the verifier itself; true where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return bool(set(map(int, file.read().split())) - kept)
    except OSError:
        return True
