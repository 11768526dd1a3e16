"""How far rollouts run ahead of training, by rule.

Owns: what ``algorithm.max_lag_versions`` means for a run, and where it cannot work. Refuses to know: how long anything takes.
Always holds: the rule is the control loop's own (``loop.control``).

Code: A011 a lag on devices that both sides share.
"""

from collections.abc import Iterator

from meshloom.config.settings import BatchSettings, TrainSettings
from meshloom.plan.faults import Change, Fault
from meshloom.plan.layout import Layout, share_devices
from meshloom.plan.placement import Role, placements
from meshloom.plan.topology import DeviceSet

LAG = "algorithm.max_lag_versions"


def most_updates(batch: BatchSettings) -> int:
    """Optimizer updates of a step, at most: each is a weights version."""
    per_update = batch.prompts_per_update or batch.prompts_per_step
    return -(-batch.prompts_per_step // per_update) * batch.epochs_per_step


def steps_ahead(settings: TrainSettings) -> int:
    """Steps whose rollouts may be in flight, beside the step that is trained next."""
    return settings.algorithm.max_lag_versions // most_updates(settings.batch)


def generates_apart(layout: Layout) -> bool:
    """Whether the rollout's devices do nothing else. A model that judges samples there waits for the next rollout."""
    rollout = layout.role(Role.ROLLOUT)
    others = [found for found in layout.roles if found.role not in (Role.ROLLOUT, Role.REWARD)]
    return rollout is not None and not any(share_devices(rollout, found) for found in others)


def runs_ahead(settings: TrainSettings, layout: Layout) -> bool:
    """Whether generation goes on while the other roles work."""
    return steps_ahead(settings) > 0 and generates_apart(layout)


def lag_faults(settings: TrainSettings, layout: Layout) -> Iterator[Fault]:
    """A lag where generation and training take turns."""
    rollout, actor = layout.role(Role.ROLLOUT), layout.role(Role.ACTOR)
    if not settings.algorithm.max_lag_versions or rollout is None or actor is None:
        return
    if not share_devices(rollout, actor):
        return

    def changes() -> Iterator[Change]:
        yield {LAG: 0}
        yield from _apart(settings, layout)

    yield Fault(
        code="A011",
        path=LAG,
        what=f"samples of this run are never older than its weights, so {LAG} must be 0",
        why="generation and training take turns on the devices that they share",
        changes=changes,
    )


def _apart(settings: TrainSettings, layout: Layout) -> Iterator[Change]:
    """Generation on the second half of the devices, everything else on the first."""
    total = layout.topology.num_devices
    if total < 2:
        return
    first, second = (
        tuple(int(name) if name.isdecimal() else name for name in layout.topology.entries(DeviceSet.of([half])))
        for half in (range(total // 2), range(total // 2, total))
    )
    roles = (Role.ACTOR, Role.REFERENCE, Role.CRITIC)
    here = [role for role in roles if role is Role.ACTOR or layout.role(role) is not None]
    given = placements(settings)
    yield {f"placement.{role}": first for role in here if given[role] != first} | {"placement.rollout": second}
