"""Advantage estimators: from rewards to how much better than expected each token was.

Owns: the estimators by name. Refuses to know: models, processes, how rewards are made. Always holds: computed once for the
whole batch, in float64; advantages are 0 outside the mask and at samples without a valid reward, which take no part in any
mean; a group of one has nothing to compare with, so its baseline is 0; a reward that stands on a token that is not the
model's belongs to the model's token before it, so a reward at a tool's answer is not lost.

A new estimator is one function of a ``Batch`` under ``@advantage("name")``, or in a file of the user's own.

Legend: T tokens of all samples end to end, S samples, M the model's own tokens of valid samples end to end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.algorithms.groups import Groups
from meshloom.algorithms.own import OwnFunction
from meshloom.algorithms.reduce import COUNT_EPSILON
from meshloom.algorithms.registry import Registry
from meshloom.algorithms.segments import (
    discounted_suffix_sums,
    on_tokens,
    sample_counts,
    sample_of_token,
    sample_sums,
)

_STD_EPSILON = 1e-6
_VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """A whole batch and how to judge it.

    Args:
        token_rewards_T: reward of each token, [T]; a sample's reward is their sum. See ``shaping.place_rewards``.
        mask_T: the model's own tokens, bool [T].
        lengths_S: tokens of each sample, int64 [S].
        group_S: prompt of each sample, int64 [S], any values in any order.
        valid_S: samples whose reward is valid, bool [S]; none: all.
        values_T: the critic's value before each token, [T], where the estimator needs it.
        greedy_reward_S: reward of the greedy sample of the same prompt, [S], where the estimator needs it.
        gamma: discount per token of the model, for ``gae`` and ``reinforce_plus_plus``.
        lam: decay of ``gae``.
        normalize_by_std: divide by the group's standard deviation, for ``grpo`` and ``grpo_passk``.
    """

    token_rewards_T: Tensor
    mask_T: Tensor
    lengths_S: Tensor
    group_S: Tensor
    valid_S: Tensor | None = None
    values_T: Tensor | None = None
    greedy_reward_S: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    normalize_by_std: bool = True


@dataclass(frozen=True, kw_only=True)
class AdvantageOutputs:
    """What an estimator says.

    Args:
        advantages_T: [T], in the dtype and on the device of the rewards.
        returns_T: what a critic should learn, [T]; none where the estimator knows no returns. At samples without a valid
            reward they are the values themselves (there is nothing to learn), or 0 without values.
        num_invalid: samples left out because their reward is invalid.
        num_single: samples that are the only valid one of their group.
    """

    advantages_T: Tensor
    returns_T: Tensor | None
    num_invalid: int
    num_single: int


class Batch:
    """A batch as estimators see it: float64, invalid samples zeroed, the model's tokens of valid samples compressed."""

    def __init__(self, inputs: AdvantageInputs) -> None:
        device, lengths_S = inputs.token_rewards_T.device, inputs.lengths_S
        valid_S = inputs.valid_S
        self.valid_S = (
            torch.ones(len(lengths_S), dtype=torch.bool, device=device) if valid_S is None else valid_S.to(device)
        )
        self.lengths_S = lengths_S
        valid_T = on_tokens(self.valid_S, lengths_S)
        self.mask_T = inputs.mask_T.to(device) & valid_T
        self.rewards_T = torch.where(valid_T, inputs.token_rewards_T.double(), 0.0)
        self.reward_S = sample_sums(self.rewards_T, lengths_S)
        self.num_tokens_S = sample_counts(self.mask_T, lengths_S).double()
        self.groups = Groups(inputs.group_S.to(device), self.valid_S)
        self.place_M = self.mask_T.nonzero().squeeze(1)
        self.sample_T = sample_of_token(lengths_S, device)
        self.sample_M = self.sample_T[self.place_M]
        self._values_T, self._greedy_S = inputs.values_T, inputs.greedy_reward_S
        self.gamma, self.lam, self.normalize_by_std = inputs.gamma, inputs.lam, inputs.normalize_by_std

    def values(self) -> Tensor:
        """The critic's value before each of the model's tokens, [M].

        Raises:
            ValueError: if there are none.
        """
        if self._values_T is None:
            raise ValueError("this estimator needs values_T")
        return self._values_T.to(self.place_M.device)[self.place_M].double()

    def greedy_rewards(self) -> Tensor:
        """Reward of the greedy sample of each sample's prompt, [S].

        Raises:
            ValueError: if there are none.
        """
        if self._greedy_S is None:
            raise ValueError("this estimator needs greedy_reward_S")
        return self._greedy_S.to(self.place_M.device).double()

    def token_rewards(self) -> Tensor:
        """Reward of each of the model's tokens, with what follows it up to the model's next token, [M]."""
        owner_T = self.mask_T.long().cumsum(0)
        sample_of_owner = torch.cat([self.sample_M.new_full((1,), -1), self.sample_M])
        owned_T = torch.where(sample_of_owner[owner_T] == self.sample_T, self.rewards_T, 0.0)
        return sample_sums(owned_T, torch.bincount(owner_T, minlength=len(self.place_M) + 1))[1:]

    def whitened(self, values_M: Tensor) -> Tensor:
        """Mean 0 and variance 1 (unbiased) over the batch's tokens, but for ``COUNT_EPSILON``; 0 for a single token."""
        count = len(values_M)
        if count < 2:
            return torch.zeros_like(values_M)
        centred_M = values_M - values_M.sum() / (count + COUNT_EPSILON)
        variance = centred_M.square().sum() / (count + COUNT_EPSILON) * (count / (count - 1))
        return centred_M * torch.rsqrt(variance + _VARIANCE_EPSILON)

    def of_samples(self, values_S: Tensor) -> Tensor:
        """Each sample's value on each of its tokens, [M]."""
        return values_S[self.sample_M]


