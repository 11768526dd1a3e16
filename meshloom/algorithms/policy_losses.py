"""Policy losses: from probabilities and advantages to a loss of each token.

Owns: the losses by name and what is counted about them. Refuses to know: models, microbatches, denominators: the reducer
sums and divides. Always holds: a token outside the mask has no loss, no gradient and no influence, whatever stands there;
correction weights multiply the loss; statistics are sums that add over microbatches and ranks.

A new loss is one function of ``PolicyInputs`` and ``PolicySettings`` under ``@policy_loss("name")``, or in a file of the user's
own.

With ρ = π/π_old, A the advantage, ε_lo and ε_hi the clip settings, and sg "no gradient".

Legend: T tokens of a microbatch end to end, S samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshloom.algorithms.own import OwnFunction
from meshloom.algorithms.reduce import COUNT_EPSILON
from meshloom.algorithms.registry import Registry
from meshloom.algorithms.segments import on_tokens, sample_counts, sample_sums


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """Tokens of a microbatch.

    Args:
        logprob_T: log π of each token, differentiable, [T].
        old_logprob_T: log π_old, [T].
        advantages_T: [T].
        mask_T: tokens that take part, bool [T].
        lengths_S: tokens of each sample, whole samples only, int64 [S].
        correction_weights_T: importance weights between sampler and trainer, [T]; none: 1.
    """

    logprob_T: Tensor
    old_logprob_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    lengths_S: Tensor
    correction_weights_T: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What a user may set; a loss reads what it names.

    Args:
        clip_low: ε_lo.
        clip_high: ε_hi.
        dual_clip: bound on the loss of a negative advantage, as a multiple of it; none: no bound. For the dppo losses the
            largest ratio.
        tau_positive: temperature of ``sapo`` for positive advantages.
        tau_negative: the same for others.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass(frozen=True, kw_only=True)
class PolicyStats:
    """Sums over tokens, as tensors of one number on the loss's device; ``+`` merges microbatches.

    Args:
        num_tokens: tokens in the mask.
        num_clipped: of these, tokens whose gradient was clipped away or bounded.
        ratio_sum: sum of ρ.
        ratio_max: largest ρ; −inf without tokens.
        kl_sum: sum of log π_old − log π, an estimate of KL(π_old‖π).
    """

    num_tokens: Tensor
    num_clipped: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    kl_sum: Tensor

    def __add__(self, other: "PolicyStats") -> "PolicyStats":
        return PolicyStats(
            num_tokens=self.num_tokens + other.num_tokens,
            num_clipped=self.num_clipped + other.num_clipped,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            kl_sum=self.kl_sum + other.kl_sum,
        )

    def summary(self) -> dict[str, float]:
        """Over tokens: ``clipped_share``, ``ratio_mean``, ``ratio_max`` and ``kl_old`` (a mean); empty without tokens."""
        count = float(self.num_tokens)
        if not count:
            return {}
        return {
            "clipped_share": float(self.num_clipped) / count,
            "ratio_mean": float(self.ratio_sum) / count,
            "ratio_max": float(self.ratio_max),
            "kl_old": float(self.kl_sum) / count,
        }


@dataclass(frozen=True, kw_only=True)
class PolicyOutputs:
    """A microbatch's losses.

    Args:
        per_token_T: losses to be reduced, [T], 0 outside the mask.
        stats: what happened.
    """

    per_token_T: Tensor
    stats: PolicyStats


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """What a loss function computes: losses, the ratios they are made of, and where the ratio's gradient was cut, all [T]."""

    loss_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor


