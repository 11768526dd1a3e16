"""A call of a verb on several ranks: what came back, and what came before.

Owns: the results and events of one call. Refuses to know: how they arrive. Always holds: a call ends with all its results, or
with the error that ended the run.
"""

import queue
import threading
from collections.abc import Iterator
from typing import Any


class Call:
    """A call that was begun.

    Args:
        number: of the call in its run.
        ranks: that were called, in the order of the results.
        verb: that was called; empty while the host is made.
        phase: of the step that it belongs to.
        deadline_s: seconds it may take, from when all its ranks are free for it.
    """

    def __init__(self, number: int, ranks: tuple[int, ...], verb: str, phase: str, deadline_s: float) -> None:
        self.number, self.ranks, self.verb, self.phase, self.deadline_s = number, ranks, verb, phase, deadline_s
        self.began_at: float | None = None
        """When all its ranks were free for it, on the monotonic clock."""
        self._results: dict[int, Any] = {}
        self._events: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._error: BaseException | None = None
        if not ranks:
            self._end()

    @property
    def done(self) -> bool:
        """Whether ``result`` returns, or raises, at once."""
        return self._over.is_set()

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Ranks that have not returned."""
        return tuple(rank for rank in self.ranks if rank not in self._results)

    def result(self) -> list[Any]:
        """What the verb returned on each rank, in the order of ``ranks``; waits for it.

        Raises:
            WorkerFault: if a worker failed or the deadline passed; everything was ended.
            UserError: that a verb raised.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        return [self._results[rank] for rank in self.ranks]

    def events(self) -> Iterator[tuple[int, Any]]:
        """Values that the verb emits, each with its rank, until all ranks have returned. Can be gone through once.

        Raises:
            WorkerFault, UserError: as ``result``.
        """
        while (event := self._events.get()) is not None:
            yield event
        self.result()

    def take_event(self, rank: int, value: Any) -> None:
        """Note an event."""
        self._events.put((rank, value))

    def take_result(self, rank: int, value: Any) -> None:
        """Note a result; the last one ends the call."""
        self._results[rank] = value
        if not self.unfinished:
            self._end()

    def fail(self, error: BaseException) -> None:
        """End the call with an error, unless it is done."""
        if not self.done:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._over.set()
        self._events.put(None)
