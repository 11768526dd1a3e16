"""The Triton kernel that adds many narrow gradients to float32 totals in one launch. Imported where a GPU computes, or under
Triton's interpreter.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from meshloom.train.tensor_table import TensorTable, pointer_of, tensor_of_tile

_TILE = 4096


def add_gradients(totals: Sequence[Tensor], gradients: Sequence[Tensor], fresh: Sequence[bool]) -> None:
    """``total += gradient`` for each pair; where ``fresh``, ``total = gradient``, whatever it was.

    Args:
        totals: float32, contiguous, all on one device.
        gradients: bfloat16 or float16, all of one dtype, contiguous and of the totals' sizes.
        fresh: for each pair.
    """
    addresses = [[t.data_ptr() for t in totals], [g.data_ptr() for g in gradients]]
    sizes = [t.numel() for t in totals]
    table = TensorTable.of(sizes, addresses, [[int(f) for f in fresh]], tile=_TILE, device=totals[0].device)
    if table.tiles:
        kind = _KINDS[str(gradients[0].dtype)]
        _add[table.tiles,](table.fields_FN, table.count, table.steps, kind, table.aligned, _TILE, num_warps=8)


_KINDS = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16}


@triton.jit(do_not_specialize=["count", "steps"])
def _add(table, count, steps, kind: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr):
    this = tl.program_id(0)
    i = tensor_of_tile(table, count, steps, this)
    begin, size = (this - tl.load(table + i)) * tile, tl.load(table + count + i)
    total = pointer_of(tl.load(table + 2 * count + i), tl.float32, aligned) + begin
    gradient = pointer_of(tl.load(table + 3 * count + i), kind, aligned) + begin
    fresh = tl.load(table + 4 * count + i) != 0
    place = tl.arange(0, tile)
    # Whole tiles apart: without a mask they are read and written in vectors.
    if begin + tile <= size:
        added = tl.load(gradient + place).to(tl.float32)
        if not fresh:
            added += tl.load(total + place)
        tl.store(total + place, added)
    else:
        inside = place < (size - begin).to(tl.int32)
        added = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        if not fresh:
            added += tl.load(total + place, mask=inside, other=0.0)
        tl.store(total + place, added, mask=inside)
