"""Checksums of tensors on their own device: exact integer sums over the raw bits, without waiting for the device.

Owns: the sum and the comparison. Refuses to know: what tensors mean. Always holds: the sum does not depend on the device, on
how work is split, or on strides; a changed value, two swapped ones, or a tensor in another's place change it.

A tensor's bits are read as integers u of 32 bits (of 16 or 8 where its size is no multiple of that), and summed as
Σ u_i · w_i modulo 2^64. The w_i are odd and mixed from the place i: any one changed value changes the sum with certainty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio, as a signed number: spreads places over all bits."""
SHIFT = 29
_CHUNK = 1 << 22
_ODD = 2 * MULTIPLIER % 2**64 + 1
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


def bits(tensor: Tensor) -> Tensor:
    """The raw bits of a tensor as a flat one of the widest integers (32, 16 or 8 bits) that fit its size."""
    flat = tensor.detach().contiguous().reshape(-1)
    width = next(width for width in _INTEGERS if flat.nbytes % width == 0)
    if flat.data_ptr() % width or flat.storage_offset() * flat.itemsize % width:
        flat = flat.clone()
    return flat.view(torch.int8).view(_INTEGERS[width])


def checksums_into(out_N: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the checksums of tensors to ``out_N``, int64 [tensors] on their device that is 0 before."""
    values = [bits(tensor) for tensor in tensors]
    if out_N.is_cuda:
        from meshloom.weights.copy_kernels import add_checksums

        add_checksums(out_N, values)
        return
    for out, each in zip(out_N.unbind(), values, strict=True):
        for start in range(0, len(each), _CHUNK):
            chunk = each[start : start + _CHUNK]
            place = torch.arange(start, start + len(chunk), device=chunk.device)
            mixed = place * MULTIPLIER
            out += (chunk.to(torch.int64) * ((mixed ^ (mixed >> SHIFT)) | 1)).sum()


@dataclass(frozen=True)
class Checksums:
    """Checksums of named tensors, still on their device.

    Args:
        names: of the tensors.
        values: int64 [names].
    """

    names: tuple[str, ...]
    values: Tensor

    @classmethod
    def of(cls, names: Sequence[str], tensors: Sequence[Tensor]) -> "Checksums":
        """Compute them. Nothing waits for the device; all tensors are on one."""
        device = tensors[0].device if tensors else None
        values = torch.zeros(len(names), dtype=torch.int64, device=device)
        checksums_into(values, tensors)
        return cls(tuple(names), values)

    def differing(self, other: "Checksums") -> list[str]:
        """Names whose sums differ. Waits for the device once.

        Raises:
            ValueError: if the two are of other names.
        """
        if self.names != other.names:
            raise ValueError("checksums of different tensors")
        places = (self.values != other.values).nonzero()[:, 0].tolist()
        return [self.names[place] for place in places]

    def total(self) -> str:
        """One number of all, in hexadecimal; depends on the order of the names. Waits for the device."""
        total = 0
        for value in self.values.tolist():
            total = (total * _ODD + value) % 2**64
        return f"{total:016x}"
