"""The loss reducer: the only place where a loss is divided.

Owns: how per-token losses become one number. Always holds: denominators are those of the whole update (all microbatches,
all ranks), known before the first microbatch; the sum of ``reduce`` over any split of the update into microbatches of
whole samples is the update's loss, and its gradient the update's gradient. What stands at tokens outside the mask, NaN
included, has no influence.

Legend: T tokens of a microbatch end to end, S samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.algorithms.segments import on_tokens, sample_counts
from meshloom.config.errors import UserError

REDUCTIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

COUNT_EPSILON = 1e-8
"""Added to the number of a sample's tokens: a sample without any divides 0 by this. It vanishes in float32."""


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """What an update's losses are divided by. Parts of an update (ranks, microbatches) add up with ``+``.

    Args:
        num_tokens: tokens in the mask.
        num_sequences: samples with at least one token in the mask.
        constant: further divisor of ``seq-mean-token-sum-norm``.
    """

    num_tokens: int
    num_sequences: int
    constant: float | None = None

    def __add__(self, other: "Denominators") -> "Denominators":
        if self.constant != other.constant:
            raise ValueError(f"denominators have different constants: {self.constant} and {other.constant}")
        return Denominators(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            constant=self.constant,
        )


def denominators(mask_T: Tensor, lengths_S: Tensor, *, constant: float | None = None) -> Denominators:
    """The denominators of an update.

    Args:
        mask_T: tokens of the whole update that take part, after any rejection, bool [T].
        lengths_S: tokens of each of its samples, int64 [S].
        constant: ``algorithm.reduction_constant``.
    """
    counts_S = sample_counts(mask_T, lengths_S)
    return Denominators(num_tokens=int(counts_S.sum()), num_sequences=int((counts_S > 0).sum()), constant=constant)


def check_reduction(mode: str, constant: float | None) -> None:
    """Refuse a reduction that cannot work.

    Raises:
        UserError: if the mode is unknown, or needs a constant and has none.
    """
    if mode not in REDUCTIONS:
        raise UserError(f"no reduction is called {mode!r}", where="algorithm.reduction", fix=", ".join(REDUCTIONS))
    if mode == "seq-mean-token-sum-norm" and constant is None:
        raise UserError(
            "seq-mean-token-sum-norm divides by a constant, and none is given",
            where="algorithm.reduction_constant",
            fix="give a constant, such as rollout.max_response_tokens",
        )


def reduce(per_token_T: Tensor, mask_T: Tensor, lengths_S: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """This microbatch's share of the update's loss, a differentiable scalar.

    ========================== ==========================================================================
    ``token-mean``             sum over tokens ÷ the update's tokens
    ``token-sum``              sum over tokens
    ``seq-mean-token-sum``     sum over tokens ÷ the update's samples
    ``seq-mean-token-mean``    sum over samples of the mean over their tokens ÷ the update's samples
    ``seq-mean-token-sum-norm``  sum over tokens ÷ the update's samples ÷ constant
    ========================== ==========================================================================

    Only tokens in the mask count, and only samples that have one.

    Args:
        per_token_T: losses, [T].
        mask_T: tokens that take part, bool [T].
        lengths_S: tokens of each sample of the microbatch, whole samples only, int64 [S].
        mode: one of ``REDUCTIONS``.
        denominators: those of the whole update.

    Raises:
        UserError: as ``check_reduction``.
    """
    check_reduction(mode, denominators.constant)
    losses_T = torch.where(mask_T, per_token_T, 0.0)
    if mode == "seq-mean-token-mean":
        counts_S = sample_counts(mask_T, lengths_S).to(losses_T.dtype) + COUNT_EPSILON
        losses_T = losses_T / on_tokens(counts_S, lengths_S)
    total = losses_T.sum()
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return total / max(denominators.num_tokens, 1)
    total = total / max(denominators.num_sequences, 1)
    if mode == "seq-mean-token-sum-norm" and denominators.constant is not None:
        total = total / denominators.constant
    return total


def kl_term(
    kl_T: Tensor, mask_T: Tensor, lengths_S: Tensor, mode: str, denominators: Denominators, *, coefficient: float
) -> Tensor:
    """Divergence from the reference as a term of the loss: + coefficient · reduce(kl)."""
    return coefficient * reduce(kl_T, mask_T, lengths_S, mode, denominators)


def entropy_term(
    entropy_T: Tensor, mask_T: Tensor, lengths_S: Tensor, mode: str, denominators: Denominators, *, coefficient: float
) -> Tensor:
    """Entropy bonus as a term of the loss: − coefficient · reduce(entropy of the sampling distribution)."""
    return -coefficient * reduce(entropy_T, mask_T, lengths_S, mode, denominators)
