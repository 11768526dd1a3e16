"""Device meshes: named axes over the devices of a role, and which ones can be.

Owns: axes, shapes, ranks, and what makes a mesh impossible. Refuses to know: settings' names, batches. Always holds: the
product of a mesh's axes is the number of its devices; the last axis is the innermost, whose groups are neighbours.

Axes: ``pp`` pipeline stages, ``replicate`` groups with the same weights, ``fsdp`` shards of the weights, ``sp`` parts of a
sequence, ``tp`` parts of a layer, ``dp`` replicas that have different samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, log2, prod
from typing import Any

from meshloom.plan.topology import DeviceSet, Topology

AXES = {"tensor": "tp", "sequence": "sp", "pipeline": "pp"}
"""The axis of each way to cut a model, by the setting's last name."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Named axes over devices; axes of size one are left out, so a single device has none.

    Args:
        axes: name and size of each, outermost first.
        devices: in the order of their ranks.
    """

    axes: tuple[tuple[str, int], ...]
    devices: DeviceSet

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Size of an axis; 1 if it is left out."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank on each axis."""
        places: list[int] = []
        for size in reversed(self.shape):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def ranks(self) -> list[Any]:
        """All ranks, as lists in lists; for small meshes."""
        nested: list[Any] = list(range(len(self.devices)))
        for size in reversed(self.shape[1:]):
            nested = [nested[at : at + size] for at in range(0, len(nested), size)]
        return nested

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.axes) or "one device"


def _mesh(devices: DeviceSet, **sizes: int) -> Mesh:
    if prod(sizes.values()) != len(devices):
        raise ValueError(f"axes {sizes} do not make {len(devices)} devices")
    return Mesh(axes=tuple((name, size) for name, size in sizes.items() if size > 1), devices=devices)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How a role's model is cut; ``fsdp_size`` none: over all that the others leave; ``stages_per_device``: of each device of
    ``pipeline``."""

    fsdp_size: int | None = None
    tensor: int = 1
    pipeline: int = 1
    stages_per_device: int = 1
    sequence: int = 1

    @property
    def model_parallel(self) -> int:
        """Devices that work on the same samples."""
        return self.tensor * self.pipeline * self.sequence


@dataclass(frozen=True, kw_only=True)
class Pool:
    """How many devices a role has, and how they lie on nodes.

    Args:
        world: devices.
        block: greatest common divisor of the lengths of the stretches of neighbouring ranks that lie on one node each.
    """

    world: int
    block: int

    @classmethod
    def of(cls, devices: DeviceSet, topology: Topology) -> "Pool":
        """The devices of a role."""
        return cls(world=len(devices), block=gcd(*(size for size, _ in topology.node_runs(devices))))

    def keeps_together(self, group: int) -> bool:
        """Whether each group of so many neighbouring ranks lies on one node."""
        return self.block % group == 0


def model_mesh(devices: DeviceSet, degrees: Degrees) -> Mesh:
    """The mesh of a model that computes log-probs or is trained: (pp, replicate, fsdp, sp, tp).

    Raises:
        ValueError: if the degrees do not go into the devices.
    """
    left = len(devices) // degrees.model_parallel
    fsdp = degrees.fsdp_size or left
    sizes = {"pp": degrees.pipeline, "replicate": left // fsdp, "fsdp": fsdp}
    return _mesh(devices, **sizes, sp=degrees.sequence, tp=degrees.tensor)


def sequence_mesh(devices: DeviceSet, degrees: Degrees) -> Mesh | None:
    """The same devices as replicas with different samples and parts of their sequences: (pp, dp, sp, tp); none where sequences
    are not split.

    Raises:
        ValueError: if the degrees do not go into the devices.
    """
    if degrees.sequence == 1:
        return None
    replicas = len(devices) // degrees.model_parallel
    return _mesh(devices, pp=degrees.pipeline, dp=replicas, sp=degrees.sequence, tp=degrees.tensor)


def rollout_mesh(devices: DeviceSet, tensor: int) -> Mesh:
    """The mesh of the engines: (dp, tp), a replica for each index of dp.

    Raises:
        ValueError: if ``tensor`` does not go into the devices.
    """
    return _mesh(devices, dp=len(devices) // tensor, tp=tensor)


@dataclass(frozen=True, kw_only=True)
class Divisible:
    """Sizes of a model that its cuts must divide."""

    layers: int
    heads: int
    key_value_heads: int
    intermediate: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Divisible | None":
        """From a model's config.json; none if it lacks one of them."""
        layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
        key_values = config.get("num_key_value_heads") or heads
        if not isinstance(layers, int) or not isinstance(heads, int) or not isinstance(key_values, int):
            return None
        intermediate = config.get("intermediate_size")
        return cls(
            layers=layers,
            heads=heads,
            key_value_heads=key_values,
            intermediate=intermediate if isinstance(intermediate, int) else None,
        )


