"""Who may use a replica of the engine: callers in their turn.

Owns: the order. Refuses to know: what a turn is used for. Always holds: one has the turn at a time, in the order of asking; who
goes first is before all that wait.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """Who may use a replica: one at a time, in the order of asking; who moves weights goes first.

    ``when_wanted`` is called when somebody has begun to wait for one that is taken. It must be quick.
    """

    def __init__(self) -> None:
        self.when_wanted: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = False

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return len(self._waiting)

    @contextmanager
    def turn(self, *, first: bool = False) -> Iterator[None]:
        """Wait for a turn, and have it inside."""
        ticket = object()
        with self._changed:
            self._waiting.appendleft(ticket) if first else self._waiting.append(ticket)
            if self._taken:
                self.when_wanted()
            try:
                self._changed.wait_for(lambda: not self._taken and self._waiting[0] is ticket)
                self._taken = True
            finally:
                self._waiting.remove(ticket)
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()
