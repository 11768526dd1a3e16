"""Laying a run out over its devices, and everything that can be wrong with that, at once.

Owns: which checks there are, and trying changes before they are suggested. Refuses to know: memory, time. Always holds: a
change that is suggested was made and checked: it ends its fault and brings no other.

Codes: T nodes, P placement, G cuts of a model, B batches over devices, F offload.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from meshloom.config.cluster_settings import OffloadPlace, RoleOffloadSettings
from meshloom.config.problems import Problem
from meshloom.config.settings import TrainSettings
from meshloom.plan.checks import Findings, check_settings
from meshloom.plan.device_map import with_device_map
from meshloom.plan.faults import Change, Fault, overrides, shortened, with_values
from meshloom.plan.lag import LAG, steps_ahead
from meshloom.plan.layout import Layout, RoleLayout, share_devices
from meshloom.plan.meshes import (
    Degrees,
    Divisible,
    Mesh,
    Pool,
    mesh_faults,
    model_mesh,
    near_degrees,
    rollout_mesh,
    sequence_mesh,
)
from meshloom.plan.placement import (
    Role,
    asks_for_devices,
    devices_of,
    placements,
    roles_of,
    topology_of,
)
from meshloom.plan.role_numbers import busy_phases
from meshloom.plan.spread import cut_change, degrees_of, even_batches, spread_faults, uneven
from meshloom.plan.topology import DeviceSet, Topology

_CHANGE = "override that is suggested"
"""Origin of a change: it is tried as the override that it would be."""
_SUGGESTIONS, _TRIED, _ROUNDS = 3, 24, 12


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """Settings over devices.

    Args:
        given: settings as they were given.
        settings: with what the device map says.
        layout: of the roles that could be laid out.
        faults: why the run cannot work.
    """

    given: TrainSettings
    settings: TrainSettings
    layout: Layout
    faults: tuple[Fault, ...]


def lay_out(settings: TrainSettings, model: Divisible | None, machine: int) -> LaidOut:
    """Put each role on its devices.

    Args:
        settings: of the run.
        model: of the run; none if it is not known.
        machine: devices that this machine has, for settings that leave it open.
    """
    given = settings
    settings, faults = with_device_map(given)
    topology, named = topology_of(settings, machine)
    faults += named
    roles: list[RoleLayout] = []
    for role in roles_of(settings):
        devices, wrong = devices_of(role, settings, topology)
        faults += [] if _goes_with_actor(role, settings) else wrong
        if devices is None:
            continue
        wrong = list(cut_faults(role, devices, settings, topology, model))
        faults += wrong
        if not any(fault.code in ("G001", "G002", "G003") for fault in wrong):
            busy = tuple(map(str, busy_phases(settings, role)))
            roles.append(replace(role_layout(role, devices, degrees_of(settings, role)), busy=busy))
    layout = Layout(topology=topology, roles=tuple(roles))
    faults += spread_faults(settings, layout, model)
    return LaidOut(given=given, settings=settings, layout=layout, faults=tuple(faults))


def _goes_with_actor(role: Role, settings: TrainSettings) -> bool:
    """Whether a role has the actor's very list, of which everything is said there."""
    given, origin = placements(settings), settings.provenance.of("placement.actor")
    same = role != Role.ACTOR and given[role] == given[Role.ACTOR] and origin != "default"
    return same and settings.provenance.of(f"placement.{role}") == origin


def role_layout(role: Role, devices: DeviceSet, degrees: Degrees) -> RoleLayout:
    """A role on its devices.

    Raises:
        ValueError: if the degrees do not go into the devices.
    """
    if role == Role.ROLLOUT:
        return RoleLayout(role=role, devices=devices, mesh=rollout_mesh(devices, degrees.tensor))
    if role == Role.REWARD:
        axes = (("dp", len(devices)),) if len(devices) > 1 else ()
        return RoleLayout(role=role, devices=devices, mesh=Mesh(axes=axes, devices=devices))
    return RoleLayout(
        role=role,
        devices=devices,
        mesh=model_mesh(devices, degrees),
        sequence_mesh=sequence_mesh(devices, degrees),
        stages_per_device=degrees.stages_per_device,
    )


