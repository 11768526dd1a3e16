"""What scoring a sample gives: a value, or invalid with a reason.

Always holds: a failure is never a number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class InvalidReason(StrEnum):
    RAISED = "raised"
    """The function raised an exception."""
    DEADLINE = "deadline"
    """It did not return in time; its process was killed."""
    DIED = "died"
    """Its process ended."""
    NOT_A_NUMBER = "not_a_number"
    """It returned NaN, an infinity, or something that is no number."""
    UNFINISHED = "unfinished"
    """The sample was never finished (a deadline of the rollout)."""


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """What a reward function is given: the fields of verl's signature, and ours.

    Args:
        response: decoded text of the response, special tokens removed.
        answer: ground truth of the row, a JSON value.
        data_source: the row's source name.
        extra: the row's further columns (verl's ``extra_info``).
        prompt: text of the prompt as the model saw it.
        finish: how the response ended (``stop``, ``length``).
    """

    response: str
    answer: Any
    data_source: str
    extra: Mapping[str, Any]
    prompt: str
    finish: str


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A valid reward has a value and no reason; an invalid one a reason and no value."""

    value: float | None
    reason: InvalidReason | None = None
    detail: str = ""
    """For invalid rewards: the exception, exit signal or value."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers the function returned in its dict, logged by name."""

    @property
    def valid(self) -> bool:
        return self.reason is None
