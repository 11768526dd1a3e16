"""Algorithms as pure functions on ragged tensors.

Owns: advantages, policy and value losses, divergences, the correction of the sampler's gap, and the loss reducer. Refuses to
know: processes, devices, models.
"""

from meshloom.algorithms.advantages import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOutputs,
    advantage,
)
from meshloom.algorithms.correction import (
    Level,
    SamplerGap,
    banded_weights,
    kept_tokens,
    sampler_gap,
    truncated_weights,
)
from meshloom.algorithms.kl import KL_ESTIMATORS, AdaptiveKl, KlEstimator
from meshloom.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyInputs,
    PolicyLoss,
    PolicyOutputs,
    PolicySettings,
    PolicyStats,
    policy_loss,
)
from meshloom.algorithms.reduce import (
    REDUCTIONS,
    Denominators,
    check_reduction,
    denominators,
    entropy_term,
    kl_term,
    reduce,
)
from meshloom.algorithms.shaping import has_spread, overlong_penalty, place_rewards, subtract_kl
from meshloom.algorithms.value import value_loss

__all__ = [
    "ADVANTAGES",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "REDUCTIONS",
    "AdaptiveKl",
    "AdvantageEstimator",
    "AdvantageInputs",
    "AdvantageOutputs",
    "Denominators",
    "KlEstimator",
    "Level",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyOutputs",
    "PolicySettings",
    "PolicyStats",
    "SamplerGap",
    "advantage",
    "banded_weights",
    "check_reduction",
    "denominators",
    "entropy_term",
    "has_spread",
    "kept_tokens",
    "kl_term",
    "overlong_penalty",
    "place_rewards",
    "policy_loss",
    "reduce",
    "sampler_gap",
    "subtract_kl",
    "truncated_weights",
    "value_loss",
]