Function = Callable[[PolicyInputs, PolicySettings], TokenLosses]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A loss and the reduction it is defined with.

    Args:
        reduction: the one reduction this loss means anything with; none: the user's choice.
    """

    name: str
    function: Function
    reduction: str | None

    def __call__(self, inputs: PolicyInputs, settings: PolicySettings) -> PolicyOutputs:
        """Loss of each token, to be reduced."""
        clean = _clean(inputs)
        tokens = self.function(clean, settings)
        ratio_T, mask_T = tokens.ratio_T.detach(), clean.mask_T
        stats = PolicyStats(
            num_tokens=mask_T.sum(),
            num_clipped=(tokens.clipped_T & mask_T).sum(),
            ratio_sum=torch.where(mask_T, ratio_T, 0.0).sum(),
            ratio_max=torch.where(mask_T, ratio_T, float("-inf")).amax()
            if len(ratio_T)
            else ratio_T.new_tensor(float("-inf")),
            kl_sum=(clean.old_logprob_T - clean.logprob_T.detach()).sum(),
        )
        return PolicyOutputs(per_token_T=torch.where(mask_T, tokens.loss_T, 0.0), stats=stats)


def _own(name: str, function: OwnFunction) -> PolicyLoss:
    """A loss of the user's own: it gives the loss of each token, or ``TokenLosses``. Correction weights are put on it here."""

    def compute(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
        found = function(replace(inputs, correction_weights_T=None), settings)
        if not isinstance(found, TokenLosses):
            loss_T, never = function.require(found, len(inputs.mask_T), "losses"), torch.zeros_like(inputs.mask_T)
            found = TokenLosses(loss_T=loss_T, ratio_T=_log_ratio(inputs).exp(), clipped_T=never)
        return replace(found, loss_T=_weighted(found.loss_T, inputs))

    return PolicyLoss(name=name, function=compute, reduction=None)


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", "algorithm.policy_loss", _own)


def policy_loss(name: str, *, reduction: str | None = None) -> Callable[[Function], Function]:
    """Register a loss under ``name``, with the reduction it is defined with, if any."""

    def register(function: Function) -> Function:
        POLICY_LOSSES.add(name, PolicyLoss(name=name, function=function, reduction=reduction))
        return function

    return register


def _clean(inputs: PolicyInputs) -> PolicyInputs:
    """The same, with harmless numbers outside the mask: NaN times a zero gradient is NaN, so it must not get in."""
    mask_T, weights_T = inputs.mask_T, inputs.correction_weights_T
    return replace(
        inputs,
        logprob_T=torch.where(mask_T, inputs.logprob_T, 0.0),
        old_logprob_T=torch.where(mask_T, inputs.old_logprob_T, 0.0).detach(),
        advantages_T=torch.where(mask_T, inputs.advantages_T, 0.0).detach(),
        correction_weights_T=None if weights_T is None else torch.where(mask_T, weights_T, 1.0).detach(),
    )


def _log_ratio(inputs: PolicyInputs) -> Tensor:
    return (inputs.logprob_T - inputs.old_logprob_T).clamp(-20.0, 20.0)


def _weighted(loss_T: Tensor, inputs: PolicyInputs) -> Tensor:
    return loss_T if inputs.correction_weights_T is None else loss_T * inputs.correction_weights_T


def _clipped_loss(ratio_T: Tensor, advantages_T: Tensor, settings: PolicySettings) -> tuple[Tensor, Tensor]:
    """max(−Aρ, −A·clip(ρ)) and where the clip is the larger."""
    plain_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.maximum(plain_T, bounded_T), bounded_T > plain_T


def _mean_of_sample(values_T: Tensor, inputs: PolicyInputs, epsilon: float = 0.0) -> Tensor:
    """Mean over each sample's tokens in the mask, on each of its tokens; the values are 0 outside the mask. No gradient."""
    counts_S = sample_counts(inputs.mask_T, inputs.lengths_S).clamp(min=1).to(values_T.dtype) + epsilon
    return on_tokens(sample_sums(values_T, inputs.lengths_S) / counts_S, inputs.lengths_S)


@policy_loss("ppo")
def ppo(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """max(−Aρ, −A·clip(ρ, 1 − ε_lo, 1 + ε_hi)); for A < 0 at most −A·c.

    Clip: arXiv:1707.06347; two bounds: arXiv:2503.14476; dual clip: arXiv:1912.09729.
    """
    ratio_T = _log_ratio(inputs).exp()
    advantages_T = inputs.advantages_T
    loss_T, clipped_T = _clipped_loss(ratio_T, advantages_T, settings)
    if settings.dual_clip is not None:
        bound_T = -advantages_T * settings.dual_clip
        bounded_T = (advantages_T < 0) & (bound_T < loss_T)
        loss_T, clipped_T = torch.where(bounded_T, bound_T, loss_T), clipped_T | bounded_T
    return TokenLosses(loss_T=_weighted(loss_T, inputs), ratio_T=ratio_T, clipped_T=clipped_T)


@policy_loss("gspo", reduction="seq-mean-token-mean")
def gspo(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """PPO's clip on the sample's ratio s = exp(mean log ρ over its tokens) (arXiv:2507.18071).

    The value is the sample's, the gradient goes through each token: log s_t = sg(log s) + log π_t − sg(log π_t), at most 10.
    """
    log_ratio_T = inputs.logprob_T - inputs.old_logprob_T
    through_T = inputs.logprob_T - inputs.logprob_T.detach()
    ratio_T = (through_T + _mean_of_sample(log_ratio_T, inputs)).clamp(max=10.0).exp()
    loss_T, clipped_T = _clipped_loss(ratio_T, inputs.advantages_T, settings)
    return TokenLosses(loss_T=_weighted(loss_T, inputs), ratio_T=ratio_T, clipped_T=clipped_T)


@policy_loss("cispo")
def cispo(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """−sg(clip(ρ, 1 − ε_lo, 1 + ε_hi))·A·log π: the ratio is clipped, the gradient is kept (arXiv:2506.13585)."""
    ratio_T = _log_ratio(inputs).exp().detach()
    bounded_T = ratio_T.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_T = -bounded_T * inputs.advantages_T * inputs.logprob_T
    return TokenLosses(loss_T=_weighted(loss_T, inputs), ratio_T=ratio_T, clipped_T=bounded_T != ratio_T)


@policy_loss("sapo", reduction="seq-mean-token-mean")
def sapo(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """−A·σ(τ(ρ − 1))·4/τ, τ by the sign of A: a soft gate instead of a clip (arXiv:2511.20347)."""
    ratio_T = _log_ratio(inputs).exp()
    positive = inputs.advantages_T > 0
    tau_T = torch.full_like(ratio_T, settings.tau_negative).masked_fill(positive, settings.tau_positive)
    loss_T = -inputs.advantages_T * torch.sigmoid(tau_T * (ratio_T - 1.0)) * (4.0 / tau_T)
    return TokenLosses(loss_T=_weighted(loss_T, inputs), ratio_T=ratio_T, clipped_T=torch.zeros_like(positive))


@policy_loss("gpg")
def gpg(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """−A·log π: the plain policy gradient (arXiv:2504.02546)."""
    loss_T = -inputs.advantages_T * inputs.logprob_T
    never = torch.zeros_like(inputs.mask_T)
    return TokenLosses(loss_T=_weighted(loss_T, inputs), ratio_T=_log_ratio(inputs).exp(), clipped_T=never)


@policy_loss("gmpo", reduction="seq-mean-token-mean")
def gmpo(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """−A·(geometric mean of the sample's clipped ratios), A the mean over its tokens (arXiv:2507.20673).

    log ρ is clipped to [−ε_lo, ε_hi] on the side that A pulls to. The sample's loss L stands on each of its tokens as
    sg(L)·(1 + x − sg(x)), x the clipped log ρ: the mean over tokens then has L's value and gradient. Correction weights enter
    as their geometric mean over the sample.
    """
    log_ratio_T = _log_ratio(inputs)
    sign_T = inputs.advantages_T.sign()
    bounded_T = log_ratio_T.clamp(-settings.clip_low, settings.clip_high)
    kept_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * bounded_T)
    advantages_T = _mean_of_sample(inputs.advantages_T, inputs, COUNT_EPSILON)
    sample_T = -advantages_T * _mean_of_sample(kept_T, inputs, COUNT_EPSILON).exp()
    if inputs.correction_weights_T is not None:
        log_weights_T = torch.where(inputs.mask_T, (inputs.correction_weights_T + 1e-10).log(), 0.0)
        sample_T = sample_T * _mean_of_sample(log_weights_T, inputs, COUNT_EPSILON).exp()
    loss_T = sample_T * (1.0 + kept_T - kept_T.detach())
    clipped_T = sign_T * bounded_T < sign_T * log_ratio_T
    return TokenLosses(loss_T=loss_T, ratio_T=log_ratio_T.exp(), clipped_T=clipped_T)


@policy_loss("dppo_tv")
def dppo_tv(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """−sg(min(ρ, c))·A·log π where the probability has not yet moved too far the way A pulls: π − π_old ≤ ε_hi, or ≥ −ε_lo.

    Source: arXiv:2602.04879 (total variation).
    """
    moved_T = inputs.logprob_T.detach().exp() - inputs.old_logprob_T.exp()
    kept_T = torch.where(inputs.advantages_T > 0, moved_T <= settings.clip_high, moved_T >= -settings.clip_low)
    return _truncated_loss(inputs, settings, kept_T)


@policy_loss("dppo_kl")
def dppo_kl(inputs: PolicyInputs, settings: PolicySettings) -> TokenLosses:
    """As ``dppo_tv``, with the divergence KL(π_old‖π) of "this token or another" as the measure of how far.

    Source: arXiv:2602.04879 (binary KL).
    """
    new_T, old_T = inputs.logprob_T.detach().exp(), inputs.old_logprob_T.exp()
    divergence_T = _binary_kl(old_T, new_T)
    positive = inputs.advantages_T > 0
    pulled_T = torch.where(positive, new_T > old_T, new_T < old_T)
    near_T = divergence_T <= torch.where(positive, settings.clip_high, settings.clip_low)
    return _truncated_loss(inputs, settings, near_T | ~pulled_T)


def _binary_kl(old_T: Tensor, new_T: Tensor) -> Tensor:
    """KL(old‖new) of a coin. A probability that rounds to 1 leaves the other side the rounding error, not nothing."""
    old_rest_T, new_rest_T = ((1.0 - p_T).masked_fill(p_T == 1.0, torch.finfo(p_T.dtype).eps) for p_T in (old_T, new_T))
    return old_T * (old_T / new_T).log() + old_rest_T * (old_rest_T / new_rest_T).log()


def _truncated_loss(inputs: PolicyInputs, settings: PolicySettings, kept_T: Tensor) -> TokenLosses:
    """−sg(min(ρ, c))·A·log π on the tokens that are kept, 0 on the others."""
    ratio_T = _log_ratio(inputs).exp().detach()
    largest = float("inf") if settings.dual_clip is None else settings.dual_clip
    loss_T = -ratio_T.clamp(max=largest) * inputs.advantages_T * inputs.logprob_T
    return TokenLosses(loss_T=_weighted(torch.where(kept_T, loss_T, 0.0), inputs), ratio_T=ratio_T, clipped_T=~kept_T)
