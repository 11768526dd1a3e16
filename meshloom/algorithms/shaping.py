"""Rewards between the verifier and the estimator: where they stand, and what is added to them.

Owns: placing a sample's reward on a token, the divergence in the reward, DAPO's penalty for overlong responses and its choice
of groups. Always holds: a sample's reward is the sum of its token rewards.

Legend: T tokens of all samples end to end, S samples.
"""

import torch
from torch import Tensor

from meshloom.algorithms.groups import Groups
from meshloom.algorithms.segments import sample_counts, sample_sums


def place_rewards(reward_S: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Token rewards: each sample's reward on its last token that is the model's own, or on its last token if none is.

    Args:
        reward_S: rewards, [S]; those of invalid samples may be NaN.
        mask_T: the model's own tokens, bool [T].
        lengths_S: tokens of each sample, at least one, int64 [S].

    Returns:
        Token rewards, [T], in the rewards' dtype, on the mask's device.
    """
    device = mask_T.device
    end_S = lengths_S.cumsum(0).to(device)
    place_S = end_S - 1
    owned_S = sample_counts(mask_T, lengths_S)
    last_S = mask_T.nonzero().squeeze(1)[(owned_S.cumsum(0) - 1).clamp(min=0)] if mask_T.any() else place_S
    rewards_T = torch.zeros(len(mask_T), dtype=reward_S.dtype, device=device)
    rewards_T[torch.where(owned_S > 0, last_S, place_S)] = reward_S.to(device)
    return rewards_T


def place_turn_rewards(reward_S: Tensor, turn_reward_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Token rewards of samples that were also rewarded on their way: those stay where they stand, and what is left of a
    sample's reward goes to its last token that is the model's own.

    Args:
        reward_S: rewards, those of the way included, [S].
        turn_reward_T: rewards that were given for a turn, each on the turn's last token, [T].
        mask_T, lengths_S: as ``place_rewards``.

    Returns:
        Token rewards, [T]; they add up to ``reward_S``.
    """
    given_T = turn_reward_T.to(mask_T.device, reward_S.dtype)
    rest_S = reward_S.to(mask_T.device) - sample_sums(given_T, lengths_S)
    return given_T + place_rewards(rest_S, mask_T, lengths_S)


def subtract_kl(token_rewards_T: Tensor, kl_T: Tensor, mask_T: Tensor, coefficient: float) -> Tensor:
    """Token rewards minus coefficient · divergence, at the model's own tokens, [T]."""
    return token_rewards_T - coefficient * torch.where(mask_T, kl_T.detach(), 0.0).to(token_rewards_T.dtype)


def overlong_penalty(num_tokens_S: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float) -> Tensor:
    """DAPO's soft penalty, to be added to rewards: min(−(len − (max − buffer)) / buffer · factor, 0) (arXiv:2503.14476).

    Args:
        num_tokens_S: length of each response, [S].
        max_tokens: longest response.
        buffer_tokens: how long before that the penalty begins.
        factor: the penalty at the longest response.

    Returns:
        Penalties, float64 [S], none above 0.
    """
    excess_S = num_tokens_S.double() - (max_tokens - buffer_tokens)
    return (-excess_S / buffer_tokens * factor).clamp(max=0.0)


def has_spread(reward_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """Samples whose group's valid rewards are not all equal, bool [S]; the others teach a group-relative estimator nothing."""
    groups = Groups(group_S, valid_S)
    first_S = groups.extreme(reward_S, largest=True)
    return (groups.size_S > 1) & (first_S != groups.extreme(reward_S, largest=False))
