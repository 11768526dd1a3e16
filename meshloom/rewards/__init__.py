"""Verifiers and reward functions, scored in processes that can be killed. Imports without torch."""

from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest

__all__ = ["InvalidReason", "Reward", "RewardRequest"]
