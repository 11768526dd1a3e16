"""Many copies in one launch, and the checksum of ``meshloom.weights.checksum`` of many tensors, on the way or alone.
Imported where a GPU computes, or under Triton's interpreter.

Owns: the Triton kernel and its tables. Always holds: copies keep every bit; a sum is the number of the plain sum, whatever the
order of the tiles: integers modulo 2^64 add up the same in any order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshloom.train.tensor_table import VECTOR_BYTES, TensorTable, pointer_of, tensor_of_tile
from meshloom.weights.checksum import MULTIPLIER, SHIFT

_TILE = 4096
_INTEGERS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
_SOURCE, _TARGET = 2, 3


class CopyPlan:
    """Copies between pairs of tensors, as long as these stay where they are.

    Args:
        places: of the pairs' checksums.
        pairs: source and target, each ``is_plain``, on one device.
    """

    def __init__(self, places: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        rows = [_row(place, *pair) for place, pair in zip(places, pairs, strict=True)]
        self._tables = _tables(rows, pairs[0][0].device)

    def run(self) -> None:
        """Copy."""
        for width, table in self._tables:
            _launch(table, width, read=_SOURCE, copy=True, sums=None)

    def run_and_sum(self, before: Tensor, after: Tensor) -> None:
        """Copy, and add the checksums of what was read to ``before``, of what is there afterwards to ``after``."""
        for width, table in self._tables:
            _launch(table, width, read=_SOURCE, copy=True, sums=before)
            _launch(table, width, read=_TARGET, copy=False, sums=after)


def is_plain(source: Tensor, target: Tensor) -> bool:
    """Whether a copy keeps the bits and both sides lie whole in memory, where the checksum's integers can be read."""
    width = width_of(source)
    addresses = source.data_ptr() | target.data_ptr()
    whole = source.is_contiguous() and target.is_contiguous()
    return source.dtype == target.dtype and source.nbytes == target.nbytes and whole and addresses % width == 0


def width_of(tensor: Tensor) -> int:
    """Bytes of the widest integers that a tensor's checksum can read it as."""
    return next(width for width in _INTEGERS if tensor.nbytes % width == 0)


def add_checksums(sums_N: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the checksum of each tensor to its place.

    Args:
        sums_N: int64.
        tensors: N, contiguous, each at a multiple of ``width_of``, on one device.
    """
    rows = [_row(place, tensor, tensor) for place, tensor in enumerate(tensors)]
    for width, table in _tables(rows, sums_N.device):
        _launch(table, width, read=_SOURCE, copy=False, sums=sums_N)


Row = tuple[int, int, int, int, int]
"""Width, elements of that width, address of the source, of the target, place of the checksum."""


def _row(place: int, source: Tensor, target: Tensor) -> Row:
    width = width_of(source)
    return width, source.nbytes // width, source.data_ptr(), target.data_ptr(), place


def _tables(rows: Sequence[Row], device: torch.device) -> list[tuple[int, TensorTable]]:
    """A table for each width, and for what is not aligned apart, so that it slows down nothing else."""
    groups: dict[tuple[int, bool], list[Row]] = {}
    for row in rows:
        groups.setdefault((row[0], (row[2] | row[3]) % VECTOR_BYTES == 0), []).append(row)
    tables = []
    for (width, _), chosen in groups.items():
        _, elements, sources, targets, places = zip(*chosen, strict=True)
        tables.append((width, TensorTable.of(elements, [sources, targets], [places], tile=_TILE, device=device)))
    return tables


def _launch(table: TensorTable, width: int, *, read: int, copy: bool, sums: Tensor | None) -> None:
    if table.tiles:
        out = table.fields_FN if sums is None else sums
        _walk[table.tiles,](
            table.fields_FN, out, table.count, table.steps, _INTEGERS[width], table.aligned, read, copy,
            sums is not None, MULTIPLIER, SHIFT, _TILE, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "steps"])
def _walk(
    table, sums, count, steps, kind: tl.constexpr, aligned: tl.constexpr, read: tl.constexpr, copy: tl.constexpr,
    summed: tl.constexpr, multiplier: tl.constexpr, shift: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    this = tl.program_id(0)
    i = tensor_of_tile(table, count, steps, this)
    begin, size = (this - tl.load(table + i)) * tile, tl.load(table + count + i)
    source = pointer_of(tl.load(table + read * count + i), kind, aligned) + begin
    target = pointer_of(tl.load(table + 3 * count + i), kind, aligned) + begin
    place = tl.arange(0, tile)
    # Whole tiles apart: without a mask they are read and written in vectors.
    if begin + tile <= size:
        value = tl.load(source + place)
        if copy:
            tl.store(target + place, value)
    else:
        inside = place < (size - begin).to(tl.int32)
        value = tl.load(source + place, mask=inside, other=0)
        if copy:
            tl.store(target + place, value, mask=inside)
    if summed:
        mixed = (begin + place) * multiplier
        weight = (mixed ^ (mixed >> shift)) | 1
        out = sums + tl.load(table + 4 * count + i)
        tl.atomic_add(out, tl.sum(value.to(tl.int64) * weight, axis=0))
