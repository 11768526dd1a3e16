"""How one call of a group becomes a call of each rank, and the ranks' results one value.

Owns: the usual ways: the same for all, a part for each replica, from all or one rank per replica. Refuses to know: samples,
models. Always holds: ranks of one replica (the same data index) are given the same part; a part may be empty, so that every
rank is called and none waits for another in vain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class GroupLayout:
    """Ranks of a group, and which of them are one replica.

    Args:
        ranks: of the workers.
        data_index: for each, the part of the data that it works on; ranks with the same index hold parts of one model.
    """

    ranks: tuple[int, ...]
    data_index: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.data_index) or set(self.data_index) != set(range(self.num_parts)):
            raise ValueError(f"data indices {self.data_index} do not count the replicas of ranks {self.ranks}")

    @classmethod
    def data_parallel(cls, ranks: Sequence[int]) -> "GroupLayout":
        """Every rank is a replica of its own."""
        return cls(tuple(ranks), tuple(range(len(ranks))))

    @classmethod
    def of_mesh(cls, ranks: Sequence[int], axes: Sequence[tuple[str, int]], data_axes: Sequence[str]) -> "GroupLayout":
        """Ranks along a mesh.

        Args:
            ranks: in the order of the mesh, its last axis fastest.
            axes: name and size of each.
            data_axes: axes over which the data are split; over the others it is the same.
        """
        indices = []
        for position in range(len(ranks)):
            index, stride, rest = 0, 1, position
            for name, size in reversed(axes):
                rest, at = divmod(rest, size)
                if name in data_axes:
                    index, stride = index + at * stride, stride * size
            indices.append(index)
        return cls(tuple(ranks), tuple(indices))

    @property
    def num_parts(self) -> int:
        """Replicas."""
        return max(self.data_index, default=-1) + 1

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """Position in ``ranks`` of the first rank of each replica."""
        return tuple(self.data_index.index(part) for part in range(self.num_parts))


Dispatch = Callable[[Arguments, GroupLayout], Sequence[Arguments]]
Collect = Callable[[Sequence[Any], GroupLayout], Any]


def replicate(arguments: Arguments, layout: GroupLayout) -> Sequence[Arguments]:
    """The same arguments for every rank."""
    return [arguments] * len(layout.ranks)


def by_part(*names: str) -> Dispatch:
    """The named arguments are sequences with one entry for each replica, which is given its own; others are the same for all.

    A caller that balances parts by cost makes them and hands them over so.
    """

    def dispatch(arguments: Arguments, layout: GroupLayout) -> Sequence[Arguments]:
        for name in names:
            if name in arguments and len(arguments[name]) != layout.num_parts:
                given = len(arguments[name])
                raise ValueError(f"{name} has {given} parts for {layout.num_parts} replicas")
        return [
            {name: value[part] if name in names else value for name, value in arguments.items()}
            for part in layout.data_index
        ]

    return dispatch


def split(*names: str) -> Dispatch:
    """The named arguments are split evenly and in order over the replicas: lists, tuples, tensors, and whatever has
    ``select(indices)``, such as samples. Parts differ by one entry at most."""

    parts_for = by_part(*names)

    def dispatch(arguments: Arguments, layout: GroupLayout) -> Sequence[Arguments]:
        cut = {name: _parts(value, layout.num_parts) if name in names else value for name, value in arguments.items()}
        return parts_for(cut, layout)

    return dispatch


def _parts(value: Any, num_parts: int) -> list[Any]:
    each, more = divmod(len(value), num_parts)
    starts = [part * each + min(part, more) for part in range(num_parts + 1)]
    pieces = list(zip(starts, starts[1:], strict=False))
    if hasattr(value, "select") and not hasattr(value, "unsqueeze"):
        return [value.select(list(range(start, end))) for start, end in pieces]
    return [value[start:end] for start, end in pieces]


def from_all(results: Sequence[Any], layout: GroupLayout) -> list[Any]:
    """The results of all ranks, in their order."""
    return list(results)


def from_replicas(results: Sequence[Any], layout: GroupLayout) -> list[Any]:
    """One result of each replica, from its first rank."""
    return [results[position] for position in layout.leaders]


def from_first(results: Sequence[Any], layout: GroupLayout) -> Any:
    """The first rank's result, for verbs whose results are the same everywhere."""
    return results[0]
