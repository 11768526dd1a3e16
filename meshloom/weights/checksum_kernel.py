"""The checksum of ``meshloom.weights.checksum`` in one pass over memory, for CUDA.

Owns: the Triton kernel. Always holds: it gives the number of the plain sum, whatever the order of the blocks: integers
modulo 2^64 add up the same in any order.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshloom.weights.checksum import MULTIPLIER, SHIFT

_BLOCK = 8192


@triton.jit
def _sum_kernel(values, out, count, multiplier: tl.constexpr, shift: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(values + place, mask=place < count, other=0).to(tl.int64)
    mixed = place * multiplier
    weight = (mixed ^ (mixed >> shift)) | 1
    tl.atomic_add(out, tl.sum(value * weight, axis=0))


def add_checksum(out: Tensor, values: Tensor) -> None:
    """Add Σ values_i · w_i to ``out``.

    Args:
        out: int64 scalar.
        values: integers of 8, 16 or 32 bits, flat and contiguous.
    """
    if len(values):
        grid = (triton.cdiv(len(values), _BLOCK),)
        _sum_kernel[grid](values, out, len(values), MULTIPLIER, SHIFT, _BLOCK, num_warps=8)
