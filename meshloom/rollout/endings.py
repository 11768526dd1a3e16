"""What an engine that generates is told to end, by any thread.

Owns: requests that were aborted or withdrawn since the engine last looked. Refuses to know: samples, devices. Always holds:
what is told between two looks is found by the next one, once.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """What ends before the next round of steps.

    Args:
        is_over: all of it: the deadline is over.
        aborted: requests that were aborted.
        withdrawn: requests that end if none of their samples has begun.
    """

    is_over: bool
    aborted: frozenset[int] = frozenset()
    withdrawn: frozenset[int] = frozenset()

    def ended(self, unbegun: set[int]) -> frozenset[int]:
        """Requests that end, where those of ``unbegun`` have not begun."""
        return self.aborted | (self.withdrawn & unbegun)


class HearsEnds:
    """Base of engines: the two verbs that end requests of a generation."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, bool]] = deque()

    def abort(self, request_id: int) -> None:
        """End a request's unfinished samples; they come with ``FinishReason.ABORTED``. Others are not disturbed. Any thread may
        call it."""
        self._ends.append((request_id, False))

    def withdraw(self, request_id: int) -> None:
        """End a request none of whose samples has begun: they come with ``FinishReason.ABORTED``, without tokens. One that has
        begun goes on. Any thread may call it."""
        self._ends.append((request_id, True))

    def _to_end(self, *, is_over: bool) -> Decision:
        """What was aborted and withdrawn since the last time."""
        aborted: set[int] = set()
        withdrawn: set[int] = set()
        while self._ends:
            request_id, unbegun = self._ends.popleft()
            (withdrawn if unbegun else aborted).add(request_id)
        return Decision(is_over, frozenset(aborted), frozenset(withdrawn))
