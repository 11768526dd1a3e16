"""What a supervised run holds and takes on its devices: the ledgers of memory and time.

Owns: which phases are counted, refusals where a device holds more than it has, offload that a supervised run cannot have.
Refuses to know: formulas of bytes and seconds. Always holds: the ledgers are those of an actor that is trained in reinforcement
learning, in its updates.

Codes: F003 a folder that nothing goes to, F004 weights that are to be away though every phase computes with them, M007 a
device that holds more than it has, M008 one that is likely too small.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshloom.config.cluster_settings import OffloadPlace
from meshloom.config.settings import SftSettings
from meshloom.plan.checks import Findings
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.device_kind import device_of, given_constants
from meshloom.plan.forecast import Forecast, Group, Lengths
from meshloom.plan.held_out import held_out_time
from meshloom.plan.layout import Layout, RoleLayout
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.memory import on_gpu, trainable_parameters
from meshloom.plan.meshes import Divisible
from meshloom.plan.model_folder import ModelFolder
from meshloom.plan.outlook import Outlook, time_basis
from meshloom.plan.parameters import UnknownFamily, count_parameters, is_counted
from meshloom.plan.placement import Role
from meshloom.plan.recompute import Recompute, choose_recompute
from meshloom.plan.residency import ModelRole, Phase, Residency
from meshloom.plan.role_numbers import model_role
from meshloom.plan.sft_devices import as_trained
from meshloom.plan.sft_savings import SftSavings
from meshloom.plan.sharded_memory import DeviceLedger, device_ledger, moves
from meshloom.plan.stays import sft_stays
from meshloom.plan.time import offload_time, step_seconds, update_time

_GIB = 2**30
TOKENS_A_SECOND = "tokens a second"


def check_sft_offload(found: Findings, settings: SftSettings) -> None:
    """Refuse weights that leave; warn of a folder that nothing goes to."""
    offload, path = settings.offload, "offload.actor.parameters"
    if offload.actor.parameters is not OffloadPlace.NONE:
        what = f"{path}={offload.actor.parameters} leaves a supervised run without weights"
        why = "each of its phases computes with them: passes, and the update that writes them"
        fix = f"{path}=none; less is held with offload.actor.optimizer=host, or over more cluster.devices_per_node"
        found.refuse("F004", path, what, why=why, fix=fix, suggestions=((f"{path}=none",),))
    if offload.folder is not None and OffloadPlace.DISK not in (offload.actor.parameters, offload.actor.optimizer):
        what = "offload.folder is not used, as nothing goes to disk"
        found.warn("F003", "offload.folder", what, fix="offload.folder=null")


def counts_each_device(settings: SftSettings, layout: Layout) -> bool:
    """Whether the ledgers are those of each device: over several, and where the optimizer is elsewhere."""
    return layout.topology.num_devices > 1 or any(stay.moves for stay in sft_stays(settings))


def look_at_sft(
    found: Findings, settings: SftSettings, layout: Layout, folder: ModelFolder, device_memory: int | None
) -> Outlook | None:
    """Memory and time of a supervised run; a device that holds more than it has is refused. None where its model cannot be
    counted by its config.json, and where nothing is to be said that the ledger of one device does not say.

    Args:
        found: takes refusals and warnings.
        settings: of the run, with what the kind of its devices says.
        layout: of its model.
        folder: the model.
        device_memory: bytes of a GPU; none if that is not known.

    Raises:
        UnknownShape: if ``auto`` recompute needs an estimate that config.json is not enough for.
    """
    role, each = layout.role(Role.ACTOR), counts_each_device(settings, layout)
    memory = device_memory if on_gpu(settings.device) else None
    timed = each or device_of(settings) is not None
    if role is None or not (timed or (memory is not None and is_counted(folder.config))):
        return None
    try:
        model = count_parameters(folder.config)
    except UnknownFamily as error:
        found.warn("M002", "model.path", f"the plan has no ledgers of memory and time over its devices: {error}")
        return None
    adapters = None if settings.model.lora is None else trainable_parameters(settings, folder)
    counts = _Counts(model, adapters, memory)
    chosen = (
        _recompute(settings, counts.ledger(settings, layout, recompute=False))
        if each
        else choose_recompute(settings, folder, device_memory)
    )
    of, ledger = (
        counts.role(settings, layout, recompute=chosen.on),
        counts.ledger(settings, layout, recompute=chosen.on),
    )
    held = _holds(found, settings, layout, counts, ledger, Divisible.of(folder.text_config))
    ahead, time = _time(settings, layout, of, fits=held)
    return Outlook(
        recompute=chosen,
        memory=(*_numbers(settings, of), *_memory_lines(layout, role, ledger)),
        time=tuple(time) if timed else (),
        tight=not held,
        groups=(Group(devices=role.devices, roles=(Role.ACTOR,), ledger=ledger),) if each else (),
        forecast=ahead,
    )


@dataclass(frozen=True)
class _Counts:
    """A model over devices, counted.

    Args:
        model: in numbers.
        adapters: parameters of adapters; none where all are trained.
        memory: bytes of a device; none if that is not known.
    """

    model: DecoderNumbers
    adapters: int | None
    memory: int | None

    def role(self, settings: SftSettings, layout: Layout, *, recompute: bool) -> ModelRole:
        found = layout.role(Role.ACTOR)
        return sft_role(settings, found, self.model, recompute=recompute, adapters=self.adapters)

    def ledger(self, settings: SftSettings, layout: Layout, *, recompute: bool) -> DeviceLedger:
        return device_ledger([self.role(settings, layout, recompute=recompute)], memory_bytes=self.memory)

    def needed(self, settings: SftSettings, layout: Layout) -> int:
        """Bytes that an update needs of a device, with layers recomputed where they may be."""
        recompute = settings.model.gradient_checkpointing is not False
        return self.ledger(settings, layout, recompute=recompute).needed(Phase.UPDATE)


def _holds(
    found: Findings,
    settings: SftSettings,
    layout: Layout,
    counts: _Counts,
    ledger: DeviceLedger,
    divisible: Divisible | None,
) -> bool:
    """Whether each device holds an update; what one lacks is told, with changes that are enough."""
    memory = counts.memory
    if memory is None or ledger.needed(Phase.UPDATE) <= memory:
        return True
    savings = SftSavings(settings=settings, layout=layout, model=divisible, memory=memory, needed=counts.needed)
    return _tell_lack(found, settings, ledger, savings.found())


def _time(
    settings: SftSettings, layout: Layout, role: ModelRole, *, fits: bool
) -> tuple[Forecast | None, list[LedgerLine]]:
    """The forecast of a step, where the kind of the devices is known and they hold the run, and the time ledger."""
    kind, topology = device_of(settings), layout.topology
    lines = [time_basis(settings, fits=fits, several=topology.num_devices > 1)]
    if kind is None or not fits:
        return None, lines
    given, lengths = given_constants(settings), Lengths.most(as_trained(settings))
    cluster = Cluster(device=kind, devices_per_node=topology.devices_per_node)
    ahead = sft_forecast(settings, layout, role, lengths, cluster, given.constants)
    lines += ahead.lines(cluster, given.constants, given.origins)
    step = next(at for at, line in enumerate(lines, 1) if (line.section, line.name) == ("time", "step"))
    lines.insert(step, _speed(settings, ahead))
    if (held_out := held_out_time(settings, role, lengths, cluster, given.constants)) is not None:
        lines.insert(step + 1, held_out)
    return ahead, lines


def sft_role(
    settings: SftSettings, found: RoleLayout, model: DecoderNumbers, *, recompute: bool, adapters: int | None
) -> ModelRole:
    """The model of a supervised run in numbers.

    Args:
        settings: of the run.
        found: the model on its devices.
        model: in numbers.
        recompute: whether layers are recomputed in the backward pass.
        adapters: parameters of adapters; none where all are trained.
    """
    over_ranks = len(found.devices) > 1
    role = model_role(as_trained(settings), found, model, recompute=recompute, adapters=adapters, over_ranks=over_ranks)
    streams = settings.offload.actor.optimizer is not OffloadPlace.NONE
    return replace(
        role, computes=(Phase.UPDATE,), lends=(), parameters_at=Residency.DEVICE, streams=streams, kept_tokens=0
    )


def sft_forecast(
    settings: SftSettings, layout: Layout, role: ModelRole, lengths: Lengths, cluster: Cluster, constants: Constants
) -> Forecast:
    """What an update of a supervised run holds and takes.

    Args:
        settings: of the run.
        layout: of its model.
        role: the model in numbers.
        lengths: of samples.
        cluster: what the devices are.
        constants: of the cost model.
    """
    ledger = device_ledger([role])
    update = update_time(role, lengths.work(settings.batch.samples_per_update, 1), cluster, constants)
    offload = tuple(offload_time(moves(ledger.holdings), cluster, constants))
    moved = sum(part.seconds for part in offload)
    devices = layout.role(Role.ACTOR).devices
    return Forecast(
        groups=(Group(devices=devices, roles=(Role.ACTOR,), ledger=ledger),),
        phases=(update,),
        offload=offload,
        lengths=lengths,
        step_s=step_seconds((), (update,), constants, offload=moved),
    )


def _speed(settings: SftSettings, ahead: Forecast) -> LedgerLine:
    tokens = settings.batch.samples_per_update * (ahead.lengths.prompt + ahead.lengths.response)
    formula = f"{tokens:,.0f} tokens of an update, prompts included, ÷ seconds of a step"
    value = round(tokens / ahead.step_s)
    return LedgerLine(section="time", name=TOKENS_A_SECOND, value=value, formula=formula, source=DERIVED, unit="tokens")


def _recompute(settings: SftSettings, plain: DeviceLedger) -> Recompute:
    """By the ledger of a device that recomputes nothing."""
    given, memory = settings.model.gradient_checkpointing, plain.memory_bytes
    if given != "auto":
        return Recompute(on=given, is_open=False, formula="each layer, in the backward pass, as given")
    if memory is None:
        formula = "auto: follows from the devices' memory (device_memory_bytes, cluster.device)"
        return Recompute(on=False, is_open=True, formula=formula)
    lacks = plain.needed(Phase.UPDATE) > memory
    words = "does not fit" if lacks else "fits"
    formula = f"auto: without it, an update {words} in the {memory / _GIB:,.1f} GiB of a device"
    return Recompute(on=lacks, is_open=False, formula=formula)


def _numbers(settings: SftSettings, role: ModelRole) -> Iterator[LedgerLine]:
    """What the formulas of a device begin with."""
    found = [
        ("parameters", role.model.total, "counted by config.json", "model.path", ""),
        (
            "tokens at once",
            role.tokens,
            "min(batch.tokens_per_microbatch, longest samples of an update); of each sequence's devices together",
            settings.provenance.of("batch.tokens_per_microbatch"),
            "tokens",
        ),
    ]
    if role.trained is not None:
        formula = "Σ rank × (inputs + outputs) over the layers with adapters"
        found.append(("trained parameters", role.trained, formula, "model.path", ""))
    for name, value, formula, source, unit in found:
        yield LedgerLine(section="memory", name=name, value=value, formula=formula, source=source, unit=unit)


def _memory_lines(layout: Layout, role: RoleLayout, ledger: DeviceLedger) -> Iterator[LedgerLine]:
    section = f"memory of each of {', '.join(layout.topology.entries(role.devices)[:4])} ({Role.ACTOR})"
    for line in ledger.lines():
        if _concerns(line):
            yield replace(line, section=section)
    rest = [("peak", ledger.held(Phase.UPDATE), "in update")]
    for place in (Residency.HOST, Residency.DISK):
        if count := ledger.elsewhere(place):
            rest.append((f"kept on the {place}", count, "for this device, but for its turns in an update"))
    for name, value, formula in rest:
        yield LedgerLine(section=section, name=name, value=value, formula=formula, source=DERIVED, unit="bytes")


def _concerns(line: LedgerLine) -> bool:
    """Lines of phases that a supervised run does not have are left out."""
    _, _, phase = line.name.rpartition(" in ")
    return phase == Phase.UPDATE if line.name.startswith(("held in", "margin in")) else True


def _tell_lack(
    found: Findings, settings: SftSettings, ledger: DeviceLedger, changes: tuple[tuple[str, ...], ...]
) -> bool:
    """Refuse what a device does not hold, or warn where it holds it without what comes on top; whether it holds it.

    Args:
        found: takes the refusal or the warning.
        settings: of the run.
        ledger: of a device that has too little.
        changes: that are enough.
    """
    has, held, needed = ledger.memory_bytes or 0, ledger.held(Phase.UPDATE), ledger.needed(Phase.UPDATE)
    largest = sorted((each for each in ledger.holdings if Phase.UPDATE in each.phases), key=lambda each: -each.bytes)
    why = ", ".join(f"{each.name} {each.bytes / _GIB:,.1f} GiB" for each in largest[:4] if each.bytes)
    fix = ", or ".join(" ".join(change) for change in changes)
    fix = fix or "no change of microbatch, recompute, offload, cut or devices is enough"
    path, size = "device_memory_bytes", f"a device of {has / _GIB:,.1f} GiB"
    if held > has:
        what = f"an update holds {held / _GIB:,.1f} GiB on {size}"
        found.refuse("M007", path, what, why=why, fix=fix, suggestions=changes)
        return False
    what = f"an update needs {needed / _GIB:,.1f} GiB with libraries and fragmentation, on {size}"
    found.warn("M008", path, what, why=why, fix=fix, suggestions=changes)
    return True