def cut_faults(
    role: Role, devices: DeviceSet, settings: TrainSettings, topology: Topology, model: Divisible | None
) -> Iterator[Fault]:
    """Why a role's model cannot be cut as it is to be.

    Args:
        role: which.
        devices: that it is on.
        settings: of the run.
        topology: of the devices.
        model: of the run; none if it is not known.
    """
    pool, given = Pool.of(devices, topology), degrees_of(settings, role)
    # The critic's cut is checked where its model is the actor's; another one is looked at when it is built.
    cut_model = None if role == Role.CRITIC and settings.critic.model is not None else model

    def changes() -> Iterator[Change]:
        near = near_degrees(pool, given, cut_model, trained=role != Role.ROLLOUT)
        return (cut_change(role, given, cut) for cut in near if cut != given)

    for fault in mesh_faults(pool, given, cut_model, trained=role != Role.ROLLOUT):
        path = f"parallel.{role}.{fault.setting}"
        yield Fault(code=fault.code, path=path, what=f"{role}: {fault.what}", why=fault.why, changes=changes)


def check_devices(
    found: Findings, laid_out: LaidOut, model: Divisible | None, machine: int, num_prompts: int | None
) -> tuple[str, ...]:
    """Refuse what cannot be laid out, with changes that were tried; warn of what is likely not meant.

    Args:
        found: takes refusals and warnings.
        laid_out: the run, as ``lay_out`` returned it for the same model and machine.
        model: of the run; none if it is not known.
        machine: devices that this machine has.
        num_prompts: prompts of the training data; none if not known.

    Returns:
        Overrides that end all faults of the layout together; none where there is one alone, or no way was found.
    """
    trial = _Trial(laid_out.given, model, machine, num_prompts)
    found.problems[:] = [_with_tried(problem, trial) for problem in found.problems]
    for fault in laid_out.faults:
        changes = tuple(dict.fromkeys(overrides(change) for change in trial.suggestions(fault)))
        found.problems.append(problem_of(laid_out.settings, fault, changes))
    if asks_for_devices(laid_out.settings):
        _warn_of_layout(found, laid_out)
    if not laid_out.faults:
        _warn_of_uneven(found, laid_out, trial)
    _warn_of_offload(found, laid_out.settings)
    _check_scorers(found, laid_out)
    _warn_of_lag(found, laid_out)
    return overrides(trial.all_together()) if len(laid_out.faults) > 1 else ()


def problem_of(settings: TrainSettings, fault: Fault, suggestions: tuple[tuple[str, ...], ...]) -> Problem:
    """A fault as it is told, with changes that were tried."""
    fixes = [fault.form, *(shortened(" ".join(change)) for change in suggestions)]
    return Problem(
        code=fault.code,
        what=fault.what,
        where=f"{fault.path} ({settings.provenance.of(fault.path)})",
        why=fault.why,
        fix=", or ".join(filter(None, fixes)),
        suggestions=suggestions,
    )


def _with_tried(problem: Problem, trial: "_Trial") -> Problem:
    """A fault of batch numbers, with those of its changes that leave each device its work; with all where none does."""
    changes = {change: _numbers(change) for change in problem.suggestions}
    if problem.code not in ("B001", "B002"):
        return problem
    good = tuple(change for change, values in changes.items() if trial.harmless(values))
    if not good or len(good) == len(changes):
        return problem
    return replace(problem, suggestions=good, fix=", or ".join(" ".join(change) for change in good))


def _numbers(change: tuple[str, ...]) -> Change:
    """The values of overrides that are whole numbers."""
    pairs = (override.partition("=") for override in change)
    return {path: int(value) for path, _, value in pairs if value.isdecimal()}


