"""Rows of a tensor taken by index, several times each, with a gradient that adds the copies up exactly.

Owns: that selection on a GPU. Refuses to know: what the rows are. Always holds: the gradient of a row is summed over its
copies in float32, in their order, and rounded once; torch's own would add bfloat16 values one by one in whatever order the
device's threads come.

Legend: C rows that are there, A rows taken.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowIndex:
    """Which rows are taken.

    Args:
        source_A: for each row taken, which one it is, int64.
        copies_A: places in ``source_A`` sorted by what stands there, int64: the copies of row 0, of row 1, and so on.
        start_C1: where each row's copies begin in ``copies_A`` and the last one's end, int64 [C + 1].
    """

    source_A: Tensor
    copies_A: Tensor
    start_C1: Tensor

    @classmethod
    def of(cls, source_A: Tensor, num_rows: int) -> "RowIndex":
        """From an index on the CPU into so many rows."""
        counts_C = torch.bincount(source_A, minlength=num_rows)
        start_C1 = torch.cat([counts_C.new_zeros(1), counts_C.cumsum(0)])
        return cls(source_A, source_A.argsort(stable=True), start_C1)


def take_rows(x: Tensor, index: RowIndex) -> Tensor:
    """Rows of ``x`` [C, ...], as [A, ...]."""
    flat = x.flatten(1)
    if x.is_cuda:
        return _TakeRows.apply(flat, index).unflatten(1, x.shape[1:])
    # Flat in between, since the gradient of a flat row selection is fast.
    return flat.index_select(0, index.source_A).unflatten(1, x.shape[1:])


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_CW: Tensor, index: RowIndex) -> Tensor:
        ctx.index = index
        return x_CW.index_select(0, index.source_A)

    @staticmethod
    def backward(ctx: Any, grad_AW: Tensor):
        from meshloom.train.gather_kernels import sum_copies

        return sum_copies(grad_AW.contiguous(), ctx.index.copies_A, ctx.index.start_C1), None
