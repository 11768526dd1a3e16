"""The gap between sampler and trainer: measured always, corrected on request.

The sampler's log-probabilities differ from the trainer's by kernels, arithmetic and age of the weights. Owns: measures of the
gap, importance weights and rejection. Always holds: everything here is data, without gradient; weights and kept tokens
concern the mask only; statistics are sums that add over microbatches and ranks.

The ratio of a token is w = exp(log π_train,old − log π_sampler), its log clamped to ±20.

Legend: T tokens end to end, S samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from meshloom.algorithms.segments import on_tokens, sample_counts, sample_maxima, sample_sums


class Level(StrEnum):
    """What is weighed or rejected as one."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """Weights: the product of the sample's ratios."""
    SEQUENCE_MEAN = "sequence-mean"
    """Rejection: the mean over the sample's tokens."""
    SEQUENCE_MAX = "sequence-max"
    """Rejection: the largest of the sample's tokens."""


@dataclass(frozen=True, kw_only=True)
class SamplerGap:
    """Sums over tokens, as tensors of one number; ``+`` merges microbatches.

    Args:
        num_tokens: tokens in the mask.
        abs_sum: sum of |Δ log-prob|.
        abs_max: largest |Δ log-prob|; 0 without tokens.
        k3_sum: sum of w − log w − 1, an estimate of KL(sampler‖trainer).
        weight_sum: sum of w.
        weight_square_sum: sum of w².
    """

    num_tokens: Tensor
    abs_sum: Tensor
    abs_max: Tensor
    k3_sum: Tensor
    weight_sum: Tensor
    weight_square_sum: Tensor

    def __add__(self, other: "SamplerGap") -> "SamplerGap":
        return SamplerGap(
            num_tokens=self.num_tokens + other.num_tokens,
            abs_sum=self.abs_sum + other.abs_sum,
            abs_max=torch.maximum(self.abs_max, other.abs_max),
            k3_sum=self.k3_sum + other.k3_sum,
            weight_sum=self.weight_sum + other.weight_sum,
            weight_square_sum=self.weight_square_sum + other.weight_square_sum,
        )

    def summary(self) -> dict[str, float]:
        """``mean_abs``, ``max_abs``, ``k3``, ``effective_share`` = (Σw)² ÷ (n·Σw²), 1 without a gap; empty without tokens."""
        count = float(self.num_tokens)
        if not count:
            return {}
        return {
            "mean_abs": float(self.abs_sum) / count,
            "max_abs": float(self.abs_max),
            "k3": float(self.k3_sum) / count,
            "effective_share": float(self.weight_sum) ** 2 / (count * float(self.weight_square_sum)),
        }


def sampler_gap(trainer_logprob_T: Tensor, sampler_logprob_T: Tensor, mask_T: Tensor) -> SamplerGap:
    """Measure the gap.

    Args:
        trainer_logprob_T: log-probs under the trainer at the weights that sampled (or the proximal policy's), [T].
        sampler_logprob_T: log-probs the sampler gave, [T].
        mask_T: the model's own tokens, bool [T].
    """
    raw_T = _difference(trainer_logprob_T, sampler_logprob_T, mask_T)
    log_T = raw_T.clamp(-20.0, 20.0)
    weight_T = torch.where(mask_T, log_T.exp(), 0.0)
    return SamplerGap(
        num_tokens=mask_T.sum(),
        abs_sum=raw_T.abs().sum(),
        abs_max=raw_T.abs().amax() if len(raw_T) else raw_T.new_zeros(()),
        k3_sum=_k3(log_T).sum(),
        weight_sum=weight_T.sum(),
        weight_square_sum=weight_T.square().sum(),
    )


def truncated_weights(
    trainer_logprob_T: Tensor, sampler_logprob_T: Tensor, mask_T: Tensor, lengths_S: Tensor, *, level: Level, cap: float
) -> Tensor:
    """Importance weights min(w, cap), [T]; 1 outside the mask.

    Args:
        level: ``token``, or ``sequence``: the product of the sample's ratios stands on each of its tokens.
    """
    weight_T = _weights(trainer_logprob_T, sampler_logprob_T, mask_T, lengths_S, level).clamp(max=cap)
    return torch.where(mask_T, weight_T, 1.0)


def banded_weights(
    trainer_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    mask_T: Tensor,
    lengths_S: Tensor,
    *,
    level: Level,
    low: float,
    high: float,
) -> Tensor:
    """Importance weights w where low ≤ w ≤ high, and 0 where not, [T]; 1 outside the mask.

    Tokens of weight 0 still count in the denominators; to leave them out use ``kept_tokens``.
    """
    weight_T = _weights(trainer_logprob_T, sampler_logprob_T, mask_T, lengths_S, level)
    banded_T = torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0.0)
    return torch.where(mask_T, banded_T, 1.0)


def kept_tokens(
    trainer_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    mask_T: Tensor,
    lengths_S: Tensor,
    *,
    measure: str,
    level: Level,
    bound: float,
) -> Tensor:
    """The mask without what is rejected, bool [T]; denominators are then those of this mask.

    Args:
        measure: of a token, ``k1``: |log w|, ``k2``: ½ log² w, ``k3``: w − log w − 1.
        level: ``token``, ``sequence-mean`` (with k1: the magnitude of the mean of log w) or ``sequence-max``.
        bound: what is larger is rejected.

    Raises:
        ValueError: if measure or level is none of these.
    """
    if measure not in _MEASURES:
        raise ValueError(f"measure {measure!r} is none of {', '.join(_MEASURES)}")
    log_T = _difference(trainer_logprob_T, sampler_logprob_T, mask_T).clamp(-20.0, 20.0)
    gap_T = _MEASURES[measure](log_T)
    if level is Level.TOKEN:
        return mask_T & (gap_T.abs() <= bound)
    if level is Level.SEQUENCE_MEAN:
        gap_S = sample_sums(gap_T, lengths_S) / sample_counts(mask_T, lengths_S).clamp(min=1)
    elif level is Level.SEQUENCE_MAX:
        gap_S = sample_maxima(gap_T.abs(), lengths_S)
    else:
        raise ValueError(f"rejection has no level {level!r}")
    return mask_T & on_tokens(gap_S.abs() <= bound, lengths_S)


def _difference(trainer_logprob_T: Tensor, sampler_logprob_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, trainer_logprob_T - sampler_logprob_T, 0.0).detach()


def _weights(trainer_T: Tensor, sampler_T: Tensor, mask_T: Tensor, lengths_S: Tensor, level: Level) -> Tensor:
    log_T = _difference(trainer_T, sampler_T, mask_T)
    if level is Level.SEQUENCE:
        log_T = on_tokens(sample_sums(log_T, lengths_S), lengths_S)
    elif level is not Level.TOKEN:
        raise ValueError(f"weights have no level {level!r}")
    return log_T.clamp(-20.0, 20.0).exp()


def _k3(log_T: Tensor) -> Tensor:
    return torch.expm1(log_T) - log_T


_MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_T: log_T,
    "k2": lambda log_T: 0.5 * log_T.square(),
    "k3": _k3,
}
