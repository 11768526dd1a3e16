"""Which part of each full tensor a rank holds: arithmetic of boxes.

Owns: boxes (a range of each dimension), and where a cut over a mesh puts them. Refuses to know: tensors' values, processes, how
anything is moved. Always holds: the boxes of a cut cover the tensor; those of ranks that differ only on axes that do not cut
it are equal, all others are disjoint; rows that do not divide are cut as ``torch.chunk`` cuts them, the last boxes smaller or
empty.

DTensors say how they are cut by a mesh and a placement for each of its axes (``cuts_of``). Where tensor and data parallelism
cut the same dimension, FSDP cuts what tensor parallelism has left, although its axis comes first: a strided shard.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A part of a tensor.

    Args:
        starts, stops: of each dimension; empty where a stop is not above its start.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(0, stop - start) for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        count = 1
        for start, stop in zip(self.starts, self.stops, strict=True):
            count *= max(0, stop - start)
        return count

    def meet(self, other: "Box") -> "Box | None":
        """What both hold; none if that is nothing."""
        for start, stop, begin, end in zip(self.starts, self.stops, other.starts, other.stops, strict=True):
            if start >= end or begin >= stop or start >= stop or begin >= end:
                return None
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops)

    def minus(self, other: "Box") -> "list[Box]":
        """What this holds and the other does not, as disjoint boxes."""
        common = self.meet(other)
        if common is None:
            return [self] if self.numel else []
        found, starts, stops = [], list(self.starts), list(self.stops)
        for dim in range(len(starts)):
            low, high = common.starts[dim], common.stops[dim]
            for start, stop in ((starts[dim], low), (high, stops[dim])):
                if start < stop:
                    left, right = list(starts), list(stops)
                    left[dim], right[dim] = start, stop
                    found.append(Box(tuple(left), tuple(right)))
            starts[dim], stops[dim] = low, high
        return found

    def of(self, holder: Tensor, held: "Box") -> Tensor:
        """The view of a tensor that holds this part.

        Args:
            holder: holds the box ``held``, in its shape.
            held: a box around this one.
        """
        for dim, (start, stop, first) in enumerate(zip(self.starts, self.stops, held.starts, strict=True)):
            if (start, stop) != (first, held.stops[dim]):
                holder = holder.narrow(dim, start - first, stop - start)
        return holder

    def chunks(self, count: int) -> "list[Box]":
        """This box in ``count`` parts along its first dimension, as ``torch.chunk`` cuts; the last ones may be empty. A
        number without dimensions is one part, the others none."""
        if not self.starts:
            return [self]
        return [self.part(0, place, count) for place in range(count)]

    def part(self, dim: int, place: int, count: int) -> "Box":
        """One of ``count`` parts along a dimension."""
        start, stop = self.starts[dim], self.stops[dim]
        size = -(-(stop - start) // count)
        begin, end = min(stop, start + place * size), min(stop, start + (place + 1) * size)
        starts, stops = list(self.starts), list(self.stops)
        starts[dim], stops[dim] = begin, end
        return Box(tuple(starts), tuple(stops))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(self.starts, self.stops, strict=True)) + "]"


@dataclass(frozen=True)
class Axis:
    """A cut along one axis of a mesh.

    Args:
        axis: of the mesh, by its place.
        dim: of the tensor that is cut along it.
    """

    axis: int
    dim: int


@dataclass(frozen=True)
class Grid:
    """Ranks on a mesh.

    Args:
        sizes: of its axes, the last one innermost.
        ranks: in the order of the mesh.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.sizes) != len(self.ranks):
            raise ValueError(f"a mesh of {self.sizes} has no {len(self.ranks)} ranks")

    def places(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each rank and its place on each axis."""
        yield from zip(self.ranks, product(*(range(size) for size in self.sizes)), strict=True)


def box_at(shape: Sequence[int], sizes: Sequence[int], place: Sequence[int], cuts: Sequence[Axis]) -> Box:
    """What the rank at a place of a mesh holds.

    Args:
        shape: of the full tensor.
        sizes: of the axes of the mesh.
        place: on each of them.
        cuts: in the order in which they are made; axes that are not named hold copies.
    """
    box = Box.whole(shape)
    for cut in cuts:
        box = box.part(cut.dim, place[cut.axis], sizes[cut.axis])
    return box


def boxes(shape: Sequence[int], grid: Grid, cuts: Sequence[Axis]) -> dict[int, Box]:
    """What each rank of a mesh holds, by rank. Arguments as of ``box_at``."""
    return {rank: box_at(shape, grid.sizes, place, cuts) for rank, place in grid.places()}


def cuts_of(placements: Sequence[Any], sizes: Sequence[int]) -> tuple[Axis, ...]:
    """The cuts that a DTensor's placements make, in their order.

    Args:
        placements: ``Replicate``, ``Shard`` and strided ones, for each axis of the mesh.
        sizes: of the axes.

    Raises:
        ValueError: for sums that are still to be made (``Partial``), or strided shards that follow no rule known here.
    """
    plain, strided = [], []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        factor = _split_factor(placement)
        if factor is None and not placement.is_shard():
            raise ValueError(f"{placement} is no part of a tensor")
        if factor is None:
            plain.append(Axis(axis, placement.dim))
        else:
            strided.append((Axis(axis, placement.dim), factor))
    made = plain
    for cut, factor in reversed(strided):
        before = math.prod(sizes[other.axis] for other in made if other.dim == cut.dim and other.axis > cut.axis)
        if before != factor:
            raise ValueError(f"a shard strided by {factor} after {before} parts of the axes behind it")
        made = [*made, cut]
    return tuple(made)


def _split_factor(placement: Any) -> int | None:
    """Parts that axes behind a strided shard's have cut already; none for other placements."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return placement.split_factor if isinstance(placement, _StridedShard) else None


def box_of(tensor: Any) -> Box:
    """What this rank holds of a DTensor.

    Raises:
        ValueError: if its placements are not known here.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    sizes = tuple(mesh.shape)
    return box_at(tuple(tensor.shape), sizes, place, cuts_of(tensor.placements, sizes))
