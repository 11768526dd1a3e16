"""The mesh of a model that is trained, as processes see it: its axes, this process's place, its groups.

Owns: process groups of the axes, which ranks get the same samples, small agreements between ranks. Refuses to know: models,
samples, how the world's processes were started. Always holds: ranks of a group are in the order of its axis; agreements go
through the processors, and wait for no device.

Axes, outermost first, as ``plan.meshes`` has them: ``pp``, ``replicate``, ``fsdp``, ``sp``, ``tp``. Weights are sharded over
``fsdp`` and ``sp`` together (the axis ``shard`` here): ranks that share a sequence need the same weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshloom.config.errors import RunFault
from meshloom.plan.meshes import Mesh

AXES = ("pp", "replicate", "fsdp", "sp", "tp")


class PeerFailed(RunFault):
    """Another rank could not do its part; its own error says why."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Process groups that this rank is a member of; none where the axis has size one.

    Args:
        control: all ranks of the mesh, through the processors.
        everyone: all ranks of the mesh, through the devices.
        sp, tp, pp: ranks that differ from this one on that axis alone, in its order.
        ends: the first and the last of ``pp``, where this rank is one of them.
    """

    control: dist.ProcessGroup
    everyone: dist.ProcessGroup
    sp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None


class TrainMesh:
    """A mesh over processes of the world, one device each, and this process's place in it. ``make_mesh`` makes it.

    Args:
        sizes: of every axis.
        ranks: of the world, in the order of the mesh.
        device: of this process.
        groups: of this process.
        whole: over the axes ``replicate``, ``shard`` and ``tp`` of this process's stage.
    """

    def __init__(
        self, sizes: Mapping[str, int], ranks: Sequence[int], device: torch.device, groups: Groups, whole: DeviceMesh
    ) -> None:
        self.sizes, self.ranks, self.device, self.groups = dict(sizes), tuple(ranks), device, groups
        self.rank = self.ranks.index(dist.get_rank())
        self.place = dict(zip(AXES, _place(self.sizes, self.rank), strict=True))
        names = whole.mesh_dim_names or ()
        data = tuple(name for name in names if name != "tp")
        self.data_mesh = whole if data == names else whole[data]
        """What weights are sharded and copied over."""
        self.tensor_mesh = whole["tp"] if "tp" in names else None
        """What layers are cut over."""

    def __len__(self) -> int:
        return len(self.ranks)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes[axis]

    @property
    def data_place(self) -> int:
        """Which part of a batch this rank gets, of ``num_data_places``; ranks with the same one get the same samples."""
        return self.place["replicate"] * self.sizes["fsdp"] + self.place["fsdp"]

    @property
    def num_data_places(self) -> int:
        return self.sizes["replicate"] * self.sizes["fsdp"]

    @property
    def knows(self) -> bool:
        """Whether this rank has what the head says of its samples: those of the last stage do."""
        return self.place["pp"] == self.sizes["pp"] - 1

    @property
    def answers(self) -> bool:
        """Whether this rank's results are the ones to collect: one rank of each data place says what all of them know."""
        return self.place["sp"] == 0 and self.place["tp"] == 0 and self.knows

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of a stage's part of the weights together."""
        return self.sizes["fsdp"] * self.sizes["sp"]

    @property
    def shard_place(self) -> int:
        """Which of those shards this rank holds."""
        return self.place["fsdp"] * self.sizes["sp"] + self.place["sp"]

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over all ranks of the mesh."""
        told = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.groups.control)
        return told.tolist()

    def agree(self, value: int, error: Exception | None = None) -> int:
        """The largest value of all ranks; due on each of them, with the error of one that could not do its part.

        Raises:
            Exception: this rank's own error.
            PeerFailed: that names a rank which had one.
        """
        failed = self.rank + 1 if error is not None else 0
        most, failed = self.largest(value, failed)
        if error is not None:
            raise error
        if failed:
            raise PeerFailed(f"rank {self.ranks[failed - 1]} could not do its part of the step", where="training mesh")
        return most

    def gather(self, value: Any) -> list[Any]:
        """A small Python value of every rank, in the order of the mesh; through the processors."""
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, value, group=self.groups.control)
        return found


def make_mesh(axes: Sequence[tuple[str, int]], ranks: Sequence[int], device: torch.device) -> TrainMesh | None:
    """A mesh over some processes of the world. Every process of the world must call it, with the same axes and ranks, and in
    the same order where there are several: that is how process groups are made.

    Args:
        axes: name and size of each axis, outermost first, as ``plan.meshes.model_mesh`` gives them; any may be left out.
        ranks: of the world, ascending, in the order of the mesh.
        device: of this process.

    Returns:
        The mesh; none for a process that is not in it.

    Raises:
        ValueError: if axes are unknown or out of order, or do not make so many ranks.
    """
    sizes = _sizes(axes, ranks)
    lines = _lines(sizes)
    here = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1
    backend = None if device.type == "cpu" else "gloo"
    control = dist.new_group(list(ranks), backend=backend)
    everyone = dist.new_group(list(ranks))
    own: dict[str, tuple[dist.ProcessGroup, list[int]]] = {}
    for name, all_lines in lines.items():
        for places in all_lines:
            group = dist.new_group([ranks[place] for place in places])
            if here in places:
                own[name] = group, places
    if here < 0:
        return None
    groups = Groups(
        control=control, everyone=everyone, **{n: own[n][0] if n in own else None for n in ("sp", "tp", "pp", "ends")}
    )
    names = [name for name in ("replicate", "shard", "tp") if name in own]
    stage = _grid(sizes)[_place(sizes, here)[0]].flatten()
    shape = [len(own[name][1]) for name in names]
    whole = DeviceMesh.from_group(
        [own[name][0] for name in names],
        device.type,
        torch.tensor(ranks)[stage].reshape(shape),
        mesh_dim_names=tuple(names),
    )
    return TrainMesh(sizes, ranks, device, groups, whole)


def mesh_of_plan(mesh: Mesh, ranks: Sequence[int], device: torch.device) -> TrainMesh | None:
    """``make_mesh`` for the plan's mesh of a role; ``ranks`` of its devices, in their order."""
    return make_mesh(mesh.axes, ranks, device)


