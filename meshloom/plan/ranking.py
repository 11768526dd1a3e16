"""Arrangements in the order of their time, each with the reason for its place.

Owns: the record of a search's outcome, and why one arrangement is slower than another or refused. Refuses to know: how they
were found. Always holds: a reason is a difference of the very numbers that the plan shows of both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.config.problems import Problem
from meshloom.config.settings import TrainSettings
from meshloom.plan.faults import overrides
from meshloom.plan.fitting import GIB
from meshloom.plan.forecast import Forecast
from meshloom.plan.placement import Role
from meshloom.plan.schedule import schedule
from meshloom.plan.search import Found
from meshloom.plan.weighed import Weighed

_REASONS, _REFUSALS, _NOTED = 2, 6, 8
_SMALL = 0.005
"""Share of a step below which a difference is not worth a word."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One arrangement in its place.

    Args:
        place: from 1.
        arrangement: in a few words.
        budget: in a few words.
        step_s: seconds of a step.
        margin_bytes: that are left on the fullest device in its fullest phase; none if memory is not known.
        waits: share of a step in which devices of a role wait, by its name; where some do.
        reason: why it is in this place.
        planned_only: why ``train`` does not carry it out; empty if it does.
        change: overrides that make it.
    """

    place: int
    arrangement: str
    budget: str
    step_s: float
    margin_bytes: int | None
    waits: Mapping[str, float]
    reason: str
    planned_only: tuple[str, ...]
    change: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "place": self.place,
            "arrangement": self.arrangement,
            "budget": self.budget,
            "step_s": self.step_s,
            "margin_bytes": self.margin_bytes,
            "waits": dict(self.waits),
            "reason": self.reason,
            "planned_only": list(self.planned_only),
            "change": list(self.change),
        }


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A way to share out the devices of which no arrangement fits, or a cut that cannot be."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What a search came to.

    Args:
        ranked: the fastest arrangements, each of another kind.
        refused: what is not among them, and why.
        chosen: settings of the first; none if nothing fits, or nothing could be searched.
        kept: settings that were given and kept.
        considered: arrangements that there were.
        weighed: of them, those that were forecast.
        complete: whether nothing faster can be among the others.
        problems: why nothing is chosen.
        warnings: what the choice rests on.
    """

    ranked: tuple[Ranked, ...] = ()
    refused: tuple[Refused, ...] = ()
    chosen: TrainSettings | None = None
    kept: tuple[str, ...] = ()
    considered: int = 0
    weighed: int = 0
    complete: bool = True
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "ranking": [ranked.as_json() for ranked in self.ranked],
            "refused": [{"what": refused.what, "why": refused.why} for refused in self.refused],
            "chosen": list(self.ranked[0].change) if self.chosen is not None else None,
            "kept": list(self.kept),
            "considered": self.considered,
            "weighed": self.weighed,
            "complete": self.complete,
        }


def rank(
    settings: TrainSettings, found: Found, planned_only: Mapping[int, tuple[str, ...]], *, memory: int | None
) -> tuple[Ranked, ...]:
    """What was found in its order, each with the reason for its place.

    Args:
        settings: that the search began with.
        found: of it.
        planned_only: by place from 0, why ``train`` does not carry it out.
        memory: bytes of a device; none if that is not known.
    """
    best = found.best[0] if found.best else None
    ranked = []
    for at, weighed in enumerate(found.best):
        change = {**weighed.arrangement.change(settings), **weighed.budget.change(settings)}
        ranked.append(
            Ranked(
                place=at + 1,
                arrangement=weighed.arrangement.words(),
                budget=weighed.budget.words(),
                step_s=weighed.step_s,
                margin_bytes=None if memory is None else weighed.margin,
                waits=_waits(weighed),
                reason=_made_of(weighed) if best is weighed or best is None else _slower(best, weighed),
                planned_only=planned_only.get(at, ()),
                change=overrides(
                    {path: it for path, it in change.items() if _differs(weighed.settings, settings, path)}
                ),
            )
        )
    return tuple(ranked)


def _differs(one: TrainSettings, other: TrainSettings, path: str) -> bool:
    """Whether a value differs; one that was kept does not."""
    values: list[Any] = [one, other]
    for name in path.split("."):
        values = [getattr(value, name) for value in values]
    return values[0] != values[1]


def refusals(found: Found, notes: Mapping[str, None]) -> tuple[Refused, ...]:
    """What is not in a ranking: pools that do not fit, those that lack least first; then cuts that cannot be.

    Args:
        found: of the search.
        notes: of cuts that cannot be, in words.
    """
    nearest = sorted(found.lacking, key=lambda pair: pair[1].lacking)[:_REFUSALS]
    pools = [
        Refused(
            what=f"{arrangement.words()}, as frugal as can be",
            why=f"{lack.what} on devices of {', '.join(lack.roles)}",
        )
        for arrangement, lack in nearest
    ]
    left = len(found.lacking) - len(nearest)
    if left > 0:
        pools.append(Refused(what=f"{left} other ways to share out the devices", why="they lack more memory"))
    cuts = [Refused(what=what, why=why) for what, _, why in (note.partition(": ") for note in list(notes)[:_NOTED])]
    return (*pools, *cuts)


def _parts(ahead: Forecast) -> dict[tuple[str, str], float]:
    """Seconds of each part of each role's phase, and of offload."""
    parts: dict[tuple[str, str], float] = {}
    for phase in ahead.phases:
        for part in phase.parts:
            key = (str(phase.phase), part.name)
            parts[key] = parts.get(key, 0.0) + part.seconds
    for moved in ahead.offload:
        parts["offload", moved.name] = parts.get(("offload", moved.name), 0.0) + moved.seconds
    return parts


def _made_of(weighed: Weighed) -> str:
    """What the best step is made of."""
    phases = {str(phase.phase): 0.0 for phase in weighed.forecast.phases}
    for phase in weighed.forecast.phases:
        phases[str(phase.phase)] += phase.seconds
    longest = sorted(phases, key=lambda name: -phases[name])[:_REASONS]
    return "the fastest: " + ", ".join(f"{name} {phases[name]:.3g} s" for name in longest)


def _slower(best: Weighed, other: Weighed) -> str:
    """Why an arrangement is slower than the best: its waits, and the parts that take longest more."""
    more = other.step_s - best.step_s
    before, after = _parts(best.forecast), _parts(other.forecast)
    diffs = {key: seconds - before.get(key, 0.0) for key, seconds in after.items()}
    worst = sorted((key for key in diffs if diffs[key] > _SMALL * best.step_s), key=lambda key: -diffs[key])
    words = [f"{key[0]}: {key[1]} +{diffs[key]:.2g} s" for key in worst[:_REASONS]]
    words += [f"{role} waits {share:.0%} of the step" for role, share in _waits(other).items() if share > 0.1]
    margin = (best.margin - other.margin) / GIB
    if not words and margin > 1:
        words.append(f"{margin:.1f} GiB less are left")
    return f"+{more:.2g} s ({more / best.step_s:.1%}): " + (", ".join(words) or "many small parts")


def _waits(weighed: Weighed) -> dict[str, float]:
    """Share of a step in which a role that has devices of its own has nothing to do."""
    arrangement = weighed.arrangement
    if arrangement.colocated:
        return {}
    step = schedule(weighed.settings, arrangement.layout, weighed.forecast)
    found = {}
    for role in (Role.ACTOR, Role.ROLLOUT):
        waits = sum(wait.stop - wait.start for wait in step.waits(str(role)))
        found[str(role)] = waits / step.end if step.end else 0.0
    return found
