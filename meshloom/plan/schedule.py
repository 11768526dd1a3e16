"""When each role works in a step, and which role waits for which.

Owns: the order of the phases as stretches of time. Refuses to know: how long anything takes. Always holds: roles on one device
take turns; phases follow each other, but for generation with a lag of a version or more on devices of its own, which goes on
while the others train, and for reward models on devices that do not generate, which score meanwhile; the end is that of the
forecast's step, less what a step costs beside its phases.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshloom.config.settings import TrainSettings
from meshloom.plan.forecast import Forecast
from meshloom.plan.lag import runs_ahead
from meshloom.plan.layout import Layout, share_devices
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.plan.reward_time import scores_meanwhile


@dataclass(frozen=True, kw_only=True)
class Span:
    """A role at work.

    Args:
        role: which; ``offload`` for what is moved between phases.
        phase: of the step; none for offload.
        start: seconds from the step's begin.
        stop: seconds.
    """

    role: str
    phase: Phase | None
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A role that has nothing to do.

    Args:
        role: which.
        start: seconds from the step's begin.
        stop: seconds.
        on: who works meanwhile, longest first, as ``rollout: generate``.
    """

    role: str
    start: float
    stop: float
    on: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step in time.

    Args:
        spans: all work, by its begin.
        end: seconds of all of it.
        lagged: whether generation goes on while the others train.
    """

    spans: tuple[Span, ...]
    end: float
    lagged: bool

    def of(self, role: str) -> tuple[Span, ...]:
        """A role's work, by its begin."""
        return tuple(span for span in self.spans if span.role == role)

    def waits(self, role: str) -> tuple[Wait, ...]:
        """When a role has nothing to do, and who works then."""
        found: list[Wait] = []
        at = 0.0
        for start, stop in [*((span.start, span.stop) for span in self.of(role)), (self.end, self.end)]:
            if start - at > 1e-9:
                found.append(Wait(role=role, start=at, stop=start, on=self._working(role, at, start)))
            at = max(at, stop)
        return tuple(found)

    def _working(self, role: str, start: float, stop: float) -> tuple[str, ...]:
        shares: dict[str, float] = {}
        for span in self.spans:
            share = min(span.stop, stop) - max(span.start, start)
            if span.role != role and share > 1e-9:
                name = span.role if span.phase is None else f"{span.role}: {span.phase}"
                shares[name] = shares.get(name, 0.0) + share
        return tuple(sorted(shares, key=lambda name: -shares[name]))


def schedule(settings: TrainSettings, layout: Layout, forecast: Forecast) -> Schedule:
    """A step in time.

    Args:
        settings: of the run, for its lag.
        layout: where its roles are.
        forecast: how long each phase of each role takes.
    """
    lagged = runs_ahead(settings, layout)
    others = [phase for phase in Phase if phase not in (Phase.GENERATE, Phase.SCORE)]
    meanwhile = scores_meanwhile(layout)
    sampled, generated = _run((Phase.GENERATE,) if meanwhile else (Phase.GENERATE, Phase.SCORE), layout, forecast, 0.0)
    if meanwhile and lagged and share_devices(layout.role(Role.REWARD), layout.role(Role.ACTOR)):
        others.insert(0, Phase.SCORE)
    elif meanwhile:
        # Group by group, the last of them when all are generated.
        begin = max(0.0, generated - forecast.seconds(Role.REWARD, Phase.SCORE))
        scored, generated = _run((Phase.SCORE,), layout, forecast, begin)
        sampled += scored
    trained, end = _run(others, layout, forecast, 0.0 if lagged else generated)
    end = max(end, generated)
    moved = sum(part.seconds for part in forecast.offload)
    offload = [Span(role="offload", phase=None, start=end, stop=end + moved)] if moved else []
    return Schedule(spans=(*sampled, *trained, *offload), end=end + moved, lagged=lagged)


def _run(phases: Sequence[Phase], layout: Layout, forecast: Forecast, start: float) -> tuple[tuple[Span, ...], float]:
    """Work of phases that follow each other, and their end."""
    spans: list[Span] = []
    for phase in phases:
        found = tuple(_phase(phase, layout, forecast, start))
        spans += found
        start = max((span.stop for span in found), default=start)
    return tuple(spans), start


def _phase(phase: Phase, layout: Layout, forecast: Forecast, start: float) -> Iterator[Span]:
    """Roles of one phase: each begins when the devices that it has are free of the roles before it."""
    free = dict.fromkeys(range(len(layout.shared)), start)
    for role in layout.roles:
        seconds = forecast.seconds(role.role, phase)
        if not seconds:
            continue
        mine = [at for at, shared in enumerate(layout.shared) if role.role in shared.roles]
        begin = max(free[at] for at in mine)
        free |= dict.fromkeys(mine, begin + seconds)
        yield Span(role=str(role.role), phase=phase, start=begin, stop=begin + seconds)
