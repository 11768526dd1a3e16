"""Supervised fine-tuning over devices: its one model on all of them.

Owns: the layout, the batch over devices, the memory of each. Refuses to know: how
anything is executed. Always holds: the rules are those of a model that is trained in reinforcement learning; a change that is
suggested was made and checked: it ends its fault.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshloom.config.cluster_settings import ClusterSettings, ParallelSettings
from meshloom.config.problems import Problem
from meshloom.config.settings import (
    AlgorithmSettings,
    BatchSettings,
    KlPlace,
    RolloutSettings,
    SftSettings,
    TrainSettings,
)
from meshloom.plan.checks import Findings
from meshloom.plan.device_checks import cut_faults, problem_of, role_layout
from meshloom.plan.faults import Change, Fault, overrides, with_values
from meshloom.plan.layout import Layout, RoleLayout
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.memory import on_gpu, trainable_parameters
from meshloom.plan.meshes import Divisible
from meshloom.plan.model_folder import ModelFolder
from meshloom.plan.parameters import UnknownFamily, count_parameters
from meshloom.plan.placement import Role, devices_of_machine, topology_of
from meshloom.plan.recompute import Recompute
from meshloom.plan.residency import Phase
from meshloom.plan.role_numbers import model_role
from meshloom.plan.sharded_memory import DeviceLedger, device_ledger
from meshloom.plan.spread import degrees_of, model_lines

_GIB = 2**30
_SUGGESTIONS, _TRIED = 3, 24
_UPDATE_PATH = "batch.samples_per_update"


@dataclass(frozen=True, kw_only=True)
class SftLaidOut:
    """A supervised run over devices.

    Args:
        layout: of its model; without it where that cannot be laid out.
        problems: why not.
        lines: of the batch over devices.
    """

    layout: Layout
    problems: tuple[Problem, ...]
    lines: tuple[LedgerLine, ...]


def as_trained(settings: SftSettings) -> TrainSettings:
    """The same run as the training of an actor, by whose rules its devices and memory are counted: a sample is a prompt with
    one response, an update a step."""
    batch = settings.batch
    view = TrainSettings(
        run_dir=settings.run_dir,
        seed=settings.seed,
        device=settings.device,
        device_memory_bytes=settings.device_memory_bytes,
        model=settings.model,
        data=settings.data,
        optimizer=settings.optimizer,
        algorithm=AlgorithmSettings(kl=KlPlace.NONE),
        rollout=RolloutSettings(max_response_tokens=settings.data.max_response_tokens),
        batch=BatchSettings(
            prompts_per_step=batch.samples_per_update,
            samples_per_prompt=1,
            tokens_per_microbatch=batch.tokens_per_microbatch,
            samples_per_microbatch=batch.samples_per_microbatch,
            steps=batch.steps,
        ),
        cluster=ClusterSettings(
            **{name: getattr(settings.cluster, name) for name in type(settings.cluster).model_fields}
        ),
        parallel=ParallelSettings(actor=settings.parallel.actor),
    )
    view._provenance = settings.provenance
    return view


def layout_of_sft(settings: SftSettings) -> Layout | None:
    """The layout of a supervised run over several devices, whatever its model is; none for one device."""
    layout = lay_out_sft(settings, None, devices_of_machine()).layout
    return layout if layout.topology.num_devices > 1 else None


def lay_out_sft(settings: SftSettings, model: Divisible | None, machine: int) -> SftLaidOut:
    """Put the model on all devices.

    Args:
        settings: of the run.
        model: of the run; none if it is not known.
        machine: devices that this machine has, for settings that leave it open.
    """
    view = as_trained(settings)
    layout, faults = _faults(view, model, machine)
    problems = tuple(problem_of(view, fault, tuple(_ending(view, fault, model, machine))) for fault in faults)
    found = layout.role(Role.ACTOR)
    return SftLaidOut(layout=layout, problems=problems, lines=() if found is None else tuple(_lines(view, found)))


def _faults(view: TrainSettings, model: Divisible | None, machine: int) -> tuple[Layout, list[Fault]]:
    topology, faults = topology_of(view, machine)
    devices = topology.all_devices
    wrong = list(cut_faults(Role.ACTOR, devices, view, topology, model))
    if any(fault.code in ("G001", "G002", "G003") for fault in wrong):
        return Layout(topology=topology, roles=()), [*faults, *wrong]
    found = replace(role_layout(Role.ACTOR, devices, degrees_of(view, Role.ACTOR)), busy=(str(Phase.UPDATE),))
    return Layout(topology=topology, roles=(found,)), [*faults, *wrong, *_idle(view, found)]


def _idle(view: TrainSettings, found: RoleLayout) -> Iterator[Fault]:
    """An update with fewer samples than replicas."""
    samples, replicas = view.batch.prompts_per_step, found.replicas
    if samples < replicas:
        yield Fault(
            code="B010",
            path=_UPDATE_PATH,
            what=f"{samples} samples an update over {replicas} replicas leaves some with none",
            why=f"the model has {len(found.devices):,} devices, as {found.mesh}; each replica needs a sample",
            changes=lambda: ({_UPDATE_PATH: replicas},),
        )


def _ending(view: TrainSettings, fault: Fault, model: Divisible | None, machine: int) -> Iterable[tuple[str, ...]]:
    """Changes that end a fault and bring no other, as overrides."""
    before = {found.key for found in _faults(view, model, machine)[1]}
    good: list[tuple[str, ...]] = []
    for change in list(fault.changes())[:_TRIED]:
        after = {found.key for found in _faults(_changed(view, change), model, machine)[1]}
        if fault.key not in after and after <= before:
            good.append(overrides(change))
    return dict.fromkeys(good[:_SUGGESTIONS])


def _changed(view: TrainSettings, change: Change) -> TrainSettings:
    own = {"batch.prompts_per_step" if path == _UPDATE_PATH else path: value for path, value in change.items()}
    return with_values(view, own)


def _lines(view: TrainSettings, found: RoleLayout) -> Iterator[LedgerLine]:
    """The batch over devices. A step is an update, and no log-probs are computed before it."""
    for line in model_lines(view, found):
        if "log-prob" in line.name or line.name.endswith("per step"):
            continue
        if line.name == f"{Role.ACTOR} devices":
            origin = view.provenance.of("cluster.devices_per_node")
            line = replace(line, formula="cluster.nodes × cluster.devices_per_node", source=origin)
        yield line


def sft_memory(
    found: Findings, settings: SftSettings, layout: Layout, folder: ModelFolder, memory: int | None
) -> tuple[bool, list[LedgerLine]]:
    """Whether layers are recomputed, and what each device holds; refused where that is more than it has.

    Args:
        found: takes the refusal.
        settings: of the run.
        layout: of its model.
        folder: the model.
        memory: bytes of a GPU; none if that is not known.
    """
    given, role = settings.model.gradient_checkpointing, layout.role(Role.ACTOR)
    memory = memory if on_gpu(settings.device) else None
    try:
        ledgers = {} if role is None else {on: _ledger(settings, role, folder, on, memory) for on in (False, True)}
    except UnknownFamily as error:
        found.warn("M002", "model.path", f"the plan has no ledger of memory over its devices: {error}")
        ledgers = {}
    plain = ledgers.get(False)
    lacks = plain is not None and memory is not None and plain.needed(Phase.UPDATE) > memory
    on = lacks if given == "auto" else given
    formula = "each layer, in the backward pass, as given"
    if given == "auto":
        known = plain is not None and memory is not None
        formula = "auto: follows from the devices' memory (device_memory_bytes)"
        if known:
            fits = "does not fit" if lacks else "fits"
            formula = f"auto: without it, an update {fits} in the {memory / _GIB:,.1f} GiB of a device"
    chosen = Recompute(on=on, is_open=given == "auto" and (plain is None or memory is None), formula=formula)
    lines = [chosen.line(settings.provenance.of("model.gradient_checkpointing"))]
    if (ledger := ledgers.get(on)) is None:
        return on, lines
    _refuse_lack(found, settings, ledger)
    section = f"memory of each of {', '.join(layout.topology.entries(role.devices)[:4])} ({Role.ACTOR})"
    lines += [replace(line, section=section) for line in ledger.lines() if _concerns(line)]
    formula = "in update"
    peak = ledger.held(Phase.UPDATE)
    lines.append(LedgerLine(section=section, name="peak", value=peak, formula=formula, source=DERIVED, unit="bytes"))
    return on, lines


def _concerns(line: LedgerLine) -> bool:
    """Lines of phases that a supervised run does not have are left out."""
    _, _, phase = line.name.rpartition(" in ")
    return phase == Phase.UPDATE if line.name.startswith(("held in", "margin in")) else True


def _ledger(
    settings: SftSettings, found: RoleLayout, folder: ModelFolder, recompute: bool, memory: int | None
) -> DeviceLedger:
    adapters = None if settings.model.lora is None else trainable_parameters(settings, folder)
    role = model_role(
        as_trained(settings),
        found,
        count_parameters(folder.config),
        recompute=recompute,
        adapters=adapters,
        over_ranks=True,
    )
    return device_ledger([replace(role, computes=(Phase.UPDATE,), lends=())], memory_bytes=memory)


def _refuse_lack(found: Findings, settings: SftSettings, ledger: DeviceLedger) -> None:
    has, held = ledger.memory_bytes, ledger.held(Phase.UPDATE)
    if has is None or ledger.needed(Phase.UPDATE) <= has:
        return
    largest = sorted((each for each in ledger.holdings if Phase.UPDATE in each.phases), key=lambda each: -each.bytes)
    what = f"an update holds {held / _GIB:,.1f} GiB on a device of {has / _GIB:,.1f} GiB"
    why = ", ".join(f"{each.name} {each.bytes / _GIB:,.1f} GiB" for each in largest[:4] if each.bytes)
    ways = ["a smaller batch.tokens_per_microbatch", "more cluster.devices_per_node", "parallel.actor.tensor=2"]
    if settings.model.gradient_checkpointing is False:
        ways.insert(0, "model.gradient_checkpointing=true")
    if settings.model.lora is None:
        ways.append("model.lora.rank=16")
    fix = ", or ".join(ways)
    if held > has:
        found.refuse("M007", "device_memory_bytes", what, why=why, fix=fix)
    else:
        found.warn("M008", "device_memory_bytes", what, why=f"{why}; libraries come on top", fix=fix)
