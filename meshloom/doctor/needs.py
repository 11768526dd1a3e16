"""What a run needs of a machine, from its settings and their plan.

Owns: the list of needs. Refuses to know: what a machine has. Always holds: without settings nothing but meshloom's own
packages is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshloom.config.cluster_settings import Fabric
from meshloom.config.problems import Problem
from meshloom.config.settings import EvalSettings, SftSettings, SourceSettings, TrainSettings
from meshloom.plan.build import Plan, build_plan
from meshloom.plan.count import count_prompts
from meshloom.plan.device_kind import with_device_kind
from meshloom.plan.memory import compute_bytes, on_gpu
from meshloom.plan.residency import Residency

RunKind = TrainSettings | SftSettings | EvalSettings
FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs.

    Args:
        gpu: whether it computes on GPUs.
        nodes: machines.
        devices_per_node: devices of each.
        tensor: most devices that exchange results inside of layers.
        device_bytes: memory that its devices are said to have; none if that is not given.
        device_kind: what its devices are said to be; none if that is not given.
        packages: optional packages by their names here, with the setting that asks for them.
        weights_bytes: of the model in float32, which pass through the host's memory.
        offload_bytes: that offload keeps in the host's memory, for all devices of a node.
        disk_offload_bytes: that it keeps on the disk, likewise.
        checkpoint_bytes: of one checkpoint; 0 where nothing is trained.
        checkpoints: that are on the disk at once.
        run_dir: folder of the run.
        offload_dir: folder of what is on the disk; none if nothing is.
        node_names: of its machines, where they are given.
        asks_ray: whether a Ray cluster knows the nodes.
        problems: of its plan.
    """

    gpu: bool = False
    nodes: int = 1
    devices_per_node: int = 1
    tensor: int = 1
    device_bytes: int | None = None
    device_kind: str | None = None
    packages: tuple[tuple[str, str], ...] = ()
    weights_bytes: int = 0
    offload_bytes: int = 0
    disk_offload_bytes: int = 0
    checkpoint_bytes: int = 0
    checkpoints: int = 0
    run_dir: Path | None = None
    offload_dir: Path | None = None
    node_names: tuple[str, ...] = ()
    asks_ray: bool = False
    problems: tuple[Problem, ...] = ()

    @property
    def many(self) -> bool:
        """Whether several processes work on one machine or more."""
        return self.nodes * self.devices_per_node > 1


def needs_of(settings: RunKind, device_memory: int | None) -> Needs:
    """What a run needs.

    Args:
        settings: of the run.
        device_memory: bytes of this machine's smallest GPU, for its plan; none if that is not known.
    """
    given = settings if isinstance(settings, EvalSettings) else with_device_kind(settings, device_memory)
    plan = build_plan(settings, count_prompts(settings), device_memory)
    topology = None if plan.layout is None else plan.layout.topology
    parallel = given.parallel if isinstance(given, TrainSettings) else None
    cuts = () if parallel is None else (parallel.actor, parallel.reference, parallel.critic, parallel.rollout)
    per_node = 1 if topology is None else topology.devices_per_node
    saved = settings.checkpoint if not isinstance(settings, EvalSettings) else None
    offload_dir = None if isinstance(given, EvalSettings) else given.offload.folder
    disk = _elsewhere(plan, Residency.DISK, per_node)
    return Needs(
        gpu=on_gpu(given.device),
        nodes=1 if topology is None else topology.num_nodes,
        devices_per_node=per_node,
        tensor=max((cut.tensor for cut in cuts), default=1),
        device_bytes=settings.device_memory_bytes,
        device_kind=None if isinstance(given, EvalSettings) else given.cluster.device,
        packages=tuple(_packages(given)),
        weights_bytes=_parameters(plan) * FLOAT32,
        offload_bytes=_elsewhere(plan, Residency.HOST, per_node),
        disk_offload_bytes=disk,
        checkpoint_bytes=_checkpoint_bytes(given, plan),
        checkpoints=0 if saved is None else saved.keep_last + saved.keep_best,
        run_dir=Path(settings.run_dir),
        offload_dir=Path(offload_dir or f"{settings.run_dir}/offload") if disk else None,
        node_names=() if topology is None else topology.names,
        asks_ray=isinstance(given, TrainSettings) and given.fabric is Fabric.RAY,
        problems=plan.problems,
    )


def _parameters(plan: Plan) -> int:
    counted = next((line.value for line in plan.lines if line.name == "parameters"), None)
    return counted if isinstance(counted, int) else 0


def _elsewhere(plan: Plan, place: Residency, devices_per_node: int) -> int:
    """Bytes that the devices of a node keep in another place, as if all were like the fullest group."""
    groups = () if plan.outlook is None else plan.outlook.groups
    return devices_per_node * max((group.ledger.elsewhere(place) for group in groups), default=0)


def _checkpoint_bytes(settings: RunKind, plan: Plan) -> int:
    """Weights, float32 masters and moments of what is trained, and the Hugging Face folder beside them."""
    if isinstance(settings, EvalSettings):
        return 0
    width = compute_bytes(settings.model.dtype, settings.device)
    trained = next((line.value for line in plan.lines if line.name == "trained parameters"), None)
    counted = trained if isinstance(trained, int) else _parameters(plan)
    masters = 0 if width == FLOAT32 else FLOAT32
    return counted * (2 * width + masters + 2 * FLOAT32)


def _packages(settings: RunKind) -> Iterator[tuple[str, str]]:
    """Optional packages that settings ask for, and which setting does."""
    for path, source in _sources(settings):
        if source is not None and source.dataset:
            yield "datasets", f"{path}.dataset"
        if source is not None and source.reasoning_gym:
            yield "reasoning-gym", f"{path}.reasoning_gym"
    if isinstance(settings, TrainSettings) and settings.fabric is Fabric.RAY:
        yield "ray", "fabric"
    if settings.model.attention == "flash_attn":
        yield "flash-attn", "model.attention"
    if settings.model.compile is not False and on_gpu(settings.device):
        yield "triton", "model.compile"
    if not isinstance(settings, SftSettings) and settings.rollout.engine == "vllm":
        yield "vllm", "rollout.engine"
    if not isinstance(settings, SftSettings) and settings.reward.function == "math_verify":
        yield "math-verify", "reward.function"
    if not isinstance(settings, EvalSettings):
        for name in settings.logging.loggers:
            yield name, "logging.loggers"


def _sources(settings: RunKind) -> tuple[tuple[str, SourceSettings | None], ...]:
    return ("data.train", settings.data.train), ("data.validation", settings.data.validation)
