"""Statistics over the samples of one prompt.

Owns: sum, mean, deviation and best of a group. Always holds: only valid members count; every result stands at each sample,
[S]; nothing a member that does not count holds, NaN included, reaches another.

Legend: S samples.
"""

import torch
from torch import Tensor

from meshloom.algorithms.segments import sample_maxima, sample_sums


class Groups:
    """The samples of a batch by prompt.

    Args:
        group_S: number of each sample's group, any int64 values in any order, [S].
        valid_S: samples that count, bool [S].
    """

    def __init__(self, group_S: Tensor, valid_S: Tensor) -> None:
        self.valid_S = valid_S
        self.index_S = torch.unique(group_S, return_inverse=True)[1]
        self._order_S = torch.argsort(self.index_S, stable=True)
        self._members_G = torch.bincount(self.index_S)
        self.size_S = self.sum(torch.ones_like(valid_S, dtype=torch.float64))
        """Valid members of each sample's group, float64."""
        self.single_S = valid_S & (self.size_S == 1)
        """Where a valid sample is the only valid one of its group, bool."""

    def sum(self, values_S: Tensor) -> Tensor:
        counted_S = torch.where(self.valid_S, values_S, 0.0)
        return sample_sums(counted_S[self._order_S], self._members_G)[self.index_S]

    def mean(self, values_S: Tensor) -> Tensor:
        return self.sum(values_S) / self.size_S.clamp(min=1)

    def centred(self, values_S: Tensor) -> Tensor:
        """Each value minus its group's mean; in a group of one there is no mean to compare with: the value itself."""
        return values_S - torch.where(self.single_S, 0.0, self.mean(values_S))

    def std(self, values_S: Tensor) -> Tensor:
        """Unbiased standard deviation; 0 in a group of one."""
        return (self.sum((values_S - self.mean(values_S)).square()) / (self.size_S - 1).clamp(min=1)).sqrt()

    def extreme(self, values_S: Tensor, *, largest: bool) -> Tensor:
        """The largest or smallest value of each group; −inf or inf in a group without valid members."""
        sign = 1.0 if largest else -1.0
        counted_S = torch.where(self.valid_S, sign * values_S, float("-inf"))
        return sign * sample_maxima(counted_S[self._order_S], self._members_G)[self.index_S]

    def lead(self, values_S: Tensor) -> Tensor:
        """By how much a group's best member beats its second, at the best; 0 at all others and in a group of one.

        Of equal best members none leads.
        """
        ranked_S = torch.where(self.valid_S, values_S, float("-inf"))
        by_value_S = torch.argsort(ranked_S, stable=True)
        order_S = by_value_S[torch.argsort(self.index_S[by_value_S], stable=True)]
        last_G = self._members_G.cumsum(0) - 1
        several_G = self.size_S[order_S[last_G]] > 1
        best_G = order_S[last_G[several_G]]
        second_G = order_S[last_G[several_G] - 1]
        lead_S = torch.zeros_like(values_S)
        lead_S[best_G] = values_S[best_G] - values_S[second_G]
        return lead_S
