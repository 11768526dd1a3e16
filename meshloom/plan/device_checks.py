"""Laying a run out over its devices, and everything that can be wrong with that, at once.

Owns: which checks there are, and trying changes before they are suggested. Refuses to know: memory, time. Always holds: a
change that is suggested was made and checked: it ends its fault and brings no other.

Codes: T nodes, P placement, G cuts of a model, B batches over devices, F offload.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from meshloom.config.cluster_settings import OffloadPlace, RoleOffloadSettings
from meshloom.config.problems import Problem
from meshloom.config.settings import TrainSettings
from meshloom.plan.checks import Findings, check_settings
from meshloom.plan.device_map import with_device_map
from meshloom.plan.faults import Change, Fault, overrides, with_values
from meshloom.plan.layout import Layout, RoleLayout
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
from meshloom.plan.placement import Role, asks_for_devices, devices_of, placements, roles_of, topology_of
from meshloom.plan.spread import cut_change, degrees_of, even_batches, spread_faults, uneven
from meshloom.plan.topology import DeviceSet, Topology

_CHANGE = "override that is suggested"
"""Origin of a change: it is tried as the override that it would be."""
_SUGGESTIONS, _TRIED, _ROUNDS = 3, 24, 24


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
        wrong = list(_cut_faults(role, devices, settings, topology, model))
        faults += wrong
        if not any(fault.code in ("G001", "G002", "G003") for fault in wrong):
            roles.append(_role_layout(role, devices, degrees_of(settings, role)))
    layout = Layout(topology=topology, roles=tuple(roles))
    faults += spread_faults(settings, layout, model)
    return LaidOut(given=given, settings=settings, layout=layout, faults=tuple(faults))


def _goes_with_actor(role: Role, settings: TrainSettings) -> bool:
    """Whether a role has the actor's very list, of which everything is said there."""
    given, origin = placements(settings), settings.provenance.of("placement.actor")
    same = role != Role.ACTOR and given[role] == given[Role.ACTOR] and origin != "default"
    return same and settings.provenance.of(f"placement.{role}") == origin


def _role_layout(role: Role, devices: DeviceSet, degrees: Degrees) -> RoleLayout:
    if role == Role.ROLLOUT:
        return RoleLayout(role=role, devices=devices, mesh=rollout_mesh(devices, degrees.tensor))
    if role == Role.REWARD:
        axes = (("dp", len(devices)),) if len(devices) > 1 else ()
        return RoleLayout(role=role, devices=devices, mesh=Mesh(axes=axes, devices=devices))
    around = sequence_mesh(devices, degrees)
    return RoleLayout(role=role, devices=devices, mesh=model_mesh(devices, degrees), sequence_mesh=around)


def _cut_faults(
    role: Role, devices: DeviceSet, settings: TrainSettings, topology: Topology, model: Divisible | None
) -> Iterator[Fault]:
    pool, given = Pool.of(devices, topology), degrees_of(settings, role)
    cut_model = None if role == Role.CRITIC else model

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
    for fault in laid_out.faults:
        found.problems.append(_problem(laid_out.settings, fault, trial.suggestions(fault)))
    if asks_for_devices(laid_out.settings):
        _warn_of_layout(found, laid_out)
    _warn_of_offload(found, laid_out.settings)
    return overrides(trial.all_together()) if len(laid_out.faults) > 1 else ()


def _problem(settings: TrainSettings, fault: Fault, suggestions: tuple[tuple[str, ...], ...]) -> Problem:
    fixes = [fault.form, *(" ".join(change) for change in suggestions)]
    return Problem(
        code=fault.code,
        what=fault.what,
        where=f"{fault.path} ({settings.provenance.of(fault.path)})",
        why=fault.why,
        fix=", or ".join(filter(None, fixes)),
        suggestions=suggestions,
    )


class _Trial:
    """Makes changes and looks at what is then wrong."""

    def __init__(self, settings: TrainSettings, model: Divisible | None, machine: int, num_prompts: int | None) -> None:
        self.settings, self.model, self.machine, self.num_prompts = settings, model, machine, num_prompts
        self.before = self._wrong(settings)

    def _wrong(self, settings: TrainSettings) -> set[tuple[str, str, str]]:
        laid_out = lay_out(settings, self.model, self.machine)
        faults = {fault.key for fault in laid_out.faults}
        batch = check_settings(laid_out.settings, self.num_prompts).problems
        return faults | {(problem.code, problem.where.partition(" ")[0], "") for problem in batch}

    def suggestions(self, fault: Fault) -> tuple[tuple[str, ...], ...]:
        """Changes that end a fault and bring no other, as overrides."""
        good = (change for change in islice(fault.changes(), _TRIED) if self._ends(fault, change))
        return tuple(dict.fromkeys(overrides(change) for change in islice(good, _SUGGESTIONS)))

    def _ends(self, fault: Fault, change: Change) -> bool:
        after = self._wrong(with_values(self.settings, change, _CHANGE))
        return fault.key not in after and after <= self.before

    def all_together(self) -> Change:
        """A change that ends every fault of the layout, one fault after the other; empty if none was found."""
        made: dict[str, object] = {}
        settings = self.settings
        for _ in range(_ROUNDS):
            faults = lay_out(settings, self.model, self.machine).faults
            if not faults:
                return made
            trial = _Trial(settings, self.model, self.machine, self.num_prompts)
            step = next(
                (
                    change
                    for fault in faults
                    for change in islice(fault.changes(), _TRIED)
                    if trial._ends(fault, change)
                ),
                None,
            )
            if step is None:
                return {}
            made |= step
            settings = with_values(settings, step, _CHANGE)
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
        if entries != "all" and role not in roles_of(settings):
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
    if not laid_out.faults and (text := uneven(settings, layout)):
        changes = [" ".join(overrides(change)) for change in even_batches(settings, layout)]
        why = "some have one more than others, which wait for them; the result is the same"
        what = f"{text} {'do' if ' and ' in text else 'does'} not divide evenly"
        fix = f"{' or '.join(changes)} divides evenly"
        found.warn("B013", "batch.prompts_per_step", what, why=why, fix=fix)


def _warn_of_offload(found: Findings, settings: TrainSettings) -> None:
    """Offload that does nothing."""
    offload, none = settings.offload, OffloadPlace.NONE
    groups = {Role.ACTOR: offload.actor, Role.REFERENCE: offload.reference, Role.CRITIC: offload.critic}
    if offload.reference.optimizer is not none:
        found.warn("F001", "offload.reference.optimizer", "the reference has no optimizer to move away")
    for role, group in groups.items():
        if group != RoleOffloadSettings() and role not in roles_of(settings):
            found.warn("F002", f"offload.{role}", f"the run has no {role} of its own to move away")
    places = {place for group in groups.values() for place in (group.parameters, group.optimizer)}
    if offload.folder is not None and OffloadPlace.DISK not in places:
        found.warn("F003", "offload.folder", "offload.folder is not used, as nothing goes to disk")