Function = Callable[[Batch], tuple[Tensor, Tensor | None]]
"""What an estimator computes: advantages_M and returns_M (or none) of a batch."""


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """An estimator and what it needs, so that a run that lacks it is refused before it starts."""

    name: str
    function: Function
    needs_values: bool
    """A critic's values."""
    needs_greedy: bool
    """The reward of a greedy sample of each prompt, which must then be generated."""

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages of a whole batch.

        Raises:
            ValueError: if values or greedy rewards are needed and missing.
        """
        batch = Batch(inputs)
        advantages_M, returns_M = self.function(batch)
        like_T = inputs.token_rewards_T
        advantages_T = torch.zeros_like(like_T)
        advantages_T[batch.place_M] = advantages_M.to(like_T.dtype)
        returns_T = None
        if returns_M is not None:
            returns_T = torch.zeros_like(like_T)
            if inputs.values_T is not None:
                returns_T = torch.where(inputs.mask_T.to(like_T.device), inputs.values_T.to(like_T), 0.0)
            returns_T[batch.place_M] = returns_M.to(like_T.dtype)
        return AdvantageOutputs(
            advantages_T=advantages_T,
            returns_T=returns_T,
            num_invalid=int((~batch.valid_S).sum()),
            num_single=int(batch.groups.single_S.sum()),
        )


def _own(name: str, function: OwnFunction) -> AdvantageEstimator:
    """An estimator of the user's own: it gives advantages_M, or these and returns_M."""

    def estimate(batch: Batch) -> tuple[Tensor, Tensor | None]:
        found, count = function(batch), len(batch.place_M)
        advantages, returns = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if returns is not None:
            returns = function.require_finite(returns, count, "returns")
        return function.require_finite(advantages, count, "advantages"), returns

    return AdvantageEstimator(name=name, function=estimate, needs_values=False, needs_greedy=False)


ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator", "algorithm.advantage", _own)


def advantage(name: str, *, needs_values: bool = False, needs_greedy: bool = False) -> Callable[[Function], Function]:
    """Register an estimator under ``name``."""

    def register(function: Function) -> Function:
        ADVANTAGES.add(
            name,
            AdvantageEstimator(name=name, function=function, needs_values=needs_values, needs_greedy=needs_greedy),
        )
        return function

    return register


