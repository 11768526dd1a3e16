"""The devices of a run: nodes × devices, and ordered sets of them.

Owns: numbering, names, and what lies on one node. Refuses to know: roles. Always holds: device ``d`` is number
``d % devices_per_node`` of node ``d // devices_per_node``; a set is kept as ranges, so that thousands of nodes cost no more
than the ranges that they are given in.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from meshloom.plan.host_names import fold


@dataclass(frozen=True)
class DeviceSet:
    """Devices in the order of their ranks.

    Args:
        ranges: ascending ranges of device numbers, one after the other.
    """

    ranges: tuple[range, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[range]) -> "DeviceSet":
        """The set of these ranges; those that continue each other are one."""
        merged: list[range] = []
        for piece in ranges:
            if not piece:
                continue
            if merged and merged[-1].stop == piece.start:
                merged[-1] = range(merged[-1].start, piece.stop)
            else:
                merged.append(piece)
        return cls(tuple(merged))

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        return (device for piece in self.ranges for device in piece)

    def __getitem__(self, rank: int) -> int:
        """The device of a rank."""
        piece = bisect_right(self._starts, rank) - 1
        return self.ranges[piece][rank - self._starts[piece]]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(map(len, self.ranges))][:-1]

    @cached_property
    def _ascending(self) -> list[tuple[int, int, int]]:
        """(first device, end, first rank) of each range, by device."""
        return sorted((piece.start, piece.stop, rank) for piece, rank in zip(self.ranges, self._starts, strict=True))

    def rank_of(self, device: int) -> int | None:
        """The rank of a device; none if it is not in the set."""
        at = bisect_right(self._ascending, device, key=lambda piece: piece[0]) - 1
        if at < 0 or device >= self._ascending[at][1]:
            return None
        start, _, rank = self._ascending[at]
        return rank + device - start

    def within(self, span: range) -> list[range]:
        """The parts of the set in a span of devices, ascending."""
        parts: list[range] = []
        at = max(0, bisect_right(self._ascending, span.start, key=lambda piece: piece[0]) - 1)
        for start, stop, _ in self._ascending[at:]:
            if start >= span.stop:
                break
            if part := range(max(start, span.start), min(stop, span.stop)):
                parts.append(part)
        return parts

    def twice(self) -> int | None:
        """A device that is in the set twice; none if there is none."""
        end = -1
        for start, stop, _ in self._ascending:
            if start < end:
                return start
            end = max(end, stop)
        return None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Nodes × devices.

    Args:
        num_nodes: nodes.
        devices_per_node: devices of each.
        names: of the nodes; if there are none, they are node1, node2, ….
    """

    num_nodes: int = 1
    devices_per_node: int = 1
    names: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.num_nodes * self.devices_per_node

    @property
    def all_devices(self) -> DeviceSet:
        """All devices, node by node."""
        return DeviceSet((range(self.num_devices),))

    def node_name(self, node: int) -> str:
        """The name of a node, by its number from 0."""
        return self.names[node] if self.names else f"node{node + 1}"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {self.node_name(node): node for node in range(self.num_nodes)}

    def node_number(self, name: str) -> int | None:
        """The number of a node, by its name; none if there is no such node."""
        return self._numbers.get(name)

    def devices_of(self, node: int) -> range:
        """The devices of a node."""
        return range(node * self.devices_per_node, (node + 1) * self.devices_per_node)

    @property
    def plain(self) -> bool:
        """Whether a device is named by its index alone: there is one node, and it has no name."""
        return self.num_nodes == 1 and not self.names

    def pieces(self, devices: DeviceSet) -> Iterator[tuple[int, int, int, int]]:
        """(first node, nodes, first index, end index) of the parts of a set, in order; several nodes only where all of each
        are in it."""
        size = self.devices_per_node
        for piece in devices.ranges:
            start = piece.start
            while start < piece.stop:
                node, index = divmod(start, size)
                if index or piece.stop - start < size:
                    end = min(piece.stop, (node + 1) * size)
                    yield node, 1, index, index + end - start
                else:
                    end = piece.stop - piece.stop % size
                    yield node, (end - start) // size, 0, size
                start = end

    def entries(self, devices: DeviceSet) -> list[str]:
        """A set as ``placement`` takes it, short: ``0-3``, ``node1:2``, ``node[1-4]:all``."""
        texts: list[str] = []
        for node, count, start, stop in self.pieces(devices):
            index = f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
            if self.plain:
                texts.append(index)
                continue
            which = "all" if (start, stop) == (0, self.devices_per_node) and stop > 1 else index
            names = fold(self.node_name(number) for number in range(node, node + count))
            texts += [f"{name}:{which}" for name in names]
        return texts

    def node_runs(self, devices: DeviceSet) -> list[tuple[int, int]]:
        """(devices, how many times in a row) of the stretches of a set that lie on one node each, in order."""
        runs: list[tuple[int, int]] = []
        last = -1
        for node, count, start, stop in self.pieces(devices):
            if node == last:
                runs[-1] = (runs[-1][0] + stop - start, 1)
            else:
                runs.append((stop - start, count))
            last = node + count - 1
        return runs