class _Trial:
    """Makes changes and looks at what is then wrong."""

    def __init__(self, settings: TrainSettings, model: Divisible | None, machine: int, num_prompts: int | None) -> None:
        self.settings, self.model, self.machine, self.num_prompts = settings, model, machine, num_prompts

    @cached_property
    def before(self) -> set[tuple[str, str, str]]:
        """Everything that is wrong before a change."""
        return self._after({})[0]

    def _after(self, change: Change) -> tuple[set[tuple[str, str, str]], tuple[Fault, ...]]:
        """Everything that is wrong after a change, and the faults of the layout among it."""
        laid_out = lay_out(with_values(self.settings, change, _CHANGE), self.model, self.machine)
        batch = check_settings(laid_out.settings, self.num_prompts).problems
        keys = {(problem.code, problem.where.partition(" ")[0], "") for problem in batch}
        return {fault.key for fault in laid_out.faults} | keys, laid_out.faults

    def harmless(self, change: Change) -> bool:
        """Whether a change brings no fault that was not there before."""
        return self._after(change)[0] <= self.before

    def suggestions(self, fault: Fault) -> list[Change]:
        """Changes that end a fault and bring no other, best first. Where each brings another that was hidden so far, changes
        that end that one too belong to it."""
        tried = list(islice(fault.changes(), _TRIED))
        good = islice((change for change in tried if self._ends(fault, change)), _SUGGESTIONS)
        if found := list(good):
            return found
        completed = (self._completed(fault, change) for change in tried)
        return list(islice(filter(None, completed), 1))

    def brings_nothing(self, change: Change) -> bool:
        """Whether nothing is wrong after a change that was not before."""
        return self._after(change)[0] <= self.before

    def _ends(self, fault: Fault, change: Change) -> bool:
        after, _ = self._after(change)
        return fault.key not in after and after <= self.before

    def _completed(self, fault: Fault, change: Change) -> Change | None:
        made = dict(change)
        for _ in range(_ROUNDS):
            after, faults = self._after(made)
            if fault.key in after:
                return None
            new = [brought for brought in faults if brought.key not in self.before]
            if not new:
                return made if after <= self.before else None
            further = self._further(made, new[0], after - {new[0].key})
            if further is None:
                return None
            made = further
        return None

    def _further(
        self, made: dict[str, object], new: Fault, left: set[tuple[str, str, str]]
    ) -> dict[str, object] | None:
        """A change with one more that ends a fault, best one that leaves only what is wrong besides; none if none ends it."""
        tried = [made | dict(step) for step in islice(new.changes(), _TRIED)]
        ending = [(step, after) for step in tried if new.key not in (after := self._after(step)[0])]
        return next((step for step, after in ending if after <= left), ending[0][0] if ending else None)

    def all_together(self) -> Change:
        """A change that ends every fault of the layout, one fault after the other; empty if none was found."""
        made: dict[str, object] = {}
        for _ in range(_ROUNDS):
            trial = _Trial(with_values(self.settings, made, _CHANGE), self.model, self.machine, self.num_prompts)
            _, faults = trial._after({})
            if not faults:
                return made
            step = next((change for fault in faults for change in trial.suggestions(fault)[:1]), None)
            if step is None:
                return {}
            made |= step
        return {}


def _warn_of_layout(found: Findings, laid_out: LaidOut) -> None:
    settings, layout = laid_out.settings, laid_out.layout
    topology = layout.topology
    if idle := layout.idle:
        names = ", ".join(topology.entries(idle)[:4])
        what = f"{len(idle):,} of {topology.num_devices:,} devices have no role: {names}"
        if layout.roles and not laid_out.faults:
            found.warn("P009", "placement", what, fix="give them to a role, or leave them out of cluster")
    for role, entries in placements(settings).items():
        follows = role == Role.REFERENCE and _goes_with_actor(role, settings)
        if entries != "all" and role not in roles_of(settings) and not follows:
            what = f"placement.{role} is not used, as the run has no {role} of its own"
            found.warn("P010", f"placement.{role}", what)
        if role == Role.CRITIC and entries != "all" and settings.algorithm.advantage != "gae":
            what = f"the critic has devices, but algorithm.advantage={settings.algorithm.advantage} asks it nothing"
            found.warn("P011", "placement.critic", what, fix="take the critic out of the placement")
    for part in layout.roles:
        group = part.mesh.size("sp") * part.mesh.size("tp")
        if part.mesh.size("sp") > 1 and not Pool.of(part.devices, topology).keeps_together(group):
            what = f"{part.role}: an sp group spans two nodes"
            why = "each layer exchanges all heads of the group's tokens: across nodes that is slow"
            found.warn("G009", f"parallel.{part.role}.sequence", what, why=why)


