"""Requests that come while an engine generates.

Owns: the way of later requests into a generation that is on. Refuses to know: who makes them, and from what. Always holds: an
engine knows from the start how large they can be, so that what it sizes once (a cache, buffers) is large enough for all; the
devices of a replica take the same requests between the same steps.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from meshloom.rollout.protocol import Request

_ARRIVAL_S = 60.0
"""Seconds within which requests come to all devices of a replica."""
_IDLE_S = 10.0
"""Seconds for which a replica without requests waits for more: what it keeps of those before goes with its generation."""


class RequestFeed:
    """A queue between whoever makes requests and the engine that generates; each side has a thread of its own.

    Args:
        largest: as long as any request that will come, with the same kind of parameters, and as many seeds as samples will be
            unfinished at one time. It is only measured, never generated; its id does not matter.
    """

    def __init__(self, largest: Request) -> None:
        self.largest = largest
        self._changed = threading.Condition()
        self._waiting: list[Request] = []
        self._closed = False
        self._listener: Callable[[], None] = lambda: None

    def put(self, requests: Sequence[Request]) -> None:
        """Hand over requests.

        Raises:
            RuntimeError: if the feed is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("the feed is closed")
            self._waiting.extend(requests)
            self._changed.notify_all()
            self._listener()

    def close(self) -> None:
        """No more will come. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._listener()

    def take(self) -> list[Request]:
        """What has come since the last time; does not wait."""
        with self._changed:
            taken, self._waiting = self._waiting, []
            return taken

    def holds(self, request_id: int) -> bool:
        """Whether a request is among what can be taken."""
        with self._changed:
            return any(request.id == request_id for request in self._waiting)

    def wait(self, seconds: float) -> None:
        """Wait until there is something to take, the feed is closed, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, max(0.0, seconds))

    def listen(self, listener: Callable[[], None]) -> None:
        """Have a function called whenever something has come or the feed was closed, and once now. It must be quick."""
        with self._changed:
            self._listener = listener
            listener()

    @property
    def has_requests(self) -> bool:
        """Whether there is something to take."""
        return bool(self._waiting)

    @property
    def is_exhausted(self) -> bool:
        """Whether everything was taken and no more will come."""
        with self._changed:
            return self._closed and not self._waiting


class ReplicaFeed(RequestFeed):
    """The feed of one generation of a replica. It ends when there is nothing to do and nothing comes for some seconds, or, once
    it was let go, as soon as there is nothing to do; who has more then begins another generation.

    Args:
        largest: as ``RequestFeed``.
        first_says: the first device's number, of a replica of several; all of them ask at the same points.
    """

    def __init__(self, largest: Request, first_says: Callable[[int], int]) -> None:
        super().__init__(largest)
        self._first_says, self._due, self._is_let_go = first_says, 0, False

    def offer(self, requests: Sequence[Request]) -> None:
        """Hand over requests; they are dropped if the generation has ended."""
        with suppress(RuntimeError):
            self.put(requests)

    def let_go(self) -> None:
        """Have the generation end once there is nothing to do."""
        with self._changed:
            self._is_let_go = True
            self._changed.notify_all()

    def take(self) -> list[Request]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) >= self._due, _ARRIVAL_S):
                raise RuntimeError("requests that came to the first device of a replica did not come to this one")
            taken, self._waiting, self._due = self._waiting[: self._due], self._waiting[self._due :], 0
            return taken

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_let_go, max(0.0, min(seconds, _IDLE_S)))
        if self.has_requests:
            return
        with self._changed:
            self._closed = True

    @property
    def has_requests(self) -> bool:
        if not (self._due or self._closed):
            self._due = self._first_says(len(self._waiting))
        return self._due > 0

    @property
    def is_exhausted(self) -> bool:
        return self._closed


def with_largest(requests: Sequence[Request], feed: RequestFeed | None) -> list[Request]:
    """Requests that tell how large a generation can become."""
    return [*requests] if feed is None else [*requests, replace(feed.largest, id=-1)]


def wait_for_requests(feed: RequestFeed | None, deadline: float) -> bool:
    """Whether a generation that has nothing to do goes on: it waits until requests have come.

    Args:
        feed: none: nothing can come.
        deadline: of the generation, on the monotonic clock.
    """
    if feed is None:
        return False
    feed.wait(deadline - time.monotonic())
    return feed.has_requests
