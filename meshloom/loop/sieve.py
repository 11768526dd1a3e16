"""Dynamic sampling: which groups of what was generated a step is trained on.

Owns: groups with spread that wait for a step, how many rounds a step may take, the counts. Refuses to know: who makes groups,
what is in them. No torch here. Always holds: groups with spread are trained on in the order in which they were drawn, or
dropped and counted because they are too old; none is thrown away as a surplus.

A group is too old when it is more than ``max_lag_versions`` behind, and, as what is generated beyond a step's need waits for
the next one, more than the versions of ``surplus_steps`` steps beyond that. With a lag of 0 the surplus of a step is one step
older than the weights it trains: its old log-probs are computed before the update, as they are with a lag.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshloom.loop.stage import Group, Sifted, Spread


@dataclass(frozen=True, kw_only=True)
class SieveRule:
    """The numbers of dynamic sampling.

    Args:
        prompts_per_step: groups that a step needs.
        prompts_per_round: prompts that are generated at once.
        max_rounds: of a step.
        max_age_versions: how many versions a group may be behind.
    """

    prompts_per_step: int
    prompts_per_round: int
    max_rounds: int
    max_age_versions: int


@dataclass
class Sieve:
    """Groups with spread, and what was counted for the step that is next.

    Args:
        rule: its numbers.
        kept: groups with spread that wait, the first drawn first.
        dropped_stale: groups that were too old.
    """

    rule: SieveRule
    kept: list[Group[Any]] = field(default_factory=list)
    dropped_stale: int = 0
    _flat: list[Group[Any]] = field(default_factory=list)
    _filtered: Counter[Spread] = field(default_factory=Counter)
    _rounds: int = 0

    @property
    def wants_more(self) -> bool:
        """Whether the next step needs another round, and may have it."""
        return len(self.kept) < self.rule.prompts_per_step and self._rounds < self.rule.max_rounds

    @property
    def has_any(self) -> bool:
        """Whether there is anything to train the next step on, be it without spread."""
        return bool(self.kept or self._flat)

    @property
    def steps_ready(self) -> int:
        """Steps that need no further round: their groups wait, or, of the next one, all rounds are used up."""
        return max(len(self.kept) // self.rule.prompts_per_step, int(not self.wants_more))

    def drop_stale(self, version: int) -> None:
        """Forget groups that are too old for weights of ``version``."""
        self.kept = self._fresh(self.kept, version)

    def look(self, groups: Sequence[Group[Any]], version: int) -> None:
        """Take a round: keep its groups with spread, count the others. One of which nothing was finished was one too; one that
        is too old altogether was none."""
        fresh = self._fresh(groups, version)
        self.kept += [group for group in fresh if group.spread is Spread.SOME]
        flat = [group for group in fresh if group.spread is not Spread.SOME]
        self._flat = flat or self._flat
        self._filtered.update(group.spread for group in flat)
        self._rounds += bool(fresh) or not groups

    def take(self) -> tuple[list[Group[Any]], Sifted]:
        """The groups of the next step, and what was done for it. If none has spread, those of the last round."""
        wanted = self.rule.prompts_per_step
        taken, self.kept = self.kept[:wanted], self.kept[wanted:]
        is_flat = not taken
        groups = self._flat[:wanted] if is_flat else taken
        sifted = Sifted(
            rounds=self._rounds,
            filtered=dict(self._filtered),
            missing=wanted - len(taken),
            surplus=len(self.kept),
            is_flat=is_flat,
        )
        self._flat, self._filtered, self._rounds = [], Counter(), 0
        return groups, sifted

    def _fresh(self, groups: Sequence[Group[Any]], version: int) -> list[Group[Any]]:
        fresh = [group for group in groups if version - group.oldest_version <= self.rule.max_age_versions]
        self.dropped_stale += len(groups) - len(fresh)
        return fresh