def _warn_of_uneven(found: Findings, laid_out: LaidOut, trial: _Trial) -> None:
    if not (text := uneven(laid_out.settings, laid_out.layout)):
        return
    changes = [change for change in even_batches(laid_out.settings, laid_out.layout) if trial.brings_nothing(change)]
    what = f"{text} {'do' if ' and ' in text else 'does'} not divide evenly"
    why = "some have one more than others, which wait for them; the result is the same"
    fix = " or ".join(" ".join(overrides(change)) for change in changes)
    found.warn("B013", "batch.prompts_per_step", what, why=why, fix=f"{fix} divides evenly" if fix else "")


def _warn_of_lag(found: Findings, laid_out: LaidOut) -> None:
    """A lag that gains nothing, as the model that judges samples waits for the rollout that runs ahead."""
    layout = laid_out.layout
    rollout, actor = layout.role(Role.ROLLOUT), layout.role(Role.ACTOR)
    if not steps_ahead(laid_out.settings) or actor is None or share_devices(rollout, actor):
        return
    for role in (Role.REFERENCE, Role.CRITIC, Role.REWARD):
        if share_devices(rollout, layout.role(role)):
            what = f"the {role} shares devices with the rollout: it judges samples when the next rollout is finished"
            fix = f"placement.{role}=[{','.join(map(str, layout.topology.entries(actor.devices)))}]"
            why = "so nothing runs ahead: samples are as old as the lag lets them be, and no time is gained"
            found.warn("A013", LAG, what, why=why, fix=fix)


def _check_scorers(found: Findings, laid_out: LaidOut) -> None:
    """A reward model that waits for what runs ahead of it, and offload of one that is never brought back."""
    layout, path = laid_out.layout, "offload.reward.parameters"
    reward, rollout = layout.role(Role.REWARD), layout.role(Role.ROLLOUT)
    if reward is None or laid_out.settings.offload.reward.parameters is OffloadPlace.NONE:
        return
    if not share_devices(rollout, layout.role(Role.ACTOR)):
        what = "the reward's models cannot be moved away, as rollouts run while others train"
        why = "they are asked whenever samples are finished"
        found.refuse("W022", path, what, why=why, fix=f"{path}=none", suggestions=((f"{path}=none",),))
    elif not any(share_devices(reward, other) for other in layout.roles if other is not reward):
        what = "the reward's models are alone on their devices: moving them away makes room for nothing"
        found.warn("W023", path, what, fix=f"{path}=none")


def _warn_of_offload(found: Findings, settings: TrainSettings) -> None:
    """Offload that does nothing."""
    offload, none = settings.offload, OffloadPlace.NONE
    groups = {
        Role.ACTOR: offload.actor,
        Role.REFERENCE: offload.reference,
        Role.CRITIC: offload.critic,
        Role.REWARD: offload.reward,
    }
    if offload.reference.optimizer is not none:
        fix = "offload.reference.optimizer=none"
        found.warn("F001", "offload.reference.optimizer", "the reference has no optimizer to move away", fix=fix)
    if offload.reward.optimizer is not none:
        fix = "offload.reward.optimizer=none"
        found.warn("F001", "offload.reward.optimizer", "the reward's models have no optimizer to move away", fix=fix)
    for role, group in groups.items():
        if group != RoleOffloadSettings() and role not in roles_of(settings):
            moved = [name for name in ("parameters", "optimizer") if getattr(group, name) is not none]
            fix = " ".join(f"offload.{role}.{name}=none" for name in moved)
            found.warn("F002", f"offload.{role}", f"the run has no {role} of its own to move away", fix=fix)
    places = {place for group in groups.values() for place in (group.parameters, group.optimizer)}
    if offload.folder is not None and OffloadPlace.DISK not in places:
        what = "offload.folder is not used, as nothing goes to disk"
        found.warn("F003", "offload.folder", what, fix="offload.folder=null")
