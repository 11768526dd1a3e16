"""The process reward functions run in.

Owns: calling the function and turning what it returns or raises into a reward. Refuses to know: deadlines; whoever holds
the other end of the socket kills this process when one has passed. Always holds: one line of JSON for each request, in
order; what the function does to this process costs no other request, since its keeper starts a new one.

Protocol, over one socket: first a setup (a pickled ``FunctionSpec``), answered by one line, ``{}`` or the fields of a
``UserError``; then batches (a pickled list of pickled requests), each request answered by one line
``[value, reason, detail, parts, leftovers]``, the last being the number of threads and processes that functions left behind
in this process. Pickles travel towards the worker only: a reward function that runs a model's code can write to this
socket, and must not gain anything in the controller by that.
"""

import inspect
import json
import math
import os
import pickle
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, SupportsFloat

from meshloom.config.errors import UserError
from meshloom.rewards.function import load_function
from meshloom.rewards.outcome import InvalidReason
from meshloom.rewards.sandbox.client import KEPT
from meshloom.rewards.verifiers import Scorer

DETAIL_CHARACTERS = 2000
"""Bound on the text that explains an invalid reward."""
_MAX_PARTS = 64
_HEADER = struct.Struct(">Q")

Outcome = tuple[float | None, InvalidReason | None, str, dict[str, float]]


def frame(message: bytes) -> bytes:
    """A message with its length in front, as ``serve`` reads it."""
    return _HEADER.pack(len(message)) + message


def serve(descriptor: int) -> None:
    """Answer the setup and all batches on a socket until its other end closes."""
    connection = socket.socket(fileno=descriptor)
    own = os.getpid()
    adopt_orphans()
    setup = receive(connection)
    if setup is None:
        return
    try:
        scorer = load_function(pickle.loads(setup))
    except UserError as error:
        _answer(connection, {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix})
        return
    _answer(connection, {})
    while (batch := receive(connection)) is not None:
        for request in pickle.loads(batch):
            outcome = _score(scorer, request)
            if os.getpid() != own:  # a child the function forked has come back from it
                os._exit(0)
            _answer(connection, [*outcome, _leftovers()])


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants on Linux, so that they can be found and killed with this process."""
    if sys.platform == "linux":
        import ctypes

        pr_set_child_subreaper = 36  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def receive(connection: socket.socket) -> bytes | None:
    """The next message that ``frame`` made; nothing if the other end closed."""
    header = _read(connection, _HEADER.size)
    return None if header is None else _read(connection, _HEADER.unpack(header)[0])


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Exactly ``size`` bytes, or nothing if the other end closed."""
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _answer(connection: socket.socket, message: Any) -> None:
    connection.sendall(json.dumps(message, allow_nan=False).encode() + b"\n")


def _score(scorer: Scorer, request: bytes) -> Outcome:
    try:
        result = scorer(pickle.loads(request))
        if inspect.iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
        return _read_result(result)
    except BaseException as error:  # whatever a reward function raises, SystemExit too, costs its own sample only
        return None, InvalidReason.RAISED, _describe(error), {}


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
        return None, InvalidReason.NOT_A_NUMBER, _bounded(f"{type(score).__name__}: {score!r}"), parts
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


def _describe(error: BaseException) -> str:
    """The exception, and the line it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
    return _bounded(place + "".join(traceback.format_exception_only(error)).strip())


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