@dataclass(frozen=True, kw_only=True)
class MeshFault:
    """Why a mesh cannot be.

    Args:
        code: of the refusal.
        setting: ``tensor``, ``pipeline``, ``stages_per_device``, ``sequence`` or ``fsdp_size``.
        what: the fault.
        why: the reason, if ``what`` does not say it.
    """

    code: str
    setting: str
    what: str
    why: str = ""


def mesh_faults(pool: Pool, degrees: Degrees, model: Divisible | None, *, trained: bool = True) -> Iterator[MeshFault]:
    """Everything that makes a role's mesh impossible; the number of devices first, and if that is wrong nothing else of it.

    Args:
        pool: devices of the role.
        degrees: that it is cut by.
        model: that is cut; none if it is not known.
        trained: false for an engine, which has no sharding, pipeline or sequence parallelism.
    """
    world, wrong = pool.world, False
    for setting, axis in AXES.items():
        degree = getattr(degrees, setting)
        if degree > world:
            wrong = True
            text = valid(valid_degrees(setting, pool, degrees, model))
            yield MeshFault(
                code="G001",
                setting=setting,
                what=f"{axis} {degree} exceeds the {_count(world)}; {text}",
            )
    if not wrong and world % degrees.model_parallel:
        wrong = True
        cuts = {setting: getattr(degrees, setting) for setting in AXES if getattr(degrees, setting) > 1}
        setting = max(cuts, key=lambda name: (world % cuts[name] > 0, name == "tensor"))
        product = "" if len(cuts) == 1 else " × ".join(f"{AXES[name]} {size}" for name, size in cuts.items()) + " = "
        text = valid(valid_degrees(setting, pool, degrees, model))
        what = f"{world} is not divisible by {product}{degrees.model_parallel}; {text}"
        yield MeshFault(code="G002", setting=setting, what=what, why=f"each of the {_count(world)} has one place")
    if not wrong:
        yield from _placement_faults(pool, degrees, model)
        left = world // degrees.model_parallel
        if trained and degrees.fsdp_size is not None and left % degrees.fsdp_size:
            what = f"{left} is not divisible by {degrees.fsdp_size}; {valid(divisors(left))}"
            why = f"fsdp_size cuts the {_count(left)} that tp, pp and sp leave" if left < world else ""
            yield MeshFault(code="G003", setting="fsdp_size", what=what, why=why)
    yield from _model_faults(degrees, model)


def _placement_faults(pool: Pool, degrees: Degrees, model: Divisible | None) -> Iterator[MeshFault]:
    if pool.keeps_together(degrees.tensor):
        return
    inside = valid_degrees("tensor", pool, degrees, model)
    what = f"a tp group would span two nodes; {valid(inside).replace('valid', 'valid within a node')}"
    why = f"tp {degrees.tensor} exchanges every layer's results: it needs the links inside a node"
    yield MeshFault(code="G004", setting="tensor", what=what, why=why)


