"""Where a worker sits: its rank, its node, its device.

Owns: the record. Always holds: ranks of a run are 0 … world_size - 1; those of a node follow each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """The place of one worker.

    Args:
        rank: of the worker among all.
        world_size: workers of the run.
        node: name of its node, as the device map and the messages call it.
        node_index: number of its node.
        local_rank: its number on the node.
        device: ``cpu``, or ``cuda:1`` with the index that the process sees.
    """

    rank: int
    world_size: int
    node: str
    node_index: int
    local_rank: int
    device: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}, {self.device}"


def seats_of(nodes: Sequence[tuple[str, Sequence[str]]]) -> tuple[Seat, ...]:
    """Seats on nodes, in the order of the nodes and of their devices.

    Args:
        nodes: name and devices of each.
    """
    world_size = sum(len(devices) for _, devices in nodes)
    places = [
        (name, index, local, device)
        for index, (name, devices) in enumerate(nodes)
        for local, device in enumerate(devices)
    ]
    return tuple(Seat(rank, world_size, *place) for rank, place in enumerate(places))
