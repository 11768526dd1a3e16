"""Many tensors in one launch: a table of addresses that a kernel walks in tiles.

Owns: the table, and how a program of a kernel finds its tensor in it. Refuses to know: what is done to the tensors. Always
holds: addresses and sizes are int64; a tile lies in one tensor. The owner of a table keeps its tensors alive until the kernel
was launched; memory that is freed afterwards is given out again in the order of the device's work.

Imported where a GPU computes, or under Triton's interpreter.

Legend: N tensors, F fields of a tensor in the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR_BYTES = 16
"""What a thread reads at once, if addresses are multiples of it."""


@dataclass(frozen=True)
class TensorTable:
    """Addresses and sizes on the device.

    Args:
        fields_FN: int64: first tile, elements, then the fields of the kernel, such as addresses.
        tiles: of all tensors.
        aligned: every address is a multiple of ``VECTOR_BYTES``.
    """

    fields_FN: Tensor
    tiles: int
    aligned: bool

    @classmethod
    def of(
        cls, elements: Sequence[int], addresses: Sequence[Sequence[int]], others: Sequence[Sequence[int]] = (), *,
        tile: int, device: torch.device,
    ) -> "TensorTable":  # fmt: skip
        """Build it, and send it to the device without waiting.

        Args:
            elements: of each tensor.
            addresses: of each tensor, once for each role it has (source, target).
            others: further fields of each tensor.
            tile: elements of a tile.
            device: where the tensors are.
        """
        ends = list(accumulate(-(-count // tile) for count in elements))
        fields = torch.tensor([[0, *ends[:-1]], list(elements), *addresses, *others], dtype=torch.int64)
        if device.type == "cuda":
            fields = fields.pin_memory().to(device, non_blocking=True)
        aligned = all(address % VECTOR_BYTES == 0 for role in addresses for address in role)
        return cls(fields, ends[-1] if ends else 0, aligned)

    @property
    def count(self) -> int:
        return self.fields_FN.shape[1]

    @property
    def steps(self) -> int:
        """Steps of ``tensor_of_tile``."""
        return (self.count - 1).bit_length()


@triton.jit
def tensor_of_tile(table, count, steps, tile):
    """The tensor that a tile lies in: the last one whose first tile is not after it. Empty tensors have no tile."""
    low = tl.full([], 0, tl.int32)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(table + middle) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def pointer_of(address, kind: tl.constexpr, aligned: tl.constexpr):
    """An address of the table as a pointer to elements of a kind."""
    pointer = address.to(tl.pointer_type(kind), bitcast=True)
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
