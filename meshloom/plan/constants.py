"""Constants of the cost model: what programs get of a device, and what a step costs beside arithmetic and bytes.

Owns: the numbers, what each means, what is physically possible, and which of them are measured. Refuses to know: models,
phases. Always holds: all constants are in one record that can be fitted to a run's measurements; shares are of the maker's
rate, so that they carry over to other devices.

Fitted to one H200 (989 TFLOP/s, 4.8 TB/s, NVLink 450 GB/s one way), torch 2.11, bfloat16, Qwen2.5 shapes of random weights.
A test holds them against what was measured there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from meshloom.plan.hardware import Device
from meshloom.plan.ledger import DERIVED, LedgerLine

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the cost model takes for granted; shares are of the maker's rates of ``plan.hardware``.

    Args:
        training_matrix_share: of the matrix rate, by products of a training pass.
        prompt_matrix_share: of the matrix rate, by products of prompts before they are answered.
        decode_matrix_share: of the matrix rate, by products of a decode step that is bound by arithmetic.
        attention_share: of the matrix rate, by attention in training passes.
        weight_read_share: of the memory's bandwidth, by products of a decode step that is bound by reading weights.
        cache_read_share: of the memory's bandwidth, by attention over the cache.
        memory_share: of the memory's bandwidth, by work without products.
        activation_passes: times that a forward and backward pass reads or writes each activation that it keeps.
        forward_part: part of those that the forward pass alone does, and part of its launches.
        decode_layer_s: of a decode step and layer, beside what is counted: norms, rotation, gaps between kernels.
        pass_layer_s: of a forward and backward pass and layer, in which the processor launches its kernels; not less than that.
        generate_start_s: of a phase of generation, beside its steps: drawing up requests, bringing responses to the host.
        update_start_s: of an update, beside its passes: packing, launches of the optimizer.
        gather_share: of a link between devices of a node, by all-gather and reduce-scatter.
        broadcast_share: of such a link, by movements of weights.
        copy_share: of the memory's bandwidth, by movements of weights on one device.
        network_share: of the network.
        host_share: of the link to the host's memory, pinned.
        collective_s: until a collective moves its first byte.
        hidden_part: part of a pass behind which collectives of shards can hide.
        disk_bandwidth: bytes a second of a node's disk, each way.
        beside_phases_s: of a step, beside its phases: rewards of a rule, records, packing.
    """

    training_matrix_share: float = 0.69
    prompt_matrix_share: float = 0.69
    decode_matrix_share: float = 0.67
    attention_share: float = 0.45
    weight_read_share: float = 0.78
    cache_read_share: float = 0.57
    memory_share: float = 0.885
    activation_passes: float = 7.0
    forward_part: float = 1 / 3
    decode_layer_s: float = 41e-6
    pass_layer_s: float = 3.5e-3
    generate_start_s: float = 0.01
    update_start_s: float = 0.005
    gather_share: float = 0.627
    broadcast_share: float = 0.818
    copy_share: float = 0.26
    network_share: float = 0.8
    host_share: float = 0.86
    collective_s: float = 20e-6
    hidden_part: float = 0.8
    disk_bandwidth: float = 2e9
    beside_phases_s: float = 0.06


NAMES = tuple(field.name for field in fields(Constants))
"""Of all constants, in the order they are shown."""

ASSUMED = (
    "prompt_matrix_share",
    "attention_share",
    "forward_part",
    "generate_start_s",
    "pass_layer_s",
    "update_start_s",
    "network_share",
    "collective_s",
    "hidden_part",
    "disk_bandwidth",
)
"""Constants that nothing has been fitted to yet."""


def unit_of(name: str) -> str:
    """What a constant counts."""
    if name.endswith("_s"):
        return "s"
    return {
        "activation_passes": "reads and writes of each activation",
        "forward_part": "of a forward and backward pass",
        "hidden_part": "of a pass",
        "disk_bandwidth": "bytes/s",
        "host_share": "of the link to the host",
        "network_share": "of the network",
        "gather_share": "of the link to neighbours",
        "broadcast_share": "of the link to neighbours",
    }.get(
        name, "of the matrix rate" if name.endswith("matrix_share") or name == "attention_share" else "of the bandwidth"
    )


def bounds_of(name: str) -> tuple[float, float]:
    """Least and most that is physically possible: no share of a maker's rate is above one, no time is negative."""
    if name.endswith("_s"):
        return 1e-9, 600.0
    if name == "activation_passes":
        return 1.0, 100.0
    if name == "forward_part":
        return 0.05, 1.0
    if name == "disk_bandwidth":
        return 1e6, 1e12
    return 1e-9, 1.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind, and how they lie on nodes."""

    device: Device
    devices_per_node: int = 1

    def link(self, group: int, stride: int, constants: Constants, *, moving: bool = False) -> float:
        """Bytes a second that each device of a group gets through a collective.

        In a node that is its own link; across nodes the ports of all members on a node carry what enters it.

        Args:
            group: devices that take part.
            stride: devices from one member to the next.
            constants: shares of the links.
            moving: whether weights are moved, in one direction, and not gathered.
        """
        share = constants.broadcast_share if moving else constants.gather_share
        inside = self.device.peer_bandwidth * share
        if group * stride <= self.devices_per_node:
            return inside
        members = max(1, self.devices_per_node // stride)
        return min(inside, self.device.network_bandwidth * constants.network_share * members)

    def all_reduce(self, count: float, group: int, stride: int, constants: Constants) -> float:
        """Seconds of an all-reduce of so many bytes of each device of a group (see ``link``)."""
        moved = 2 * count * (group - 1) / group
        return moved / self.link(group, stride, constants) + constants.collective_s

    def all_gather(self, count: float, group: int, stride: int, constants: Constants) -> float:
        """Seconds until each device of a group has so many bytes, of which it had its part (see ``link``)."""
        moved = count * (group - 1) / group
        return moved / self.link(group, stride, constants) + constants.collective_s


def assumptions(constants: Constants, cluster: Cluster, origins: Mapping[str, str] = _NONE) -> Iterator[LedgerLine]:
    """What the cost model takes for granted, line by line.

    Args:
        constants: of the cost model.
        cluster: whose rates they are shares of.
        origins: where constants that were given come from, by name.
    """
    device = cluster.device
    rates = {
        "matrix rate": (device.matrix_flops, "FLOP/s"),
        "memory bandwidth": (device.memory_bandwidth, "bytes/s"),
        "link to neighbours": (device.peer_bandwidth, "bytes/s"),
        "link to the host": (device.host_bandwidth, "bytes/s"),
        "network": (device.network_bandwidth, "bytes/s"),
    }
    for name, (value, unit) in rates.items():
        yield _line(name, value, f"{device.name}, by its maker", unit)
    for field in fields(Constants):
        value = getattr(constants, field.name)
        how = "assumed" if field.name in ASSUMED else "fitted to one H200"
        how = origins.get(field.name, "as given" if value != field.default else how)
        unit = unit_of(field.name) if field.name.endswith("_s") or field.name == "disk_bandwidth" else ""
        yield _line(field.name.removesuffix("_s").replace("_", " "), value, how, unit)


def _line(name: str, value: float, formula: str, unit: str) -> LedgerLine:
    return LedgerLine(section="assumptions", name=name, value=value, formula=formula, source=DERIVED, unit=unit)
