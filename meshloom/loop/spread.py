"""What dynamic sampling asks of a group, and what it tells the user.

Owns: whether the rewards of a group differ, metrics and sentences about groups that were replaced. Refuses to know: which
groups a step is trained on (``loop.sieve``). Always holds: an invalid reward is no reward of the group; what
differs by rounding only is the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from meshloom.config.errors import RunFault
from meshloom.config.reward_settings import FUNCTION, OVERLONG
from meshloom.config.settings import TrainSettings
from meshloom.loop.stage import Sifted, Spread
from meshloom.samples import Samples
from meshloom.samples.episodes import joined

REPEAT_EVERY = 10
_REWARD = "reward"


def spread_of(group: Samples, settings: TrainSettings) -> Spread:
    """Whether what ``algorithm.filter_groups.metric`` names differs within a group: ``reward`` is without the penalty of
    overlong responses, by which samples that are all wrong may differ.

    Raises:
        RunFault: if the reward function returns no such number.
    """
    group = joined(group)
    metric, solved_at = settings.algorithm.filter_groups.metric, settings.validation.success_threshold
    valid = [i for i, is_valid in enumerate(group["valid"].tolist()) if is_valid]
    if len(valid) < 2:
        return Spread.TOO_FEW
    rewards = group["reward"].tolist()
    if settings.reward.overlong is not None:
        rewards = [reward - part.get(OVERLONG, 0.0) for reward, part in zip(rewards, group.meta["parts"], strict=True)]
    values = [rewards[i] if metric == _REWARD else _part(group, i, metric) for i in valid]
    lowest, highest = min(values), max(values)
    if not _is_same(lowest, highest):
        return Spread.SOME
    return Spread.ALL_RIGHT if lowest >= solved_at or _is_same(lowest, solved_at) else Spread.ALL_WRONG


def _is_same(one: float, other: float) -> bool:
    """Whether two numbers differ by no more than rounding, which a penalty that is taken out again leaves."""
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def _part(group: Samples, sample: int, metric: str) -> float:
    parts = group.meta["parts"][sample]
    of_function = f"{FUNCTION}/{metric}"  # so called where the reward has a penalty besides
    if metric not in parts and of_function in parts:
        metric = of_function
    if metric not in parts:
        known = ", ".join([_REWARD, *sorted(parts)])
        raise RunFault(
            f"the reward function returned no number {metric!r}",
            where="algorithm.filter_groups.metric",
            why=f"what it returned: {known}",
            fix="algorithm.filter_groups.metric=reward, or a name that it always returns",
        )
    return float(parts[metric])


def sifted_metrics(sifted: Sifted) -> dict[str, float]:
    """What dynamic sampling did for a step, as metrics."""
    reasons = [reason for reason in Spread if reason is not Spread.SOME]
    by_reason = {f"groups_filtered/{reason}": sifted.filtered.get(reason, 0) for reason in reasons}
    return {
        "rollout_rounds": sifted.rounds,
        "groups_filtered": sum(by_reason.values()),
        **by_reason,
        "groups_missing": sifted.missing,
        "groups_surplus": sifted.surplus,
    }


@dataclass
class ShortWatch:
    """Tells the user about steps with fewer groups than they should have: of the first, and of each tenth.

    Args:
        settings: of the run.
        notice: called with a sentence for the user.
        count: such steps so far.
    """

    settings: TrainSettings
    notice: Callable[[str], None]
    count: int = 0

    def look(self, step: int, sifted: Sifted) -> None:
        """Look at a step."""
        if not sifted.missing:
            return
        if self.count % REPEAT_EVERY == 0:
            self.notice(self._sentence(step, sifted))
        self.count += 1

    def _sentence(self, step: int, sifted: Sifted) -> str:
        wanted = self.settings.batch.prompts_per_step
        has = wanted - sifted.missing
        what = (
            f"trains on {has} of {wanted} groups" if not sifted.is_flat else "has no group with any spread of rewards"
        )
        of = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(sifted.filtered.items()))
        rounds = f"{sifted.rounds} {'round' if sifted.rounds == 1 else 'rounds'}"
        again = f" ({self.count + 1} such steps)" if self.count else ""
        return (
            f"warning: step {step} {what}: {rounds} of generation gave no more{f'; filtered: {of}' if of else ''}{again}; "
            f"easier or harder prompts, more samples a prompt, or a larger algorithm.filter_groups.max_rounds"
        )
