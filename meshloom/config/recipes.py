"""Recipes: what a named algorithm chooses.

Owns: the table. Refuses to know: what the choices do (``algorithms``), how settings are read (``config.given``). Always holds:
a recipe is nothing but choices that could be written one by one.

The numbers are those of the papers where these say them. With one update a step the ratio is 1, so ``ppo``'s loss has the
gradient of the plain policy gradient: recipes whose paper has no ratio take it too, and stay sound with more updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.config.names import Recipe


@dataclass(frozen=True)
class Same:
    """The value of another setting, or a share of it, rounded down to a whole number of at least 1."""

    path: str
    share: float | None = None

    def of(self, value: float) -> float:
        """What a value of the setting comes to."""
        return value if self.share is None else max(1, int(value * self.share))


_TOKENS = {"algorithm.reduction": "token-mean"}
_SAMPLES = {"algorithm.reduction": "seq-mean-token-mean"}
_CONSTANT = {
    "algorithm.reduction": "seq-mean-token-sum-norm",
    "algorithm.reduction_constant": Same("rollout.max_response_tokens"),
}
"""Sums over a sample's tokens ÷ a constant: no bias by length."""


def _kl(place: str, estimator: str, coefficient: float) -> dict[str, Any]:
    return {"algorithm.kl": place, "algorithm.kl_estimator": estimator, "algorithm.kl_coefficient": coefficient}


def _choices(advantage: str, loss: str = "ppo", low: float = 0.2, high: float = 0.2) -> dict[str, Any]:
    return {
        "algorithm.advantage": advantage,
        "algorithm.policy_loss": loss,
        "algorithm.clip_low": low,
        "algorithm.clip_high": high,
    }


RECIPES: Mapping[Recipe, Mapping[str, Any]] = {
    # Schulman et al. 2017, arXiv:1707.06347; divergence in the reward: Ziegler et al. 2019, arXiv:1909.08593.
    Recipe.PPO: {**_choices("gae"), "algorithm.lam": 0.95, **_TOKENS, **_kl("reward", "k1", 0.001)},
    # Shao et al. 2024, arXiv:2402.03300.
    Recipe.GRPO: {**_choices("grpo"), **_SAMPLES, **_kl("loss", "k3", 0.04)},
    # Liu et al. 2025, arXiv:2503.20783: neither the deviation nor the length divides.
    Recipe.DR_GRPO: {**_choices("grpo"), "algorithm.normalize_by_std": False, **_CONSTANT},
    # Yu et al. 2025, arXiv:2503.14476: the penalty begins at four fifths of the longest response.
    Recipe.DAPO: {
        **_choices("grpo", high=0.28),
        **_TOKENS,
        "algorithm.kl": "none",
        "algorithm.filter_groups.enabled": True,
        "reward.overlong.buffer_tokens": Same("rollout.max_response_tokens", 0.2),
    },
    # Ahmadian et al. 2024, arXiv:2402.14740.
    Recipe.RLOO: {**_choices("rloo"), **_TOKENS, **_kl("reward", "k1", 0.03)},
    # Hu 2025, arXiv:2501.03262; with the group's mean as baseline the divergence is in the loss.
    Recipe.REINFORCE_PP: {**_choices("reinforce_plus_plus"), **_TOKENS, **_kl("reward", "k1", 0.01)},
    Recipe.REINFORCE_PP_BASELINE: {**_choices("reinforce_plus_plus_baseline"), **_TOKENS, **_kl("loss", "k2", 0.01)},
    # Li et al. 2023, arXiv:2310.10505.
    Recipe.REMAX: {**_choices("remax"), **_TOKENS, **_kl("reward", "k1", 0.01)},
    # Hao et al. 2025, arXiv:2505.23585: no divergence; meant for one update a step.
    Recipe.OPO: {**_choices("opo"), **_TOKENS, "algorithm.kl": "none"},
    # Chu et al. 2025, arXiv:2504.02546: the plain policy gradient.
    Recipe.GPG: {**_choices("gpg", "gpg"), **_TOKENS, "algorithm.kl": "none"},
    # Zheng et al. 2025, arXiv:2507.18071: a sample's ratio is a mean, so its bounds are close.
    Recipe.GSPO: {**_choices("grpo", "gspo", 3e-4, 4e-4), **_SAMPLES, "algorithm.kl": "none"},
    # MiniMax 2025, arXiv:2506.13585: no lower bound.
    Recipe.CISPO: {**_choices("grpo", "cispo", 1.0, 0.28), **_TOKENS, "algorithm.kl": "none"},
    # Gao et al. 2025, arXiv:2511.20347.
    Recipe.SAPO: {
        **_choices("grpo", "sapo"),
        "algorithm.tau_positive": 1.0,
        "algorithm.tau_negative": 1.05,
        **_SAMPLES,
        "algorithm.kl": "none",
    },
    # Zhao et al. 2025, arXiv:2507.20673: the bounds are of the logarithm.
    Recipe.GMPO: {**_choices("grpo", "gmpo", 0.4, 0.4), **_SAMPLES, "algorithm.kl": "none"},
    # arXiv:2602.04879: total variation; advantages and reduction as Dr. GRPO.
    Recipe.DPPO: {
        **_choices("grpo", "dppo_tv", 0.15, 0.15),
        "algorithm.dual_clip": None,
        "algorithm.normalize_by_std": False,
        **_CONSTANT,
        "algorithm.kl": "none",
    },
}
"""What each recipe chooses; all else is at its default."""

_OF_ALGORITHM = "algorithm."
DECIDED = frozenset(path for choices in RECIPES.values() for path in choices if path.startswith(_OF_ALGORITHM)) | {
    "algorithm.gamma"
}
"""Keys of the algorithm that recipes decide."""
