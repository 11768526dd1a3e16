"""Several rewards as one: named components, their weights, and what an invalid one means for the sample.

Owns: the sum. Refuses to know: where a component's number comes from. Always holds: a sample is invalid if one of its
components is, unless the settings name a number that stands in; the reason names the component; an invalid component never
counts as 0 by itself. A component that does not apply to a sample is left out of its sum; a sample that none applies to is
invalid.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest


class Scoring(Protocol):
    """A reward on its way."""

    def result(self) -> Reward: ...


class Scorer(Protocol):
    """What scores samples: a pool of processes, a reward model, a judge, or several of them as one."""

    def submit(self, request: RewardRequest) -> Scoring:
        """Take a sample while others run; ``result()`` of what is returned waits for its reward."""
        ...

    def begin(self, scorings: Sequence[Any]) -> None:
        """All samples of a group are there, given as what ``submit`` returned: what scores samples side by side may begin with
        these."""
        ...

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call, by metric."""
        ...


@dataclass(frozen=True)
class Computed:
    """Scores by a formula, in this process and at once.

    Args:
        formula: a number for a sample.
    """

    formula: Callable[[RewardRequest], float]

    def submit(self, request: RewardRequest) -> "Future[Reward]":
        done: Future[Reward] = Future()
        done.set_result(Reward(value=self.formula(request)))
        return done

    def begin(self, scorings: Sequence[Scoring]) -> None:
        """They are done."""

    def take_counts(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Component:
    """One of several rewards.

    Args:
        name: in metrics, samples and reasons.
        scorer: gives it.
        weight: factor in the sum; with 0 it is only logged.
        fallback: stands in where it is invalid; none: the sample is invalid.
        judges: it says something of the answer; a penalty alone makes no reward.
    """

    name: str
    scorer: Scorer
    weight: float = 1.0
    fallback: float | None = None
    judges: bool = True


@dataclass(frozen=True)
class CombinedScoring:
    """A sample's components on their way."""

    parts: tuple[tuple[Component, Scoring], ...]
    _done: list[Reward] = field(default_factory=list)

    def result(self) -> Reward:
        """Wait for all of them, and add them up."""
        if not self._done:
            self._done.append(combine([(component, scoring.result()) for component, scoring in self.parts]))
        return self._done[0]


def combine(found: Sequence[tuple[Component, Reward]]) -> Reward:
    """The reward of a sample from those of its components.

    Its parts are each valid component's value by name, and what a function returned besides as ``NAME/part``; its ``failed``
    says why each invalid one is.
    """
    total, parts, failed = 0.0, {}, {}
    fault: Reward | None = None
    for component, reward in found:
        parts |= {f"{component.name}/{name}": value for name, value in reward.parts.items()}
        if reward.value is not None:
            parts[component.name] = reward.value
            total += component.weight * reward.value if component.weight else 0.0
            continue
        failed[component.name] = reward.why
        if not component.weight or not reward.applies:
            continue
        if component.fallback is not None:
            total += component.weight * component.fallback
        elif fault is None:
            fault = Reward(value=None, reason=reward.reason, detail=f"{component.name}: {reward.detail}")
    printed = "\n".join(f"{component.name}: {reward.printed}" for component, reward in found if reward.printed)
    fault = fault or _nothing_applies(found)
    if fault is None and not math.isfinite(total):
        fault = Reward(value=None, reason=InvalidReason.NOT_A_NUMBER, detail=f"the weighted sum is {total}")
    if fault is not None:
        return replace(fault, parts=parts, failed=failed, printed=printed)
    remarks = "\n".join(reward.detail for _, reward in found if reward.valid and reward.detail)
    return Reward(value=total, detail=remarks, parts=parts, failed=failed, printed=printed)


def _nothing_applies(found: Sequence[tuple[Component, Reward]]) -> Reward | None:
    """Why a sample that no component judges has no reward; none if one does."""
    weighed = [(component, reward) for component, reward in found if component.weight]
    skipped = [component.name for component, reward in weighed if not reward.applies]
    if not skipped or any(component.judges and reward.applies for component, reward in weighed):
        return None
    detail = f"the sample is for none of {', '.join(skipped)} to judge"
    return Reward(value=None, reason=InvalidReason.NOT_APPLICABLE, detail=detail)


@dataclass(frozen=True)
class Combination:
    """Scores samples by all components.

    Args:
        components: in the order in which they are told.
    """

    components: tuple[Component, ...]

    def submit(self, request: RewardRequest) -> CombinedScoring:
        """Give a sample to every component."""
        return CombinedScoring(tuple((component, component.scorer.submit(request)) for component in self.components))

    def begin(self, scorings: Sequence[CombinedScoring]) -> None:
        """Let each component begin with a group."""
        for at, component in enumerate(self.components):
            component.scorer.begin([scoring.parts[at][1] for scoring in scorings])

    def take_counts(self) -> dict[str, float]:
        """Counts of the components, each under ``reward/NAME/``."""
        return {
            f"reward/{component.name}/{name}": value
            for component in self.components
            for name, value in component.scorer.take_counts().items()
        }
