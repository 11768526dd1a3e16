"""Sums over the stretches of a ragged tensor.

Owns: what every algorithm does with lengths: a sum or maximum for each sample, a sample's number on each of its tokens, and
discounted sums from each token to its sample's end. Always holds: samples stand end to end in the order of ``lengths``;
results do not depend on the order in which a device adds (no atomic additions), so they repeat bit for bit.

Legend: T tokens of all samples end to end, S samples, M the model's own tokens end to end.
"""

import torch
from torch import Tensor


def sample_sums(values_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Sum of each sample's values, [S]; 0 for an empty sample. Not differentiable.

    Args:
        values_T: floats, [T].
        lengths_S: tokens of each sample, int64 [S], on any device.
    """
    return _segment_reduce(values_T, "sum", lengths_S, 0.0)


def sample_maxima(values_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Largest of each sample's values, [S]; −inf for an empty sample. Not differentiable."""
    return _segment_reduce(values_T, "max", lengths_S, float("-inf"))


def sample_counts(mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """How many of each sample's tokens are true, int64 [S], on the mask's device."""
    return sample_sums(mask_T.double(), lengths_S).long()


def on_tokens(values_S: Tensor, lengths_S: Tensor) -> Tensor:
    """Each sample's value on each of its tokens, [T], on the device of ``values_S``. Not differentiable."""
    repeats = lengths_S.to(values_S.device, non_blocking=True)
    return torch.repeat_interleave(values_S.detach(), repeats, output_size=int(lengths_S.sum()))


def sample_of_token(lengths_S: Tensor, device: torch.device) -> Tensor:
    """Index of the sample each token belongs to, int64 [T]."""
    return on_tokens(torch.arange(len(lengths_S), device=device), lengths_S)


def discounted_suffix_sums(values_M: Tensor, sample_M: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount · y_{t+1}, within each sample, [M].

    Computed by doubling: after k rounds each entry holds the sum of the next 2^k, so log2 of the longest sample rounds do.

    Args:
        values_M: x, floats, [M].
        sample_M: sample of each entry, not decreasing, int64 [M].
        discount: a number from 0 to 1.
    """
    sums_M, step = values_M.clone(), 1
    longest = int(torch.bincount(sample_M).max()) if len(sample_M) else 0
    while step < longest:
        same = sample_M[step:] == sample_M[:-step]
        sums_M[:-step] = sums_M[:-step] + torch.where(same, discount**step * sums_M[step:], 0.0)
        step *= 2
    return sums_M


def _segment_reduce(values_T: Tensor, how: str, lengths_S: Tensor, initial: float) -> Tensor:
    lengths = lengths_S.to(values_T.device, non_blocking=True)
    return torch.segment_reduce(values_T.detach(), how, lengths=lengths, unsafe=True, initial=initial)
