"""The Triton kernel behind ``meshloom.train.gather``. Imported where a GPU computes, or under Triton's interpreter.

Legend: C rows that are there, A rows taken, W values of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def sum_copies(grad_AW: Tensor, copies_A: Tensor, start_C1: Tensor) -> Tensor:
    """Sum of the copies of each row, [C, W], in the dtype of the copies; 0 where a row has none.

    Args:
        grad_AW: the copies, contiguous.
        copies_A: places of the copies of row 0, then of row 1, and so on, int64.
        start_C1: where each row's copies begin and the last one's end, int64 [C + 1].
    """
    rows, width = len(start_C1) - 1, grad_AW.shape[1]
    total_CW = torch.empty((rows, width), dtype=grad_AW.dtype, device=grad_AW.device)
    block = min(_BLOCK, triton.next_power_of_2(max(width, 1)))
    if rows and width:
        _sum_copies[rows, triton.cdiv(width, block)](grad_AW, copies_A, start_C1, total_CW, width, block, num_warps=4)
    return total_CW


@triton.jit
def _sum_copies(grad, copies, start, total, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    first, end = tl.load(start + row), tl.load(start + row + 1)
    added = tl.zeros((block,), tl.float32)
    for at in range(first, end):
        copy = tl.load(copies + at)
        added += tl.load(grad + copy * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * width + column, added.to(total.dtype.element_ty), mask=inside)
