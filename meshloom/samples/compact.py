"""Columns of tokens on their way between processes, in the fewest bytes that lose nothing.

Owns: which form a column takes. Refuses to know: what a column means, how it travels. Always holds: what is opened equals what
was packed, bit for bit and in its dtype.

Token ids need fewer bytes than an int64 has; masks, versions and advantages that are one number for a sample are a few runs of
equal values.

Legend: T tokens, R runs of equal values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NARROWER = {
    torch.int64: (torch.uint8, torch.int16, torch.int32),
    torch.int32: (torch.uint8, torch.int16),
    torch.float64: (torch.float32,),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Compact:
    """A column of tokens.

    Args:
        values: one of each run, or of each token.
        dtype: of the column.
        counts_R: tokens of each run, int32; none where there is a value of each token.
    """

    values: Tensor
    dtype: torch.dtype
    counts_R: Tensor | None = None

    @classmethod
    def of(cls, column_T: Tensor) -> "Compact":
        """Packed: as runs if they are smaller, else as the narrowest dtype that has all values.

        Args:
            column_T: one number a token, on the CPU.
        """
        narrow_T = _narrowed(column_T)
        bits_T = bits_of(column_T)
        starts_R = torch.cat([torch.zeros(min(1, len(bits_T)), dtype=torch.int64), _changes(bits_T)])
        if len(starts_R) * (column_T.element_size() + 4) >= narrow_T.nbytes:
            return cls(narrow_T, column_T.dtype)
        counts_R = torch.diff(starts_R, append=torch.tensor([len(bits_T)]))
        return cls(column_T[starts_R], column_T.dtype, counts_R.int())

    @property
    def nbytes(self) -> int:
        """That travel."""
        return self.values.nbytes + (0 if self.counts_R is None else self.counts_R.nbytes)

    def opened(self) -> Tensor:
        """The column [T]."""
        values = self.values if self.counts_R is None else self.values.repeat_interleave(self.counts_R)
        return values.to(self.dtype)


def bits_of(column: Tensor) -> Tensor:
    """The same memory in a dtype whose equality is that of bits: zeros have no sign, and what is no number equals itself."""
    return column.view(_BITS[column.element_size()])


def _changes(bits_T: Tensor) -> Tensor:
    """Places whose value is another than that before."""
    return (bits_T[1:] != bits_T[:-1]).nonzero().squeeze(1) + 1


def _narrowed(column_T: Tensor) -> Tensor:
    """The same values in the narrowest dtype that has them all."""
    for dtype in _NARROWER.get(column_T.dtype, ()):
        narrow_T = column_T.to(dtype)
        if torch.equal(bits_of(narrow_T.to(column_T.dtype)), bits_of(column_T)):
            return narrow_T
    return column_T
