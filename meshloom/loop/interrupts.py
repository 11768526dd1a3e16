"""What a controller says to an engine that generates: which requests are to end.

Owns: to which generation a message belongs. Refuses to know: engines but for two verbs, how messages come. Always holds: a
message about a generation that has ended is dropped; one that is early waits for its generation.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshloom.rollout.protocol import ReplicaEngine


class Interrupts:
    """Messages for the generations of one engine, which are numbered, ascending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = -1
        self._engine: ReplicaEngine | None = None
        self._early: list[tuple[int, Sequence[int], bool]] = []

    @contextmanager
    def hearing(self, number: int, engine: ReplicaEngine) -> Iterator[None]:
        """Within, an engine hears what is said about a generation, also what came before."""
        with self._lock:
            self._number, self._engine = number, engine
            early, self._early = self._early, []
            for message in early:
                self._pass_on(*message)
        try:
            yield
        finally:
            with self._lock:
                self._engine = None

    def tell(self, number: int, request_ids: Sequence[int], *, only_unbegun: bool) -> None:
        """Let requests of a generation end; ``only_unbegun``: those none of whose samples has begun."""
        with self._lock:
            self._pass_on(number, request_ids, only_unbegun)

    def _pass_on(self, number: int, request_ids: Sequence[int], only_unbegun: bool) -> None:
        if number > self._number:
            self._early.append((number, request_ids, only_unbegun))
        elif number == self._number and self._engine is not None:
            for request_id in request_ids:
                if only_unbegun:
                    self._engine.withdraw(request_id)
                else:
                    self._engine.abort(request_id)
