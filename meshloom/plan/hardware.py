"""Devices: what they hold, compute and move, by their makers; and what one of them was measured to do.

Owns: the table. Refuses to know: models, programs. Always holds: a number by the maker is what the silicon could do at most,
dense and one way; a measured number says what a program got.

Memory is what the driver reports (``memory.total`` of nvidia-smi or amd-smi), which is less than what is on the box. Rates
are those of data sheets, without sparsity: bfloat16 products with float32 sums; a link's rate is half of the sum of both
ways that makers print. A device without links of its own reaches its neighbours by PCIe, ×16: 32 GB/s of the fourth, 64 GB/s
of the fifth generation. The network is an assumption, one port for each device as the makers' own servers have it: 200 Gb/s
with an A100, 400 Gb/s with an H100 to a B200 and an MI300X; 100 Gb/s with cards that have no links, 10 Gb/s with those of
desktops.

Sources: NVIDIA's data sheets of A100, A800, H100, H200, H20, B200 (HGX), L40S, L4 and A10, and its Ada and Ampere
architecture papers for the RTX cards; AMD's data sheet of the Instinct MI300X.
"""

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by its maker.

    Args:
        name: for people, and for settings.
        known_as: words in the name that the driver gives, each enough.
        memory_bytes: that the driver reports.
        matrix_flops: operations a second of dense bfloat16 products.
        memory_bandwidth: bytes a second, reading and writing together.
        peer_bandwidth: bytes a second to another device of the node, one way.
        host_bandwidth: bytes a second to or from the host's memory.
        network_bandwidth: bytes a second to another node, one way, for each device.
    """

    name: str
    known_as: tuple[str, ...]
    memory_bytes: int
    matrix_flops: float
    memory_bandwidth: float
    peer_bandwidth: float
    host_bandwidth: float
    network_bandwidth: float


def _device(
    name: str, mib: int, tflops: float, memory: float, peer: float, host: float, network: float, *known_as: str
) -> Device:
    """A row of the table: MiB, TFLOP/s, and GB/s of memory, neighbour, host and network."""
    return Device(
        name=name,
        known_as=known_as or (name,),
        memory_bytes=mib * _MIB,
        matrix_flops=tflops * TERA,
        memory_bandwidth=memory * GIGA,
        peer_bandwidth=peer * GIGA,
        host_bandwidth=host * GIGA,
        network_bandwidth=network * GIGA,
    )


DEVICES = (
    _device("H200 NVL", 143771, 836, 4800, 450, 64, 50),
    _device("H200", 143771, 989, 4800, 450, 64, 50),
    _device("H100 NVL", 95830, 836, 3900, 300, 64, 50),
    _device("H100 PCIe", 81559, 756, 2000, 64, 64, 50),
    _device("H100", 81559, 989, 3350, 450, 64, 50),
    _device("H800", 81559, 989, 3350, 200, 64, 50),
    _device("H20", 97871, 148, 4000, 450, 64, 50),
    _device("B200", 183359, 2250, 8000, 900, 64, 50),
    _device("A100 40GB", 40960, 312, 1555, 300, 32, 25, "A100 40GB", "A100 SXM4 40GB", "A100 PCIE 40GB"),
    _device("A100 80GB", 81920, 312, 2039, 300, 32, 25, "A100 80GB", "A100"),
    _device("A800", 81920, 312, 2039, 200, 32, 25),
    _device("L40S", 46068, 362, 864, 32, 32, 12.5),
    _device("L4", 23034, 121, 300, 32, 32, 12.5),
    _device("A10", 23028, 125, 600, 32, 32, 12.5),
    _device("RTX 4090", 24564, 165, 1008, 32, 32, 1.25, "RTX 4090", "4090"),
    _device("RTX 3090", 24576, 71, 936, 32, 32, 1.25, "RTX 3090", "3090"),
    _device("MI300X", 196592, 1307, 5300, 448, 64, 50),
)
"""The first whose words are in a name is meant."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What programs got out of a device.

    Args:
        matrix_flops: of an 8192³ bfloat16 product of random numbers, a second.
        memory_bandwidth: bytes a second that a copy of 4 GiB on the device reads and writes.
        host_bandwidth: bytes a second of a copy to or from pinned memory of the host.
        peer_bandwidth: bytes a second of a copy to another device of the node.
        broadcast_bandwidth: bytes a second that reach each device, by NCCL in a node.
        all_gather_bandwidth: bytes a second that reach each device, by NCCL in a node.
    """

    matrix_flops: float
    memory_bandwidth: float
    host_bandwidth: float
    peer_bandwidth: float
    broadcast_bandwidth: float
    all_gather_bandwidth: float


MEASURED_H200 = Measured(
    matrix_flops=760 * TERA,  # 730 to 796, by temperature and power
    memory_bandwidth=4250 * GIGA,  # 4,200 to 4,300
    host_bandwidth=55 * GIGA,
    peer_bandwidth=392 * GIGA,
    broadcast_bandwidth=368 * GIGA,
    all_gather_bandwidth=282 * GIGA,
)


def find_device(name: str) -> Device | None:
    """The device that a driver's name (``NVIDIA H100 80GB HBM3``) or a person's (``h200``) means; none if it is not known."""
    words = f" {name.replace('-', ' ').upper()} "
    return next((device for device in DEVICES if any(f" {known.upper()} " in words for known in device.known_as)), None)


def names_of_devices() -> tuple[str, ...]:
    """Names that a person may write for the known devices: ``h200``, ``a100-40gb``."""
    return tuple(device.name.lower().replace(" ", "-") for device in DEVICES)


def known_peak(name: str) -> float | None:
    """Operations a second of dense bfloat16 products, of a device by its name; none if it is not known."""
    device = find_device(name)
    return None if device is None else device.matrix_flops
