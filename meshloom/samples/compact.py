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

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
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
        bits_T = bits_of(column_T)
        changes_T = bits_T[1:] != bits_T[:-1]
        num_runs = min(1, len(bits_T)) + int(changes_T.count_nonzero())
        narrow_T = _narrowed(column_T)
        if num_runs * (column_T.element_size() + 4) >= narrow_T.nbytes:
            return cls(narrow_T, column_T.dtype)
        starts_R = torch.cat([torch.zeros(1, dtype=torch.int64), changes_T.nonzero().squeeze(1) + 1])
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


def _narrowed(column_T: Tensor) -> Tensor:
    """The same values in the narrowest dtype that has them all."""
    if column_T.dtype is torch.float64:
        narrow_T = column_T.float()
        return narrow_T if torch.equal(bits_of(narrow_T.double()), bits_of(column_T)) else column_T
    if column_T.dtype not in (torch.int64, torch.int32) or not len(column_T):
        return column_T
    low, high = (int(bound) for bound in column_T.aminmax())
    fitting = (dtype for dtype in _INTEGERS if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max)
    return column_T.to(next(fitting))