def _sizes(axes: Sequence[tuple[str, int]], ranks: Sequence[int]) -> dict[str, int]:
    names = [name for name, _ in axes]
    if names != [name for name in AXES if name in names]:
        raise ValueError(f"axes {names} are not some of {AXES} in that order")
    sizes = {name: dict(axes).get(name, 1) for name in AXES}
    if prod(sizes.values()) != len(ranks):
        raise ValueError(f"axes {dict(axes)} do not make {len(ranks)} ranks")
    if list(ranks) != sorted(set(ranks)):
        raise ValueError(f"ranks {list(ranks)} are not ascending")
    return sizes


def _grid(sizes: Mapping[str, int]) -> torch.Tensor:
    """Places in the mesh, one dimension for each axis."""
    return torch.arange(prod(sizes.values())).reshape([sizes[name] for name in AXES])


def _place(sizes: Mapping[str, int], rank: int) -> list[int]:
    return (_grid(sizes) == rank).nonzero()[0].tolist()


def _lines(sizes: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """For each axis that needs groups, its lines of places; ``shard`` is ``fsdp`` and ``sp`` together, and is there even if it
    has size one, so that everything else is the same on every mesh."""
    grid = _grid(sizes)
    shards = grid.reshape(sizes["pp"], sizes["replicate"], -1, sizes["tp"])
    along = {name: grid.movedim(AXES.index(name), -1) for name in ("pp", "replicate", "sp", "tp") if sizes[name] > 1}
    along["shard"] = shards.movedim(2, -1)
    found = {name: lines.reshape(-1, lines.shape[-1]).tolist() for name, lines in along.items()}
    return found | {"ends": [[line[0], line[-1]] for line in found.get("pp", [])]}
