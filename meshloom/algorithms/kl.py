"""Per-token estimators of the divergence from a reference policy.

Owns: the estimators by name, and the controller of their weight. Always holds: an estimator is 0, and has no gradient, at
tokens outside the mask.

With Δ = log π − log π_ref of the sampled token (Schulman, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html):

=========== ============================ =====================================================
``k1``      Δ                            alias ``kl``
``abs``     \\|Δ\\|
``k2``      ½Δ²                          alias ``mse``; its gradient is the divergence's own
``k3``      e^(−Δ) + Δ − 1               alias ``low_var_kl``; Δ clamped to ±20, the result to ±10
``…+``      value of …, gradient of k2
=========== ============================ =====================================================

Legend: T tokens end to end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshloom.algorithms.own import OwnFunction
from meshloom.algorithms.registry import Registry

KlEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprob_T, reference_logprob_T, mask_T bool) -> kl_T, all [T]; differentiable in ``logprob_T``."""


def _own(name: str, function: OwnFunction) -> KlEstimator:
    """An estimator of the user's own: what stands outside the mask does not reach it, nor counts what it gives there."""

    def estimate(logprob_T: Tensor, reference_logprob_T: Tensor, mask_T: Tensor) -> Tensor:
        clean_T, reference_T = (torch.where(mask_T, x, 0.0) for x in (logprob_T, reference_logprob_T.detach()))
        found_T = function.require(function(clean_T, reference_T, mask_T), len(mask_T), "divergences")
        return torch.where(mask_T, found_T, 0.0)

    return estimate


KL_ESTIMATORS: Registry[KlEstimator] = Registry("KL estimator", "algorithm.kl_estimator", _own)


def _k1(delta_T: Tensor) -> Tensor:
    return delta_T


def _abs(delta_T: Tensor) -> Tensor:
    return delta_T.abs()


def _k2(delta_T: Tensor) -> Tensor:
    return 0.5 * delta_T.square()


def _k3(delta_T: Tensor) -> Tensor:
    clamped_T = delta_T.clamp(-20.0, 20.0)
    return (torch.exp(-clamped_T) + clamped_T - 1.0).clamp(-10.0, 10.0)


def _estimator(of_delta: Callable[[Tensor], Tensor], *, k2_gradient: bool) -> KlEstimator:
    """An estimator of two log-probabilities from a function of their difference."""

    def estimate(logprob_T: Tensor, reference_logprob_T: Tensor, mask_T: Tensor) -> Tensor:
        delta_T = torch.where(mask_T, logprob_T - reference_logprob_T.detach(), 0.0)
        if not k2_gradient:
            return of_delta(delta_T)
        gradient_T = _k2(delta_T)
        return gradient_T - gradient_T.detach() + of_delta(delta_T).detach()

    return estimate


for _function, *_names in ((_k1, "k1", "kl"), (_abs, "abs"), (_k2, "k2", "mse"), (_k3, "k3", "low_var_kl")):
    for _name in _names:
        KL_ESTIMATORS.add(_name, _estimator(_function, k2_gradient=False))
        KL_ESTIMATORS.add(f"{_name}+", _estimator(_function, k2_gradient=True))


@dataclass(frozen=True, kw_only=True)
class AdaptiveKl:
    """Weight of the divergence that steers it to a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Args:
        coefficient: the weight, β.
        target: divergence a token that is aimed at.
        horizon: samples over which the weight adapts.
    """

    coefficient: float
    target: float
    horizon: float

    def updated(self, kl: float, num_samples: int) -> "AdaptiveKl":
        """β · (1 + clip(kl / target − 1, ±0.2) · num_samples / horizon).

        Args:
            kl: mean divergence of the step.
            num_samples: samples of the step.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1.0 + error * num_samples / self.horizon))