@advantage("gae", needs_values=True)
def gae(batch: Batch) -> tuple[Tensor, Tensor]:
    """δ_t = r_t + γV_{t+1} − V_t; A_t = δ_t + γλA_{t+1}; returns A + V; then A is whitened (arXiv:1506.02438)."""
    value_M = batch.values()
    last_M = torch.ones_like(batch.sample_M, dtype=torch.bool)
    last_M[:-1] = batch.sample_M[1:] != batch.sample_M[:-1]
    next_M = torch.where(last_M, 0.0, value_M.roll(-1))
    delta_M = batch.token_rewards() + batch.gamma * next_M - value_M
    advantages_M = discounted_suffix_sums(delta_M, batch.sample_M, batch.gamma * batch.lam)
    return batch.whitened(advantages_M), advantages_M + value_M


@advantage("grpo")
def grpo(batch: Batch) -> tuple[Tensor, None]:
    """(r − mean) ÷ (std + 1e-6) over the group; group of one: r (arXiv:2402.03300).

    Without the division this is Dr. GRPO (arXiv:2503.20783).
    """
    advantage_S = batch.groups.centred(batch.reward_S)
    if batch.normalize_by_std:
        std_S = batch.groups.std(batch.reward_S) + _STD_EPSILON
        advantage_S = advantage_S / torch.where(batch.groups.single_S, 1.0, std_S)
    return batch.of_samples(advantage_S), None


@advantage("rloo")
def rloo(batch: Batch) -> tuple[Tensor, None]:
    """r − mean of the others = (r − mean) · n / (n − 1); group of one: r (arXiv:2402.14740)."""
    size_S = batch.groups.size_S
    scale_S = torch.where(size_S > 1, size_S / (size_S - 1).clamp(min=1), 1.0)
    return batch.of_samples(batch.groups.centred(batch.reward_S) * scale_S), None


@advantage("reinforce_plus_plus")
def reinforce_plus_plus(batch: Batch) -> tuple[Tensor, Tensor]:
    """Discounted return-to-go over the model's tokens, whitened (arXiv:2501.03262)."""
    returns_M = discounted_suffix_sums(batch.token_rewards(), batch.sample_M, batch.gamma)
    return batch.whitened(returns_M), returns_M


@advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: Batch) -> tuple[Tensor, None]:
    """r − mean of the group on each token, whitened over the batch; group of one: r, whitened (arXiv:2501.03262)."""
    return batch.whitened(batch.of_samples(batch.groups.centred(batch.reward_S))), None


@advantage("remax", needs_greedy=True)
def remax(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return-to-go − reward of the greedy sample of the same prompt (arXiv:2310.10505)."""
    returns_M = discounted_suffix_sums(batch.token_rewards(), batch.sample_M, 1.0)
    return returns_M - batch.of_samples(batch.greedy_rewards()), returns_M


@advantage("opo")
def opo(batch: Batch) -> tuple[Tensor, None]:
    """r − Σ len·r / Σ len over the group, len the model's own tokens; group of one: r (arXiv:2505.23585)."""
    weighted_S = batch.groups.sum(batch.num_tokens_S * batch.reward_S)
    baseline_S = weighted_S / batch.groups.sum(batch.num_tokens_S).clamp(min=1)
    return batch.of_samples(batch.reward_S - torch.where(batch.groups.single_S, 0.0, baseline_S)), None


@advantage("gpg")
def gpg(batch: Batch) -> tuple[Tensor, None]:
    """α(r − mean), α = samples ÷ samples with a non-zero reward; group of one: αr (arXiv:2504.02546)."""
    rewarded = (batch.valid_S & (batch.reward_S != 0)).sum().clamp(min=1)
    return batch.of_samples(batch.groups.centred(batch.reward_S) * batch.valid_S.sum() / rewarded), None


@advantage("grpo_passk")
def grpo_passk(batch: Batch) -> tuple[Tensor, None]:
    """The best of a group gets its lead over the second (÷ (std + 1e-6) if asked), all others 0 (arXiv:2503.19595).

    A group of one has no second: 0.
    """
    lead_S = batch.groups.lead(batch.reward_S)
    if batch.normalize_by_std:
        lead_S = lead_S / (batch.groups.std(batch.reward_S) + _STD_EPSILON)
    return batch.of_samples(lead_S), None
