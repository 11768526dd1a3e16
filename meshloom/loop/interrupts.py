"""What a controller says to an engine that generates: which requests are to end, and which ones come.

Owns: to which generation a message belongs. Refuses to know: engines but for two verbs, how messages come. Always holds: a
message about a generation that has ended is dropped; one that is early waits for its generation.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshloom.rollout.feed import ReplicaFeed
from meshloom.rollout.protocol import ReplicaEngine, Request


@dataclass(frozen=True)
class _Hearing:
    """Who hears what is said about a generation."""

    engine: ReplicaEngine
    feed: ReplicaFeed | None


class Interrupts:
    """Messages for the generations of one engine, which are numbered, ascending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = -1
        self._hearing: _Hearing | None = None
        self._early: list[tuple[int, Callable[[_Hearing], None]]] = []

    @contextmanager
    def hearing(self, number: int, engine: ReplicaEngine, feed: ReplicaFeed | None = None) -> Iterator[None]:
        """Within, an engine hears what is said about a generation, also what came before."""
        with self._lock:
            self._number, self._hearing = number, _Hearing(engine, feed)
            early, self._early = self._early, []
            for message in early:
                self._pass_on(*message)
        try:
            yield
        finally:
            with self._lock:
                self._hearing = None

    def tell(self, number: int, request_ids: Sequence[int], *, only_unbegun: bool) -> None:
        """Let requests of a generation end; ``only_unbegun``: those none of whose samples has begun."""

        def end(found: _Hearing) -> None:
            for request_id in request_ids:
                (found.engine.withdraw if only_unbegun else found.engine.abort)(request_id)

        with self._lock:
            self._pass_on(number, end)

    def bring(self, number: int, requests: Sequence[Request]) -> None:
        """Hand over requests that join those of a generation with a feed."""

        def offer(found: _Hearing) -> None:
            if found.feed is not None:
                found.feed.offer(requests)

        with self._lock:
            self._pass_on(number, offer)

    def let_go(self, number: int) -> None:
        """Have a generation with a feed end once it has nothing to do."""

        def end(found: _Hearing) -> None:
            if found.feed is not None:
                found.feed.let_go()

        with self._lock:
            self._pass_on(number, end)

    def _pass_on(self, number: int, message: Callable[[_Hearing], None]) -> None:
        if number > self._number:
            self._early.append((number, message))
        elif number == self._number and self._hearing is not None:
            message(self._hearing)
