"""Functions of the user's own, tried before a run.

Owns: what is asked of them, on a small batch that is made up. Refuses to know: real samples, models. Always holds: one that
passes can be called in a run: it takes what it is given, gives numbers of the right shape, has a gradient where it needs one,
and a loss treats a sample alike whatever else is in its microbatch.

The batch has a group of three, a group whose rewards are equal, a group of one, a sample without a valid reward, a span that is
not the model's own inside a sample, and a sample without any token of its own.

Legend: T tokens of all samples end to end, S samples, M the model's own tokens of valid samples end to end.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshloom.algorithms.advantages import AdvantageInputs, Batch
from meshloom.algorithms.own import OwnFunction
from meshloom.algorithms.policy_losses import PolicyInputs, PolicySettings, TokenLosses
from meshloom.algorithms.segments import on_tokens
from meshloom.algorithms.shaping import place_rewards
from meshloom.config.errors import UserError
from meshloom.config.own import OwnName
from meshloom.config.settings import AlgorithmSettings, KlPlace

_LENGTHS_S = torch.tensor([4, 6, 3, 5, 4, 3, 2])
_GROUP_S = torch.tensor([0, 0, 0, 1, 1, 2, 0])
_REWARD_S = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.3, float("nan")], dtype=torch.float64)
_SETTINGS = PolicySettings(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
_TOLERANCE = 1e-5


def check_own(settings: AlgorithmSettings) -> None:
    """Load and try every function of the user's own that the settings name.

    Raises:
        UserError: that says which function, and what is wrong with it.
    """
    for key, check in (("advantage", _check_advantage), ("policy_loss", _check_loss), ("kl_estimator", _check_kl)):
        name = getattr(settings, key)
        if OwnName.of(name) is not None:
            check(_Tried(key, name), settings)


class _Tried(OwnFunction):
    """A function under trial: also its arguments are looked at, and all that it gives."""

    def __init__(self, key: str, name: str) -> None:
        super().__init__(name, f"algorithm.{key}", UserError, "on a small batch")

    def __call__(self, *arguments: Any) -> Any:
        try:
            inspect.signature(self.function).bind(*arguments)
        except TypeError as error:
            raise self.fault(f"it takes other arguments: {error}") from error
        return super().__call__(*arguments)


def _mask() -> Tensor:
    mask_T = torch.ones(int(_LENGTHS_S.sum()), dtype=torch.bool)
    mask_T[6:8] = False
    mask_T[-2:] = False
    return mask_T


def _tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -torch.rand(int(_LENGTHS_S.sum()), generator=generator) - 0.1


def _check_advantage(tried: _Tried, settings: AlgorithmSettings) -> None:
    mask_T = _mask()
    inputs = AdvantageInputs(
        token_rewards_T=place_rewards(_REWARD_S, mask_T, _LENGTHS_S),
        mask_T=mask_T,
        lengths_S=_LENGTHS_S,
        group_S=_GROUP_S,
        valid_S=~torch.isnan(_REWARD_S),
        gamma=settings.gamma,
        lam=settings.lam,
        normalize_by_std=settings.normalize_by_std,
    )
    batch = Batch(inputs)
    found = tried(batch)
    if isinstance(found, tuple) and len(found) == 2:
        found, returns = found
        if returns is not None:
            tried.require_finite(returns, len(batch.place_M), "returns")
    tried.require_finite(found, len(batch.place_M), "advantages")


def _check_loss(tried: _Tried, settings: AlgorithmSettings) -> None:
    mask_T = _mask()

    def inputs(logprob_T: Tensor, among_T: Tensor, lengths_S: Tensor) -> PolicyInputs:
        return PolicyInputs(
            logprob_T=logprob_T,
            old_logprob_T=torch.where(mask_T, _tokens(1), 0.0)[among_T],
            advantages_T=torch.where(mask_T, torch.linspace(-1.0, 1.0, len(mask_T)), 0.0)[among_T],
            mask_T=mask_T[among_T],
            lengths_S=lengths_S,
        )

    def loss(logprob_T: Tensor, among_T: Tensor, lengths_S: Tensor) -> Tensor:
        found = tried(inputs(torch.where(mask_T, logprob_T, 0.0)[among_T], among_T, lengths_S), _SETTINGS)
        found = found.loss_T if isinstance(found, TokenLosses) else found
        return tried.require_finite(found, int(among_T.sum()), "losses")

    everything_T = torch.ones_like(mask_T)
    losses_T = _with_gradient(tried, lambda logprob_T: loss(logprob_T, everything_T, _LENGTHS_S))
    for index in range(len(_LENGTHS_S)):
        among_T = on_tokens(torch.arange(len(_LENGTHS_S)) == index, _LENGTHS_S)
        alone_T = loss(_tokens(0), among_T, _LENGTHS_S[index : index + 1]).detach()
        own_T = mask_T[among_T]
        if not torch.allclose(alone_T[own_T], losses_T[among_T][own_T], rtol=_TOLERANCE, atol=_TOLERANCE):
            why = "results would depend on how samples are packed into microbatches and over devices"
            raise tried.fault("the loss of a sample depends on the samples beside it", why)


def _check_kl(tried: _Tried, settings: AlgorithmSettings) -> None:
    mask_T, reference_T = _mask(), _tokens(1)

    def divergence(logprob_T: Tensor) -> Tensor:
        return tried.require_finite(tried(logprob_T, reference_T, mask_T), len(mask_T), "divergences")

    if settings.kl is KlPlace.LOSS:
        _with_gradient(tried, divergence)
    else:
        divergence(_tokens(0))


def _with_gradient(tried: _Tried, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function gives, detached, if it has a gradient that is finite and not all 0."""
    logprob_T = _tokens(0).requires_grad_()
    found_T = function(logprob_T)
    if not found_T.requires_grad:
        raise tried.fault("it has no gradient in logprob_T")
    found_T[_mask()].sum().backward()
    gradient_T = logprob_T.grad
    if gradient_T is None or not bool(torch.isfinite(gradient_T).all()) or not bool((gradient_T != 0).any()):
        raise tried.fault("its gradient in logprob_T is NaN, infinite, or 0 everywhere")
    return found_T.detach()
