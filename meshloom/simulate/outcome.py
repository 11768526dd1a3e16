"""What a simulated run came to.

Owns: the record of one variant, and running one. Refuses to know: how variants are chosen or shown. Always holds: numbers are
of steps in the middle of the run, when rollouts are as far ahead as they will be and all that learn do; those of a critic that
warms up come before and are told apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshloom.data.order import PromptOrder
from meshloom.loop.control import ControlLoop, Schedule
from meshloom.plan.lag import most_updates, steps_ahead
from meshloom.plan.placement import Role
from meshloom.simulate.costs import Costs
from meshloom.simulate.engine import VirtualEngine
from meshloom.simulate.lengths import LengthSource
from meshloom.simulate.stage import Counts, Mark, VirtualStage


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is simulated.

    Args:
        steps: that are counted.
        workers: that score side by side.
        in_flight: whether weights move in the midst of samples, and slots that are free take samples of the next step.
    """

    steps: int
    workers: int
    in_flight: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A variant of a run.

    Args:
        step_s: seconds of a step, on average.
        slowest_step_s: of the steps that were counted.
        tokens_per_second: of prompts and responses.
        response_tokens_per_second: of responses alone.
        idle: of each pool of devices, by its roles: the share of the time in which none of them works, on average.
        slots_used: share of the engine's slots that were in use.
        waited_s: of a step, in which training waited for a rollout.
        sync_s: of a step, from the wish to move weights until they are there.
        lags: share of samples by how many versions they were older than the weights that they began to train.
        retried: groups that were tried again, in all steps.
        dropped: groups that were given up.
        rounds: of generation a step takes.
        plan_step_s: that the plan says of a step of mean lengths.
        warmup_step_s: of the steps before, in which the critic alone learns, on average; none where there are none.
    """

    step_s: float
    slowest_step_s: float
    tokens_per_second: float
    response_tokens_per_second: float
    idle: Mapping[str, float]
    slots_used: float
    waited_s: float
    sync_s: float
    lags: Mapping[int, float]
    retried: int
    dropped: int
    rounds: float
    plan_step_s: float
    warmup_step_s: float | None = None


def simulate(costs: Costs, lengths: LengthSource, options: Options) -> Outcome:
    """Run the control loop on virtual devices."""
    settings = costs.settings
    ahead = steps_ahead(settings)
    # All steps of a long warm-up are alike.
    warmup = min(costs.warmup_steps, 1 + ahead + options.steps)
    first = warmup + 1 + ahead
    last = first + options.steps
    engine = VirtualEngine(
        costs.speed,
        costs.replicas,
        lengths,
        deadline_s=settings.rollout.deadline_s,
        workers=options.workers,
        in_flight=options.in_flight,
    )
    marks: dict[int, Mark | None] = {first: None, last: None}
    stage = VirtualStage(costs, engine, most_updates(settings.batch), marks, last, warmup)
    control = control_of(costs, stage, last + 1 + ahead)
    control.run()
    begun, ended = marks[first], marks[last]
    assert begun is not None
    assert ended is not None
    ends = stage.ends[first - 1 : last]
    slowest = max(after - before for before, after in zip(ends, ends[1:], strict=False))
    counts = ended.counts.since(begun.counts)
    found = _outcome(costs, options, counts, ended.now - begun.now, slowest)
    return replace(found, warmup_step_s=stage.ends[warmup - 1] / warmup) if warmup else found


def control_of(costs: Costs, stage: VirtualStage, steps: int) -> ControlLoop:
    """The control loop of a run, without validation and checkpoints.

    Args:
        costs: of the run.
        stage: its virtual devices.
        steps: of the run.
    """
    settings = costs.settings
    schedule = replace(Schedule.of(settings, steps), validate_first=False, validate_every=0, save_every=0)
    return ControlLoop(schedule, stage, PromptOrder(schedule.prompts_per_step, settings.seed, shuffle=False))


def _outcome(costs: Costs, options: Options, counts: Counts, seconds: float, slowest: float) -> Outcome:
    steps = options.steps
    return Outcome(
        step_s=seconds / steps,
        slowest_step_s=slowest,
        tokens_per_second=counts.tokens / seconds,
        response_tokens_per_second=counts.response_tokens / seconds,
        idle=_idle(costs, counts, seconds),
        slots_used=counts.slots_s / (seconds * costs.replicas * costs.speed.slots),
        waited_s=counts.waited_s / steps,
        sync_s=counts.synced_s / steps,
        lags={lag: number / counts.samples for lag, number in sorted(counts.lags.items())},
        retried=counts.retried,
        dropped=counts.dropped,
        rounds=counts.rounds / steps,
        plan_step_s=costs.expected.step_s,
    )


def _idle(costs: Costs, counts: Counts, seconds: float) -> dict[str, float]:
    """By the roles that share devices."""
    idle: dict[str, float] = {}
    for shared in costs.layout.shared:
        if shared.roles:
            worked = sum(counts.worked_s[str(role)] for role in shared.roles)
            worked += counts.generated_s if Role.ROLLOUT in shared.roles else 0.0
            idle[", ".join(shared.roles)] = max(0.0, 1 - worked / seconds)
    return idle
