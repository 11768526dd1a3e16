"""Which variants of a run are compared: as given, all roles on the same devices, generation on devices of its own, with lags.

Owns: the choice, and the change that each is. Refuses to know: how one is simulated or shown. Always holds: a variant was laid
out by the plan; one that the plan refuses, or whose devices do not hold it, is named with the reason and not simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.settings import TrainSettings
from meshloom.plan.device_checks import lay_out
from meshloom.plan.device_kind import with_device_kind
from meshloom.plan.faults import Change, with_values
from meshloom.plan.fitting import GIB, Case, Look
from meshloom.plan.hardware import find_device
from meshloom.plan.lag import LAG, most_updates
from meshloom.plan.layout import share_devices
from meshloom.plan.memory import on_gpu
from meshloom.plan.model_folder import read_model_folder
from meshloom.plan.outlook import case_of
from meshloom.plan.placement import Role, devices_of_machine, placements, roles_of
from meshloom.plan.residency import Phase
from meshloom.plan.topology import DeviceSet

_TRAINING = (Role.ACTOR, Role.REFERENCE, Role.CRITIC)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run.

    Args:
        name: in words.
        change: of the given settings.
        look: the run on its devices.
        refused: why it is not simulated; empty if it is.
    """

    name: str
    change: Change
    look: Look
    refused: str = ""


def given_case(settings: TrainSettings) -> Case:
    """A run whose variants can be laid out and counted.

    Args:
        settings: of the run, which its plan lets pass.

    Raises:
        UserError: if the kind of its devices is not given.
    """
    settings = lay_out(with_device_kind(settings, None), None, devices_of_machine()).settings
    if settings.cluster.device is None or find_device(settings.cluster.device) is None or not on_gpu(settings.device):
        fix = "give cluster.device or --device-kind, such as h200"
        raise UserError(
            "a simulation needs the kind of the devices, which must be GPUs", where="cluster.device", fix=fix
        )
    return case_of(
        settings, read_model_folder(Path(settings.model.path), needs_weights=False), settings.device_memory_bytes
    )


def variants(case: Case, lags: Sequence[int], rollout_devices: Sequence[int] | None) -> list[Variant]:
    """What is compared, the given run first.

    Args:
        case: the given run.
        lags: in steps, of placements that allow them.
        rollout_devices: numbers of devices that generation may have of its own; none for a quarter, a half and three quarters.
    """
    given = case.look({})
    found = [_variant(case, f"as given: {_described(given)}", {})]
    apart = not share_devices(given.layout.role(Role.ROLLOUT), given.layout.role(Role.ACTOR))
    updates, own = most_updates(case.settings.batch), case.settings.algorithm.max_lag_versions
    if apart:
        for lag in (lag * updates for lag in lags):
            if lag != own:
                found.append(_variant(case, f"as given, but {_lag(lag, updates)}", {LAG: lag}))
        shared = {f"placement.{role}": "all" for role in _here(case)} | {LAG: 0}
        found.append(_variant(case, "all roles share all devices", shared))
    for count in _splits(given, rollout_devices):
        placement = _split(case, given, count)
        same = all(
            placements(case.settings)[Role(path.rpartition(".")[2])] == value for path, value in placement.items()
        )
        if not (same and apart):
            for lag in (lag * updates for lag in lags):
                total = given.layout.topology.num_devices
                name = f"{total - count} train, {count} generate, {_lag(lag, updates)}"
                found.append(_variant(case, name, {**placement, **_whole(case, total - count), LAG: lag}))
    return found


def _here(case: Case) -> tuple[Role, ...]:
    return tuple(role for role in roles_of(case.settings) if role != Role.REWARD)


def _lag(versions: int, updates: int) -> str:
    if not versions:
        return "in turns"
    steps = versions // updates
    return f"lag {versions} ({steps} step{'s' if steps != 1 else ''})" if updates > 1 else f"lag {versions}"


def _described(look: Look) -> str:
    rollout, actor = look.layout.role(Role.ROLLOUT), look.layout.role(Role.ACTOR)
    if rollout is None or actor is None:
        return "not laid out"
    total = look.layout.topology.num_devices
    if share_devices(rollout, actor):
        return "one device" if total == 1 else f"{len(rollout.devices)} generate, {len(actor.devices)} train, in turns"
    updates = most_updates(look.settings.batch)
    turns = _lag(look.settings.algorithm.max_lag_versions, updates)
    return f"{len(actor.devices)} train, {len(rollout.devices)} generate, {turns}"


def _splits(given: Look, chosen: Sequence[int] | None) -> Iterator[int]:
    """Numbers of devices for generation: whole nodes where there are several."""
    topology, total = given.layout.topology, given.layout.topology.num_devices
    unit = topology.devices_per_node if topology.num_nodes > 1 else given.settings.parallel.rollout.tensor
    wanted = (
        chosen
        if chosen is not None
        else [total // 4 // unit * unit, total // 2 // unit * unit, total * 3 // 4 // unit * unit]
    )
    for count in dict.fromkeys(wanted):
        if 0 < count < total:
            yield count
        elif chosen is not None:
            what = f"{count} devices for generation leave none of {total} for training"
            fix = f"1 to {total - 1}" if total > 1 else "give --devices-per-node, or leave --rollout-devices out"
            raise UserError(what, where="--rollout-devices", fix=fix)


def _split(case: Case, given: Look, count: int) -> Change:
    """Generation on the last devices, everything else on the first."""
    topology = given.layout.topology

    def entries(part: range) -> tuple[int | str, ...]:
        return tuple(int(name) if name.isdecimal() else name for name in topology.entries(DeviceSet.of([part])))

    cut = topology.num_devices - count
    train = {f"placement.{role}": entries(range(cut)) for role in _here(case) if role in _TRAINING}
    return {**train, "placement.rollout": entries(range(cut, topology.num_devices))}


def _whole(case: Case, devices: int) -> Change:
    """Shards over all devices, where the given ones do not go into fewer."""
    change: dict[str, object] = {}
    for role in _here(case):
        if role in _TRAINING:
            group = {Role.ACTOR: "actor", Role.REFERENCE: "reference", Role.CRITIC: "critic"}[role]
            size = getattr(case.settings.parallel, group).fsdp_size
            if size is not None and devices % size:
                change[f"parallel.{group}.fsdp_size"] = None
    return change


def _variant(case: Case, name: str, change: Change) -> Variant:
    look = case.look(change)
    return Variant(name=name, change=change, look=look, refused=_refusal(case, look, change))


def _refusal(case: Case, look: Look, change: Change) -> str:
    """Why the plan lets a variant not pass; empty if it does."""
    laid_out = lay_out(with_values(case.settings, change), case.divisible, case.machine)
    if laid_out.faults:
        return laid_out.faults[0].what
    for group in look.groups:
        phase = max(Phase, key=group.ledger.held)
        held = group.ledger.held(phase)
        if case.memory is not None and held > case.memory:
            roles = ", ".join(group.roles)
            return f"{roles}: {phase} holds {held / GIB:,.1f} GiB on a device of {case.memory / GIB:,.1f} GiB"
    return ""
