"""What scoring a sample gives: a value, or invalid with a reason.

Always holds: a failure is never a number.
"""

from collections.abc import Mapping, Sequence
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
    BAD_LIST = "bad_list"
    """It takes lists, and returned none, or one of another length."""
    NOT_APPLICABLE = "not_applicable"
    """It returned None where that says that the sample is not its to judge, and nothing else judges it."""
    TOO_LONG = "too_long"
    """It is longer than what scores it can read."""
    NO_ANSWER = "no_answer"
    """The judge wrote nothing in which the number could be found."""
    SERVICE = "service"
    """The judge's service refused, failed or did not answer."""
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
        finish: how the response ended (``stop``, ``length``; ``turns`` where an episode has used all its turns).
        prompt_ids: tokens of the prompt.
        response_ids: tokens that were sampled; of an episode all behind the prompt, the environment's among them.
        chat: messages before ``response``, ``{role, content}`` each; a prompt that is plain text is one of the user. In an
            episode ``response`` is the model's last turn.
        prompt_messages: how many of them are the row's prompt, or an episode's first messages; none where the prompt is plain
            text.
        columns: of the row by name: the further ones, the answer under its own name, and ``data_source`` where it has one.
    """

    response: str
    answer: Any
    data_source: str
    extra: Mapping[str, Any]
    prompt: str
    finish: str
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    chat: Sequence[Mapping[str, Any]] = ()
    prompt_messages: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A valid reward has a value and no reason; an invalid one a reason and no value."""

    value: float | None
    reason: InvalidReason | None = None
    detail: str = ""
    """For invalid rewards: the exception, exit signal or value. For others what the function returned as ``remark`` in its
    dict."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers the function returned in its dict, logged by name; of a reward of several components, theirs."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Of a reward of several components: why each invalid one is, by name."""
    printed: str = ""
    """What the function printed meanwhile, within bounds; of a function that takes lists it stands at the first of them."""

    @property
    def valid(self) -> bool:
        return self.reason is None

    @property
    def applies(self) -> bool:
        """Whether this is for the sample: a value, or a failure to find one."""
        return self.reason is not InvalidReason.NOT_APPLICABLE

    @property
    def why(self) -> str:
        """The reason and its detail, in one text; empty for a valid reward."""
        return "" if self.reason is None else f"{self.reason}: {self.detail}" if self.detail else str(self.reason)
