"""Settings of the algorithm: each choice by its own name, and the recipe that chooses what is not given.

Owns: their defaults, ranges and meaning. Refuses to know: what stands behind a name, which recipe chooses what
(``config.recipes``).
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshloom.config.base import CountOrZero, NotNegative, Positive, Settings, Share
from meshloom.config.correction_settings import CorrectionSettings
from meshloom.config.group_settings import FilterGroupsSettings
from meshloom.config.names import Recipe


class KlPlace(StrEnum):
    """Where the divergence from the reference enters."""

    NONE = "none"
    LOSS = "loss"
    REWARD = "reward"


class AlgorithmSettings(Settings):
    """The choices that make an algorithm, each by its own name."""

    recipe: Recipe | None = None
    """A named algorithm: it chooses what is not given here. ``algorithm: dapo`` is short for this."""
    advantage: str = "grpo"
    """Advantage estimator, by name (``meshloom.algorithms.ADVANTAGES``), or ``file.py:function``."""
    normalize_by_std: bool = True
    """Divide by the group's standard deviation where the estimator knows it; false is Dr. GRPO."""
    gamma: Share = 1.0
    """Discount per token of the model, of ``gae`` and ``reinforce_plus_plus``."""
    lam: Share = 1.0
    """Decay λ of ``gae`` per token of the model: 1 trusts the rewards, 0 the critic."""
    policy_loss: str = "ppo"
    """Policy loss, by name (``meshloom.algorithms.POLICY_LOSSES``), or ``file.py:function``."""
    reduction: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How token losses become one number; denominators are those of the whole update."""
    reduction_constant: Positive | None = None
    """Divisor of ``seq-mean-token-sum-norm``."""
    clip_low: NotNegative = 0.2
    """The probability ratio is clipped below at 1 − clip_low; ``gmpo`` clips its logarithm at −clip_low. ``dppo_tv`` and
    ``dppo_kl``: how far a token's distribution may move down, as total variation or divergence."""
    clip_high: NotNegative = 0.2
    """The probability ratio is clipped above at 1 + clip_high; ``gmpo`` clips its logarithm at clip_high. ``dppo_tv`` and
    ``dppo_kl``: how far a token's distribution may move up."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the loss of a negative advantage, as a multiple of it (Ye et al. 2020, arXiv:1912.09729), of ``ppo``; the
    largest ratio of ``dppo_tv`` and ``dppo_kl``; none: no bound."""
    tau_positive: Positive = 1.0
    """Temperature of ``sapo``'s gate where the advantage is positive."""
    tau_negative: Positive = 1.05
    """The same where it is not."""
    kl: KlPlace = KlPlace.NONE
    """``loss``: a term of the loss; ``reward``: subtracted from token rewards; ``none``: the reference is not used."""
    kl_estimator: str = "k3"
    """Estimator of the divergence: k1, abs, k2, k3, or one with ``+`` for k2's gradient, or ``file.py:function``."""
    kl_coefficient: NotNegative = 0.001
    """Weight of the divergence; where it adapts, the first."""
    kl_control: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive``: with ``kl: reward`` the weight is multiplied after each step by
    1 + clip(kl / kl_target − 1, ±0.2) · samples / kl_horizon (Ziegler et al. 2019, arXiv:1909.08593)."""
    kl_target: Positive = 0.1
    """Divergence a token that an adaptive weight aims at."""
    kl_horizon: Positive = 10000.0
    """Samples over which an adaptive weight adapts."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    max_lag_versions: CountOrZero = 0
    """How many weight versions a sample may be older than the weights it trains; 0 is on-policy."""
    proximal: Literal["trainer", "sampler"] = "trainer"
    """The policy that the ratio is to: the trainer's before the step, or the sampler by its own log-probs, which needs no
    second pass and counts the gap between both in the ratio."""
    correction: CorrectionSettings = CorrectionSettings()
    """Of what sampler and trainer disagree on."""
    max_sampler_gap: Positive | None = 0.5
    """Stop the run when mean |Δ log-prob| between sampler and trainer exceeds this; none: only measure. With
    ``max_lag_versions`` only tokens count that were sampled with the very weights they train: age is no disagreement."""
    filter_groups: FilterGroupsSettings = FilterGroupsSettings()
    """Dynamic sampling."""
