"""Settings of a run's devices: how many there are, which role is on which, how a model is cut, what is moved away.

Owns: their defaults, ranges and meaning. Refuses to know: which devices exist, what fits on them (``meshloom.plan``).
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from meshloom.config.base import Count, Place, Settings

MOST_DEVICES = 4_096
"""Devices that a node can be said to have."""


def _as_devices(value: Any) -> Any:
    """One device as a list of one. Lists become tuples, as strict validation wants of values that are not JSON any more."""
    if isinstance(value, list):
        return tuple(value)
    alone = isinstance(value, int | str) and not isinstance(value, bool) and value != "all"
    return (value,) if alone else value


Devices = Annotated[
    Literal["all"] | tuple[int | str, ...],
    BeforeValidator(_as_devices, json_schema_input_type=Literal["all"] | int | str | tuple[int | str, ...]),
]
"""``all``, or a list in the order of the ranks: indices as this process sees them (``[0, 1]``) where there is one node, else
``node1:0``, ``node1:0-3``, ``node1:all``, ``node[1-4]:all``."""


class Fabric(StrEnum):
    """How the processes of a run over several devices are started."""

    AUTO = "auto"
    """By torchrun, srun or ``meshloom launch``, if one of them started this process; otherwise as ``local``."""
    LOCAL = "local"
    """A process for each device, on this machine, by the run itself."""
    TORCHRUN = "torchrun"
    """By torchrun."""
    SLURM = "slurm"
    """By srun."""
    RAY = "ray"
    """By a Ray cluster (extra: ray)."""


Nodes = Annotated[int, Field(ge=1, le=1_000_000)]
DevicesOfNode = Annotated[int, Field(ge=1, le=MOST_DEVICES)]


class MachineSettings(Settings):
    """The machines of a run."""

    nodes: Nodes = 1
    """Machines."""
    devices_per_node: DevicesOfNode | None = None
    """Devices of each machine that the run may use. Default: one, unless ``placement``, ``parallel`` or more nodes ask for
    several; then what this machine has, or, if it has none, as many as ``placement`` names (one, where there is none)."""
    node_names: tuple[str, ...] = ()
    """Names of the machines, as host names; ``gpu[01-16]`` names sixteen. Default: node1, node2, …"""
    ray_address: str | None = None
    """Address of the Ray cluster of ``fabric=ray``. Default: what ``RAY_ADDRESS`` says, or a cluster on this machine that is
    started for the run."""


class ClusterSettings(MachineSettings):
    """The machines of a run, and what their devices are."""

    device: str | None = None
    """Kind of the devices, such as ``h200`` or ``a100-40gb``, by which the plan knows their memory and estimates time."""
    constants: Place | None = None
    """A YAML file of the cost model's constants, as ``meshloom calibrate`` writes it. Default: those measured on one H200."""


class PlacementSettings(Settings):
    """Which devices each role is on. Roles that share devices take turns on them."""

    auto: bool = False
    """Search for the placement that takes least time: devices of each role that is left at ``all``, and those of ``parallel``,
    ``offload``, ``batch.tokens_per_microbatch``, ``model.gradient_checkpointing`` and the cache's share that are not given.
    ``placement: auto`` means the same."""
    actor: Devices = "all"
    """Devices of the model that is trained."""
    rollout: Devices = "all"
    """Devices that generate."""
    reference: Devices = "all"
    """Devices of the reference model, where ``algorithm.kl`` needs one. With adapters it is the actor without them, and is
    where the actor is."""
    critic: Devices = "all"
    """Devices of the critic, where there is one."""
    reward: Devices = "all"
    """Devices of the reward's models, where it has any: a copy of each on every device, which share the samples. Reward
    functions and judges need none."""
    map: Place | None = None
    """A device map: a YAML file that says devices and parallelism of each role outright. It beats the settings file; an
    override beats it."""


def _as_placement(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


Placement = Annotated[
    PlacementSettings,
    BeforeValidator(_as_placement, json_schema_input_type=Literal["auto"] | PlacementSettings),
]
"""``auto``, or devices of each role."""


class RoleParallelSettings(Settings):
    """How a model that is trained, or only computes log-probs, is cut."""

    fsdp_size: Count | None = None
    """Devices that a model's weights are sharded over; groups of so many hold the same weights (hybrid sharding). Default: all
    that tensor, pipeline and sequence parallelism leave."""
    tensor: Count = 1
    """Devices that a layer is split over; neighbours inside a node."""
    pipeline: Count = 1
    """Devices that the layers are split over, as stages that follow each other."""
    stages_per_device: Count = 1
    """Stages of each device of a pipeline. More than one are interleaved (Narayanan et al. 2021, arXiv:2104.04473): devices
    stand empty so many times less, exchange hidden states so many times more often, and keep more activations."""
    sequence: Count = 1
    """Devices that a sequence is split over (Ulysses, Jacobs et al. 2023, arXiv:2309.14509)."""


class SftParallelSettings(Settings):
    """How the model of a supervised run is cut."""

    actor: RoleParallelSettings = RoleParallelSettings()
    """The model that is trained."""


class RolloutParallelSettings(Settings):
    """How the model that generates is cut."""

    tensor: Count = 1
    """Devices of one replica of the engine, inside a node; there are as many replicas as they go into its devices."""


class ParallelSettings(Settings):
    """How the model of each role is cut."""

    actor: RoleParallelSettings = RoleParallelSettings()
    """The model that is trained."""
    reference: RoleParallelSettings = RoleParallelSettings()
    """The reference model."""
    critic: RoleParallelSettings = RoleParallelSettings()
    """The critic."""
    rollout: RolloutParallelSettings = RolloutParallelSettings()
    """The model that generates."""


class OffloadPlace(StrEnum):
    """Where bytes are between the phases that need them."""

    NONE = "none"
    HOST = "host"
    DISK = "disk"


class RoleOffloadSettings(Settings):
    """What of a role leaves its devices between the phases that need it."""

    parameters: OffloadPlace = OffloadPlace.NONE
    """Where its weights go."""
    optimizer: OffloadPlace = OffloadPlace.NONE
    """Where its optimizer's moments and float32 weights go; the reference has none."""


class SftOffloadSettings(Settings):
    """What of a supervised run is kept off the devices: less memory for more time."""

    actor: RoleOffloadSettings = RoleOffloadSettings()
    """The model that is trained. Its optimizer passes over the device in pieces, in each update; its weights are needed all the
    time."""
    folder: Place | None = None
    """Folder for what goes to ``disk``. Default: ``offload`` in the run's folder."""


class OffloadSettings(Settings):
    """What leaves the devices between phases: less memory for more time."""

    actor: RoleOffloadSettings = RoleOffloadSettings()
    """The model that is trained."""
    reference: RoleOffloadSettings = RoleOffloadSettings()
    """The reference model."""
    critic: RoleOffloadSettings = RoleOffloadSettings()
    """The critic."""
    reward: RoleOffloadSettings = RoleOffloadSettings()
    """The reward's models, where they share devices with the engine; they have no optimizer."""
    folder: Place | None = None
    """Folder for what goes to ``disk``. Default: ``offload`` in the run's folder."""
