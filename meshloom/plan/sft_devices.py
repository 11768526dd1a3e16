"""Supervised fine-tuning over devices: its one model on all of them.

Owns: the layout, the batch over devices. Refuses to know: bytes and seconds (``plan.sft_outlook``), how anything is
executed. Always holds: the rules are those of a model that is trained in reinforcement learning; a change that is
suggested was made and checked: it ends its fault.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshloom.config.cluster_settings import OffloadSettings, ParallelSettings
from meshloom.config.problems import Problem
from meshloom.config.settings import (
    AlgorithmSettings,
    BatchSettings,
    KlPlace,
    RolloutSettings,
    SftSettings,
    TrainSettings,
)
from meshloom.plan.device_checks import cut_faults, problem_of, role_layout
from meshloom.plan.faults import Change, Fault, overrides, with_values
from meshloom.plan.layout import Layout, RoleLayout
from meshloom.plan.ledger import LedgerLine
from meshloom.plan.meshes import Divisible
from meshloom.plan.placement import Role, devices_of_machine, topology_of
from meshloom.plan.residency import Phase
from meshloom.plan.spread import degrees_of, model_lines

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
        cluster=settings.cluster,
        parallel=ParallelSettings(actor=settings.parallel.actor),
        offload=OffloadSettings(actor=settings.offload.actor, folder=settings.offload.folder),
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
