"""The bounded buffer between rollout and training.

Owns: finished groups that wait to be trained on, by the steps they are for, in the order of their prompts. Refuses to know: who
made them, what is in them. No torch here. Always holds: no group that is handed out is older than ``max_lag_versions``; what is
too old is counted, never trained on.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshloom.loop.stage import Group


@dataclass
class GroupBuffer:
    """Groups of the next steps.

    Args:
        max_lag_versions: how many weight versions a group's oldest token may be behind the weights it trains.
        steps: groups of each step, the next step first.
        dropped_stale: groups that were too old.
    """

    max_lag_versions: int
    steps: deque[list[Group[Any]]] = field(default_factory=deque)
    dropped_stale: int = 0

    def __len__(self) -> int:
        """Steps whose groups wait."""
        return len(self.steps)

    @property
    def groups(self) -> tuple[Group[Any], ...]:
        """All that wait."""
        return tuple(group for step in self.steps for group in step)

    def put(self, groups: Iterable[Group[Any]]) -> None:
        """The groups of the first step that has none yet."""
        self.steps.append(list(groups))

    def add(self, groups: Iterable[Group[Any]]) -> None:
        """More groups of the next step."""
        self.steps[0].extend(groups)

    def drop_stale(self, version: int) -> int:
        """Forget groups of the next step that are too old for weights of ``version``; how many there were."""
        if not self.steps:
            return 0
        fresh = [group for group in self.steps[0] if version - group.oldest_version <= self.max_lag_versions]
        count = len(self.steps[0]) - len(fresh)
        self.steps[0] = fresh
        self.dropped_stale += count
        return count

    def take(self) -> list[Group[Any]]:
        """The groups of the next step."""
        return self.steps.popleft()

    def load(self, groups: Sequence[Group[Any]], sizes: Sequence[int], dropped_stale: int) -> None:
        """Hold what a buffer held.

        Args:
            groups: that waited.
            sizes: how many of them are for each step.
            dropped_stale: groups that were too old.
        """
        left = iter(groups)
        self.steps = deque([next(left) for _ in range(size)] for size in sizes)
        self.dropped_stale = dropped_stale