def _stage_faults(degrees: Degrees, model: Divisible | None) -> Iterator[MeshFault]:
    pipeline, each = degrees.pipeline, degrees.stages_per_device
    if each > 1 and pipeline == 1:
        what = f"stages_per_device {each} on devices without a pipeline, as pp is 1; valid: 1"
        yield MeshFault(
            code="G005", setting="stages_per_device", what=what, why="stages of one device alone need no order"
        )
    elif model is not None and model.layers % pipeline:
        what = f"the model's {model.layers} layers are not divisible by pp {pipeline}"
        yield MeshFault(code="G005", setting="pipeline", what=f"{what}; {valid(divisors(model.layers))}")
    elif model is not None and model.layers % (pipeline * each):
        what = f"the model's {model.layers} layers do not go into pp {pipeline} × {each} stages of each device"
        fitting = valid(divisors(model.layers // pipeline))
        yield MeshFault(code="G005", setting="stages_per_device", what=f"{what}; {fitting}")


def _model_faults(degrees: Degrees, model: Divisible | None) -> Iterator[MeshFault]:
    yield from _stage_faults(degrees, model)
    if model is None:
        return
    tp, both = degrees.tensor, degrees.tensor * degrees.sequence
    if not _heads_fit(model, tp):
        what = f"the model's {_heads(model)} are not divisible by tp {tp}"
        yield MeshFault(code="G006", setting="tensor", what=f"{what}; {valid(_fitting(model))}")
    elif degrees.sequence > 1 and not _heads_fit(model, both):
        cut = f"tp {tp} × sp {degrees.sequence} = {both}" if tp > 1 else f"sp {degrees.sequence}"
        fitting = [size // tp for size in _fitting(model) if size % tp == 0]
        what = f"the model's {_heads(model)} are not divisible by {cut}; {valid(fitting)}"
        why = "Ulysses gives each device some heads of the whole sequence"
        yield MeshFault(code="G007", setting="sequence", what=what, why=why)
    if model.intermediate is not None and model.intermediate % tp:
        what = f"the model's intermediate size {model.intermediate} is not divisible by tp {tp}"
        yield MeshFault(code="G008", setting="tensor", what=f"{what}; {valid(_fitting(model))}")


def _heads(model: Divisible) -> str:
    grouped = f" (and {model.key_value_heads} for keys and values)" if model.key_value_heads != model.heads else ""
    return f"{model.heads} heads{grouped}"


def _heads_fit(model: Divisible, parts: int) -> bool:
    """Heads of keys and values may also be copied to several parts, a whole number of times."""
    shared = model.key_value_heads % parts == 0 or parts % model.key_value_heads == 0
    return model.heads % parts == 0 and shared


def _fitting(model: Divisible) -> list[int]:
    whole = (size for size in divisors(model.heads) if _heads_fit(model, size))
    return [size for size in whole if model.intermediate is None or model.intermediate % size == 0]


def _count(devices: int) -> str:
    return f"{devices:,} device{'' if devices == 1 else 's'}"


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def valid(values: Sequence[int]) -> str:
    """The values that would work, in words."""
    return f"valid: {', '.join(map(str, values))}" if values else "no value is valid with the others"


def _with(degrees: Degrees, setting: str, size: int) -> Degrees:
    return replace(degrees, **{setting: size})


def valid_degrees(setting: str, pool: Pool, degrees: Degrees, model: Divisible | None) -> list[int]:
    """Values of one degree that work with the others as they are."""
    others = _with(replace(degrees, fsdp_size=None), setting, 1)
    sizes = divisors(pool.world // others.model_parallel) if pool.world % others.model_parallel == 0 else []
    return [size for size in sizes if not any(_cheap_faults(pool, _with(others, setting, size), model))]


def _cheap_faults(pool: Pool, degrees: Degrees, model: Divisible | None) -> Iterator[object]:
    if pool.world % degrees.model_parallel or not pool.keeps_together(degrees.tensor):
        yield degrees
    yield from _model_faults(degrees, model)


@lru_cache(maxsize=64)
def near_degrees(pool: Pool, degrees: Degrees, model: Divisible | None, *, trained: bool) -> tuple[Degrees, ...]:
    """Degrees that work on these devices, nearest to the given ones first: those that change least, then by how far.

    Args:
        pool: devices of the role.
        degrees: as they are given.
        model: that is cut; none if it is not known.
        trained: false for an engine, of which only ``tensor`` may change.
    """
    found: list[Degrees] = []
    for tensor in divisors(pool.block):
        for sequence in divisors(pool.world // tensor) if trained else [1]:
            for pipeline in divisors(pool.world // tensor // sequence) if trained else [1]:
                for stages in _near_stages(degrees.stages_per_device, pipeline, model):
                    cut = Degrees(tensor=tensor, sequence=sequence, pipeline=pipeline, stages_per_device=stages)
                    if not any(_model_faults(cut, model)):
                        shards = _near_shards(degrees.fsdp_size, pool.world // cut.model_parallel)
                        found += [replace(cut, fsdp_size=size) for size in shards]
    return tuple(sorted(found, key=lambda near: _distance(degrees, near)))


def _near_stages(given: int, pipeline: int, model: Divisible | None) -> list[int]:
    """The given number of stages of each device if it goes into the layers, else the nearest that do."""
    if pipeline == 1 or given == 1:
        return [1]
    return [given] if model is None or model.layers % pipeline else _nearest(given, model.layers // pipeline)


def _near_shards(given: int | None, left: int) -> list[int | None]:
    """The given number of shards if it divides what is left, else the nearest below and above that do."""
    return [None] if given is None else [*_nearest(given, left)]


def _nearest(given: int, whole: int) -> list[int]:
    """A number if it divides another, else the nearest below and above that do."""
    if whole % given == 0:
        return [given]
    sizes = divisors(whole)
    return [*[size for size in sizes if size < given][-1:], *[size for size in sizes if size > given][:1]]


def _distance(given: Degrees, near: Degrees) -> tuple[int, float]:
    pairs = [(getattr(given, name), getattr(near, name)) for name in (*AXES, "stages_per_device")]
    if given.fsdp_size is not None and near.fsdp_size is not None:
        pairs.append((given.fsdp_size, near.fsdp_size))
    return sum(old != new for old, new in pairs), sum(abs(log2(old / new)) for old, new in pairs)
