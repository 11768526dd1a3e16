"""The process reward functions run in.

Owns: calling the function. Refuses to know: deadlines, sockets (``killable.serving``), what a value means (``returned``).
Always holds: one line of JSON for each sample, in order; what the function does to this process costs no other call, since its
keeper starts a new one.

The setup is a ``FunctionSpec``; a message is a batch of calls (a pickled list of lists of pickled requests), each sample
answered by one line ``[value, reason, detail, parts, leftovers]``, the last being the number of threads, processes and tasks
that functions left behind in this process. Behind what a sample's call printed there is a mark (``killable.output``).
"""

import asyncio
import inspect
import json
import os
import pickle
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshloom.killable import serving
from meshloom.killable.output import Printing
from meshloom.rewards.forms import Loaded
from meshloom.rewards.function import load_function
from meshloom.rewards.outcome import InvalidReason
from meshloom.rewards.returned import Outcome, bounded, invalid, read_list, read_value
from meshloom.rewards.sandbox.client import KEPT


def serve(descriptor: int) -> None:
    """Answer the setup and all calls on a socket until its other end closes."""
    printing = Printing()
    serving.serve(descriptor, lambda spec: Scoring(load_function(spec), printing))


class Scoring:
    """What calls are answered with.

    Args:
        function: that is called.
        printing: is told where a call ends.
    """

    def __init__(self, function: Loaded, printing: Printing) -> None:
        self._function, self._printing = function, printing
        self._runner = asyncio.Runner()
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of coroutines; none until there is one."""
        self._is_spent = False

    def about(self) -> dict[str, Any]:
        """How the function is called."""
        return {"takes_groups": self._function.takes_groups, "columns": list(self._function.columns)}

    def results(self, message: bytes) -> Iterator[Outcome]:
        """What the function says of each sample."""
        for requests in pickle.loads(message):
            yield from self._outcomes(requests)
            if self._is_spent:
                os._exit(0)  # calls that wait are made in a fresh process

    def line(self, result: Outcome) -> bytes:
        """An outcome, and what functions have left behind by then."""
        self._printing.end_call()
        num_tasks = 0 if self._loop is None else len(asyncio.all_tasks(self._loop))
        return json.dumps([*result, _leftovers() + num_tasks], allow_nan=False).encode()

    def _outcomes(self, requests: Sequence[bytes]) -> list[Outcome]:
        function, count = self._function, len(requests)
        try:
            returned = function.call([pickle.loads(request) for request in requests])
            if inspect.iscoroutine(returned):
                returned = self._awaited(returned)
            if not function.takes_groups:
                return [read_value(returned)]
            return read_list(returned, count, function)
        except BaseException as error:  # whatever a reward function raises, SystemExit too, costs its own samples only
            detail = bounded(serving.error_text(error))
            return [invalid(InvalidReason.RAISED, detail, function, count)] * count

    def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine returns. All calls share a loop, as clients that a function keeps do not outlive theirs; threads
        that it uses end with the call."""
        with ThreadPoolExecutor(thread_name_prefix="asyncio") as threads:
            self._loop = self._runner.get_loop()
            self._loop.set_default_executor(threads)
            try:
                return self._runner.run(coroutine)
            except (SystemExit, KeyboardInterrupt):
                self._is_spent = True  # whatever awaited the one that raised it would raise it again, in a later call
                raise


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
