"""What all ranks of a movement agree on before the first one: names, shapes, dtypes, who has what, who needs what.

Owns: the exchange and the comparison. Refuses to know: values. Always holds: a disagreement is the same error on every rank,
and names the tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshloom.config.errors import RunFault
from meshloom.weights.layouts import Box
from meshloom.weights.routes import TensorLayout
from meshloom.weights.shards import Giver, Part, Taker

Told = tuple[dict[str, Part] | None, dict[str, Part] | None]
"""What a rank gives and what it takes."""


@dataclass(frozen=True)
class Agreed:
    """The agreement.

    Args:
        layouts: of all tensors that are needed somewhere, in the order in which they are given.
        dtypes: of their values on the way: those of the places where they go.
    """

    layouts: tuple[TensorLayout, ...]
    dtypes: tuple[torch.dtype, ...]


def agree(giver: Giver | None, taker: Taker | None, group: dist.ProcessGroup) -> Agreed:
    """Tell the others, hear them, and compare; due on all ranks of the group.

    Raises:
        RunFault: on all ranks.
    """
    mine: Told = (None if giver is None else giver.parts(), None if taker is None else taker.parts())
    ranks = dist.get_process_group_ranks(group)
    told: list[Told] = [(None, None)] * len(ranks)
    dist.all_gather_object(told, mine, group=group)
    given = {rank: sides[0] for rank, sides in zip(ranks, told, strict=True) if sides[0] is not None}
    taken = {rank: sides[1] for rank, sides in zip(ranks, told, strict=True) if sides[1] is not None}
    return compare(given, taken)


def compare(given: Mapping[int, Mapping[str, Part]], taken: Mapping[int, Mapping[str, Part]]) -> Agreed:
    """The agreement of sides.

    Args:
        given: what each rank gives.
        taken: what each rank needs.

    Raises:
        RunFault: if a tensor is needed that nobody gives, or is given that nobody needs, or has different shapes or dtypes.
    """
    names = _names_in_order(given)
    needed = dict.fromkeys(name for parts in taken.values() for name in parts)
    if unknown := [name for name in needed if name not in names]:
        raise _mismatch(unknown[0], f"an engine needs it, the trainer has none; so are {len(unknown) - 1} others")
    if unused := [name for name in names if name not in needed]:
        raise _mismatch(unused[0], f"the trainer has it, no engine needs it; so are {len(unused) - 1} others")
    found = [_layout(name, given, taken) for name in names]
    return Agreed(tuple(layout for layout, _ in found), tuple(dtype for _, dtype in found))


def _names_in_order(given: Mapping[int, Mapping[str, Part]]) -> dict[str, None]:
    """All names; those of a stage of a pipeline after those of the stage before, as ranks come."""
    names: dict[str, None] = {}
    for rank in sorted(given):
        names |= dict.fromkeys(given[rank])
    return names


def _layout(
    name: str, given: Mapping[int, Mapping[str, Part]], taken: Mapping[int, Mapping[str, Part]]
) -> tuple[TensorLayout, torch.dtype]:
    sources = {rank: parts[name] for rank, parts in given.items() if name in parts}
    targets = {rank: parts[name] for rank, parts in taken.items() if name in parts}
    if len(shapes := {part.shape for part in (*sources.values(), *targets.values())}) > 1:
        told = ", ".join(f"rank {rank}: {list(part.shape)}" for rank, part in sorted((sources | targets).items()))
        raise _mismatch(name, f"{len(shapes)} shapes ({told})")
    if len(dtypes := {part.dtype for part in targets.values()}) > 1:
        raise _mismatch(name, f"engines hold it in {', '.join(sorted(map(str, dtypes)))}")
    (shape,), (dtype,) = shapes, dtypes
    boxes: dict[int, Box] = {rank: part.boxes[0] for rank, part in sources.items()}
    wanted = {rank: part.boxes for rank, part in targets.items()}
    layout = TensorLayout(name=name, shape=shape, itemsize=dtype.itemsize, sources=boxes, targets=wanted)
    return layout, dtype


def _mismatch(name: str, why: str) -> RunFault:
    return RunFault(f"trainer and engines do not agree on {name}", where="weights", why=why)
