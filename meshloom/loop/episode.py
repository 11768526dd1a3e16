"""One episode while it is on: what the model was shown and said, what it was given for it, and the samples that make.

Owns: the record of an episode and its columns. Refuses to know: engines, processes, who asks. Always holds: the ids of a sample
are what the engine was given and gave, in that order; ``mask`` is 1 on the model's own tokens and on no others; the reward of a
turn stands on the turn's last token; a sample ends with a token of the model.

Legend: T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from meshloom.data.rows import Prompt
from meshloom.environments.chat import Conversation
from meshloom.environments.pool import Episode as PoolEpisode
from meshloom.environments.protocol import Answer, Fault, Message, Task
from meshloom.loop.stage import Draw
from meshloom.rewards.outcome import Reward, RewardRequest
from meshloom.rollout.protocol import Completion
from meshloom.samples import Samples

FAILED = Reward(value=0.0)
"""Of an episode whose environment failed: it is not judged."""
GREEDY = -1
"""Index of a group's greedy episode; it is the last of its group."""


@dataclass
class Piece:
    """A sample of an episode: all of it, unless the template rewrote its history.

    Args:
        text: of the prompt, as the model saw it.
        prompt: ids before the model's first token.
        ids, mask, logprob, version, reward: of each token behind the prompt.
    """

    text: str
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)

    def add_turn(self, completion: Completion) -> None:
        """Behind it come the model's tokens."""
        self.ids += completion.ids
        self.mask += [True] * len(completion.ids)
        self.logprob += completion.logprobs
        self.version += completion.versions
        self.reward += [0.0] * len(completion.ids)

    def add_shown(self, ids: Sequence[int]) -> None:
        """Behind it come tokens of the template and the environment."""
        self.ids += ids
        self.mask += [False] * len(ids)
        for column in (self.logprob, self.version, self.reward):
            column += [0] * len(ids)

    def cut(self) -> None:
        """Drop what the model was shown and did not answer."""
        while self.mask and not self.mask[-1]:
            for column in (self.ids, self.mask, self.logprob, self.version, self.reward):
                column.pop()


@dataclass
class Episode:
    """An episode.

    Args:
        draw: whose group it is in.
        index: place in the group; ``GREEDY`` of the greedy one.
        task: what it is about.
        place: the environment's, in the pool.
        deadline: on the monotonic clock.
        turn_ids: the model's last turn, as sampled.
        asked: number of the request for it.
        num_opening: messages before the model's first turn.
    """

    draw: Draw
    index: int
    task: Task
    place: PoolEpisode
    deadline: float = float("inf")
    conversation: Conversation | None = None
    pieces: list[Piece] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    num_opening: int = 0
    num_turns: int = 0
    num_calls: int = 0
    num_errors: int = 0
    rewards: list[float] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    turn_ids: Sequence[int] = ()
    asked: int | None = None
    response: str = ""
    finish: str = ""
    fault: Fault | None = None
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens behind the prompt of the sample that is on."""
        return len(self.pieces[-1].ids)

    def began(self, conversation: Conversation) -> None:
        """It has a prompt."""
        self.conversation = conversation
        self.messages = list(conversation.messages)
        self.num_opening = len(self.messages)
        self.pieces.append(Piece(conversation.text, list(conversation.ids)))

    def rewritten(self, conversation: Conversation) -> None:
        """What comes next is another sample: the template has changed what stood before."""
        self.conversation = conversation
        self.pieces.append(Piece(conversation.text, list(conversation.ids)))

    def took_turn(self, completion: Completion, content: str, response: str) -> None:
        """The model said something."""
        self.num_turns += 1
        self.turn_ids = completion.ids
        self.pieces[-1].add_turn(completion)
        self.messages.append({"role": "assistant", "content": content})
        self.response = response

    def was_answered(self, answer: Answer) -> None:
        """The environment said something to the last turn."""
        if answer.reward is not None:
            self.rewards.append(answer.reward)
            self.pieces[-1].reward[-1] += answer.reward
        self.numbers |= answer.numbers
        self.num_calls += answer.tools.calls
        self.num_errors += answer.tools.errors
        self.messages += answer.messages

    def samples(self, reward: Reward, version: int, fallback: Sequence[int]) -> Samples:
        """What it makes, as ragged samples: usually one.

        Args:
            reward: of the reward function; ``FAILED`` where it was not judged.
            version: of the weights, for an episode in which the model said nothing.
            fallback: a prompt for an episode that never had one; at least two tokens.
        """
        pieces = [piece for piece in self.pieces if any(piece.mask)]
        for piece in pieces:
            piece.cut()
        if not pieces:
            prompt, last = fallback[:-1], fallback[-1]
            pieces = [Piece("", list(prompt), [last], [False], [0.0], [version], [0.0])]
        valid = self.fault is None and (reward.valid or (bool(self.rewards) and not reward.applies))
        total = sum(self.rewards) + (reward.value if reward.valid and reward.value is not None else 0.0)
        count = len(pieces)
        return Samples(
            lengths=torch.tensor([len(piece.prompt) + len(piece.ids) for piece in pieces]),
            tokens={
                "ids": _column(pieces, "ids", np.int64),
                "mask": _column(pieces, "mask", np.bool_),
                "sampler_logprob": _column(pieces, "logprob", np.float32),
                "version": _column(pieces, "version", np.int32),
                "turn_reward": _column(pieces, "reward", np.float64),
            },
            rows={
                "group": torch.full((count,), self.draw.number),
                "prompt": torch.full((count,), self.draw.prompt),
                "episode": torch.full((count,), self.index),
                "reward": torch.full((count,), total if valid else 0.0, dtype=torch.float64),
                "valid": torch.full((count,), valid),
                "turns": torch.full((count,), self.num_turns),
                "tool_calls": torch.full((count,), self.num_calls),
                "tool_errors": torch.full((count,), self.num_errors),
            },
            meta={
                "response": [self.response] * count,
                "finish": [self.finish] * count,
                "invalid": [None if valid else reward.why if self.fault is None else str(self.fault)] * count,
                "parts": [self._parts(reward)] * count,
                "failed": [dict(reward.failed)] * count,
                "remark": [reward.detail if reward.valid else ""] * count,
                "printed": [reward.printed, *[""] * (count - 1)],
                "messages": [self.messages] * count,
                "shown": [piece.text for piece in pieces],
            },
        )

    def _parts(self, reward: Reward) -> dict[str, float]:
        """Numbers of the sample by name: those of the environment, and of the reward function."""
        own: Mapping[str, float] = {f"environment/{name}": value for name, value in self.numbers.items()}
        return {**own, **({"environment": sum(self.rewards)} if self.rewards else {}), **reward.parts}


def _column(pieces: Sequence[Piece], name: str, dtype: type) -> torch.Tensor:
    """A column of all pieces end to end; what stands at a prompt is its ids, or zero."""
    parts: list[Any] = []
    for piece in pieces:
        parts += [piece.prompt if name == "ids" else np.zeros(len(piece.prompt)), vars(piece)[name]]
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=dtype) for part in parts]))


def reward_request(prompt: Prompt, episode: Episode) -> RewardRequest:
    """What a reward function is told of an episode that is over."""
    last = max(i for i, message in enumerate(episode.messages) if message["role"] == "assistant")
    piece = episode.pieces[-1]
    return RewardRequest(
        response=episode.response,
        answer=prompt.row.answer,
        data_source=prompt.row.data_source,
        extra=prompt.row.extra,
        prompt=piece.text,
        finish=episode.finish,
        prompt_ids=piece.prompt,
        response_ids=list(piece.ids),
        chat=episode.messages[:last],
        prompt_messages=episode.num_opening,
        columns=prompt.row.columns,
    )
