"""What an environment is asked, and what it answers.

Owns: the protocol, its records, and the reasons for which an episode has no reward. Refuses to know: processes, engines,
templates. Always holds: an environment never sees or makes token ids of the conversation other than those the model sampled in
its turn; a failure is never an observation.

An episode: ``reset`` once; the model's turn; ``step``; and so on until an observation says ``done``; ``close`` at the end,
whatever happened. All calls for one episode come one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

Message = dict[str, Any]
"""``role`` and ``content``, and what else a chat template knows (``name`` of a tool)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an episode is about: a row of the data.

    Args:
        seed: the same for all samples of a group, so that they can be compared; another one each time the row comes up.
        prompt: of the row: a string, or a chat; empty where the rows are only numbered.
        answer: ground truth of the row.
        data_source: the row's source name.
        extra: the row's further columns.
    """

    seed: int
    prompt: str | list[Message]
    answer: Any
    data_source: str
    extra: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model said.

    Args:
        text: decoded, special tokens removed.
        ids: exactly as sampled, the token that ended the turn included.
        finish: how it ended: ``stop``, or ``length`` if it was cut; then it is the last one.
    """

    text: str
    ids: tuple[int, ...]
    finish: str


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an environment answers to ``reset`` and ``step``.

    Args:
        messages: what the model is shown next; a string stands for one message of the user.
        reward: for the turn that was answered; none: nothing is said about it. A sample's reward is the sum of what its turns
            got, and of the reward function's number where there is one; an episode that has none of these is invalid.
        done: the episode is over; ``messages`` are then not shown.
        numbers: logged as ``environment/<name>``, the last value of each episode; what is not finite is left out.
    """

    messages: tuple[Message, ...] | str = ()
    reward: float | None = None
    done: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time; an object is made for each. Methods may be ``async`` or not."""

    async def reset(self, task: Task) -> Observation | str:
        """Begin. The observation is the prompt: a text, or a chat."""
        ...

    async def step(self, turn: Turn) -> Observation:
        """Answer the model's turn."""
        ...

    async def close(self) -> None:
        """The episode is over, or was given up."""
        ...


class FaultReason(StrEnum):
    """Why an episode has no reward."""

    RAISED = "environment_raised"
    """The environment raised an exception, or answered something that is no observation."""
    DEADLINE = "environment_deadline"
    """It did not answer in time; its process was killed."""
    DIED = "environment_died"
    """Its process ended."""
    NOT_REPEATABLE = "environment_not_repeatable"
    """Another episode's failure ended the process they shared, and when this one was repeated in a fresh process, the
    environment answered differently."""
    LATE = "episode_deadline"
    """The episode as a whole took too long."""
    NO_REWARD = "environment_no_reward"
    """It said nothing about any turn, and nothing else judges: that is not a reward of 0."""
    REWRITTEN = "history_rewritten"
    """The chat template changes earlier turns, so what was sampled is not what would be trained on."""


@dataclass(frozen=True)
class Fault:
    """A call that gave no observation.

    Args:
        reason: of it.
        detail: the exception, exit signal, or difference.
    """

    reason: FaultReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


@dataclass(frozen=True, kw_only=True)
class ToolCount:
    """Calls of tools in a turn.

    Args:
        calls: that the model made, malformed ones among them.
        errors: of those: malformed, unknown, wrong arguments, raised, late, or beyond the bound.
    """

    calls: int = 0
    errors: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An observation as it comes from a worker.

    Args:
        messages: as chat messages.
        reward, done, numbers: as ``Observation``.
        tools: calls that the turn made.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    tools: ToolCount = ToolCount()
