"""What weighing an arrangement comes to, and small helps of it.

Owns: the records of what fits and what does not, and the search for the largest microbatch. Refuses to know: how an arrangement
is weighed. Always holds: of two outcomes the better is the one that fits, the faster of two that do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshloom.config.settings import TrainSettings
from meshloom.plan.arrangement import Arrangement, Budget
from meshloom.plan.fitting import GIB
from meshloom.plan.forecast import Forecast, Group
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.plan.time import PhaseTime
from meshloom.plan.training_time import EMPTY_STAGES

GRAIN = 512
"""Tokens by which microbatches differ."""


@dataclass(frozen=True, kw_only=True)
class Lack:
    """Why an arrangement does not fit, at its most frugal.

    Args:
        roles: of the devices that lack most.
        phase: in which they do.
        lacking: bytes.
        what: in words.
    """

    roles: tuple[Role, ...]
    phase: Phase
    lacking: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """An arrangement with the budget that suits it best.

    Args:
        arrangement: which.
        budget: that it has.
        settings: of the run with both.
        forecast: of these settings.
    """

    arrangement: Arrangement
    budget: Budget
    settings: TrainSettings
    forecast: Forecast

    @property
    def step_s(self) -> float:
        return self.forecast.step_s

    @property
    def margin(self) -> int:
        """Bytes that are left where least are."""
        return min((group.ledger.margin(phase) or 0 for group in self.forecast.groups for phase in Phase), default=0)


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is recomputed and moved away, and the seconds that the moves take in a step."""

    recompute: bool
    optimizer: tuple[Role, ...]
    parameters: tuple[Role, ...]
    moved: float


def better_of(one: Weighed | Lack | None, other: Weighed | Lack) -> Weighed | Lack:
    """The faster of two that fit, the one that fits, or of two that do not the one that lacks less."""
    if one is None or (isinstance(one, Lack) and isinstance(other, Weighed)):
        return other
    if isinstance(one, Weighed):
        return other if isinstance(other, Weighed) and other.step_s < one.step_s else one
    return other if isinstance(other, Lack) and other.lacking < one.lacking else one


def largest_that_fits(needed: Callable[[int], int], most: int, memory: int) -> int | None:
    """The largest number up to ``most`` that needs no more than there is, of what grows with it nearly in a line; none if that
    is not even 0."""
    low, high = 0, most
    least, largest = needed(low), needed(high)
    if least > memory:
        return None
    if largest <= memory:
        return most
    while high - low > 1:
        guess = low + (memory - least) * (high - low) // (largest - least)
        guess = min(max(guess, low + 1), high - 1)
        if (count := needed(guess)) <= memory:
            low, least = guess, count
            if guess + 1 < high and (count := needed(guess + 1)) > memory:
                return guess
        else:
            high, largest = guess, count
    return low


def without_bubble(phase: PhaseTime) -> PhaseTime:
    """A phase as if its stages never stood empty, which they do the longer the larger microbatches are."""
    return replace(phase, parts=tuple(part for part in phase.parts if part.name != EMPTY_STAGES))


def rounded(least: int, grains: int) -> int:
    """The microbatch that is so many grains above the least, at a multiple of the grain."""
    return least if not grains else (least // GRAIN + grains) * GRAIN


def lack_of(groups: tuple[Group, ...]) -> Lack | None:
    """What the devices that lack most lack; none if all fit."""
    margins = [(group.ledger.margin(phase), group, phase) for group in groups for phase in Phase]
    known = [(margin, group, phase) for margin, group, phase in margins if margin is not None]
    margin, group, phase = min(known, key=lambda each: each[0], default=(0, None, Phase.UPDATE))
    if group is None or margin >= 0:
        return None
    return Lack(roles=group.roles, phase=phase, lacking=-margin, what=f"{phase} lacks {-margin / GIB:,.1f} GiB")
