"""The bounded buffer between rollout and training.

Owns: finished groups that wait to be trained on, in the order of their prompts. Refuses to know: who made them, what is in
them. No torch here. Always holds: no group that is handed out is older than ``max_lag_versions``; what is too old is counted,
never trained on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshloom.loop.stage import Group


@dataclass
class GroupBuffer:
    """Groups, oldest first.

    Args:
        max_lag_versions: how many weight versions a group's oldest token may be behind the weights it trains.
    """

    max_lag_versions: int
    groups: list[Group[Any]] = field(default_factory=list)
    dropped_stale: int = 0

    def __len__(self) -> int:
        return len(self.groups)

    def put(self, groups: Iterable[Group[Any]]) -> None:
        self.groups.extend(groups)

    def drop_stale(self, version: int) -> None:
        """Forget groups that are too old for weights of ``version``."""
        fresh = [group for group in self.groups if version - group.oldest_version <= self.max_lag_versions]
        self.dropped_stale += len(self.groups) - len(fresh)
        self.groups = fresh

    def take(self, count: int) -> list[Group[Any]]:
        """The ``count`` oldest groups."""
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken
