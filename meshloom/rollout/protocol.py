"""What every rollout engine offers: token ids in, token ids and log-probabilities out.

Owns: the records that travel to and from an engine, and the protocol. Refuses to know: text (but for stop strings, which
an engine matches through a ``decode`` function it is given), rewards, losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from meshloom.rollout.feed import RequestFeed


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The distribution tokens are drawn from, and when to stop.

    Filters apply in this order, on the logits divided by the temperature: top-k, top-p, min-p. Temperature 0 is greedy.
    Top-p is a share of what top-k left; min-p a share of the most likely token. Tokens as likely as the last one that a
    filter keeps are kept too.

    Raises:
        ValueError: if a value is out of its range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Go on after the model's own end tokens; stop ids and stop strings still end a sample."""

    def __post_init__(self) -> None:
        checks = {
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "temperature must be 0 or more": self.temperature >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k must be 0 or more": self.top_k >= 0,
            "min_p must be from 0 to 1": 0 <= self.min_p <= 1,
            "a stop string must not be empty": all(self.stop_strings),
        }
        for rule, holds in checks.items():
            if not holds:
                raise ValueError(f"{rule}: {self}")

    def greedy(self) -> "SamplingParams":
        """The same, for the most probable token each time."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how many samples of it are wanted; the prompt is computed once for all of them.

    Args:
        id: the caller's own number of the request, unique among those in flight.
        prompt_ids: tokens of the prompt, at least one.
        params: the sampling distribution.
        seeds: one seed a sample; a sample's tokens depend on its seed and prompt, not on what else is in the batch.
        num_greedy: so many of the last samples have the most probable token each time, whatever ``params`` say of the others.
        keep: whether requests will follow that begin with this prompt and a sample of it that ended by itself: keys and values
            stay, where there is room, until the weights change. What is drawn is the same, up to the order of sums.
        after: the request whose sample this one begins with; who has several engines prefers the one that made it.
    """

    id: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    seeds: Sequence[int]
    num_greedy: int = 0
    keep: bool = False
    after: int | None = None

    def params_of(self, index: int) -> SamplingParams:
        """The distribution that one of the samples is drawn from."""
        return self.params if index < len(self.seeds) - self.num_greedy else self.params.greedy()


@dataclass
class PromptCount:
    """Tokens of prompts: those that were computed, and those whose keys and values were still there."""

    computed: int = 0
    reused: int = 0

    def add(self, computed: int, reused: int) -> None:
        """Count a prompt."""
        self.computed += computed
        self.reused += reused

    def metrics(self) -> dict[str, float]:
        """As a step's numbers; none of nothing."""
        if not (self.computed or self.reused):
            return {}
        return {"prompt_tokens_computed": self.computed, "prompt_tokens_reused": self.reused}


class FinishReason(StrEnum):
    STOP = "stop"
    """The model's end token, a stop id or a stop string; it is the last of ``ids``."""
    LENGTH = "length"
    """``max_tokens`` were generated."""
    ABORTED = "aborted"
    DEADLINE = "deadline"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample.

    Args:
        request_id: the request's id.
        index: which of the request's samples this is.
        ids: generated tokens, the one that ended the sample included.
        logprobs: log-probability of each under the sampling distribution (after temperature and filters; 0 if greedy).
        versions: version of the weights that sampled each token.
        finish: why it ended.
    """

    request_id: int
    index: int
    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: FinishReason


class Engine(Protocol):
    """A rollout engine. Every wait has a deadline."""

    version: int

    def generate(
        self, requests: Sequence[Request], *, deadline_s: float, feed: "RequestFeed | None" = None
    ) -> Iterator[Completion]:
        """Yield each sample as it finishes. After ``deadline_s`` seconds the rest come with ``FinishReason.DEADLINE``.

        With a feed, requests that come later join those that run, and the end is when all are finished and the feed is closed,
        or the deadline has passed.
        """
        ...

    def abort(self, request_id: int) -> None:
        """End a request's unfinished samples; they come with ``FinishReason.ABORTED``."""
        ...

    def load_weights(self, version: int) -> None:
        """The weights changed: what was computed with older ones (cached prefixes) is forgotten."""
        ...

    def take_prompts(self) -> PromptCount:
        """Tokens of the prompts that were begun since the last call."""
        ...

    def sleep(self) -> None:
        """Give up the memory of the cache."""
        ...

    def wake(self) -> None:
        """Take it back."""
        ...


class ReplicaEngine(Engine, Protocol):
    """An engine that can be one replica of several, which even out what they have to do."""

    def withdraw(self, request_id: int) -> None:
        """End a request, if none of its samples has begun: they come with ``FinishReason.ABORTED``, without tokens."""
        ...

    def first_says(self, number: int) -> int:
        """The number that the first of the replica's devices has; due on all of them."""
        ...
