"""Conversations of several turns on the embedded engine: what is kept between turns against computing each prompt anew.

Usage: python -m bench.turns [--tiny] [--threads N]

16 conversations with prompts of 128 tokens. A turn of the model ends at one of a few tokens, after 64 on average; behind it
come tokens of an environment, and the next turn's request is put as soon as the turn has ended. Both sides draw the same
tokens, which is checked. The fewest processor seconds of the rounds count: they hold on a machine that others use as well.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from bench.engine import MODELS, build
from meshloom.rollout.feed import RequestFeed
from meshloom.rollout.protocol import PromptCount, Request, SamplingParams
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.attention import use_layouts

CONVERSATIONS, PROMPT_TOKENS, MEAN_TURN, LONGEST_TURN = 16, 128, 64, 256


@dataclass(frozen=True)
class Talk:
    """Turns of the model in a conversation, and tokens that come behind each."""

    turns: int
    between: int


@dataclass(frozen=True)
class Took:
    """Processor seconds, tokens of prompts, and everything that was said."""

    seconds: float
    prompts: PromptCount
    said: dict[tuple[int, int], tuple[int, ...]]


def converse(model: PreTrainedModel, vocabulary: int, talk: Talk, *, keep: bool) -> Took:
    """All conversations from their beginning to their end."""
    engine = TorchEngine(model, eos_ids=tuple(range(1, 1 + vocabulary // MEAN_TURN)), max_sequences=CONVERSATIONS)
    params = SamplingParams(max_tokens=LONGEST_TURN)
    longest = PROMPT_TOKENS + (talk.turns - 1) * (LONGEST_TURN + talk.between)
    largest = Request(id=0, prompt_ids=[0] * longest, params=params, seeds=range(CONVERSATIONS), keep=keep)
    feed, said = RequestFeed(largest), {}
    asked: dict[int, Sequence[int]] = {}

    def put(number: int, turn: int, ids: Sequence[int]) -> None:
        asked[number + CONVERSATIONS * turn] = ids
        goes_on = keep and turn + 1 < talk.turns
        seed, name = 1000 * number + turn, number + CONVERSATIONS * turn
        feed.put([Request(id=name, prompt_ids=ids, params=params, seeds=[seed], keep=goes_on)])

    start = time.process_time()
    for number in range(CONVERSATIONS):
        put(number, 0, words(vocabulary, PROMPT_TOKENS, number))
    for completion in engine.generate([], deadline_s=3600, feed=feed):
        turn, number = divmod(completion.request_id, CONVERSATIONS)
        said[number, turn] = tuple(completion.ids)
        if turn + 1 < talk.turns:
            between = words(vocabulary, talk.between, number + turn)
            put(number, turn + 1, [*asked[completion.request_id], *completion.ids, *between])
        elif len(said) == CONVERSATIONS * talk.turns:
            feed.close()
    return Took(time.process_time() - start, engine.take_prompts(), said)


def words(vocabulary: int, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, vocabulary, count).tolist()


def compare(console: Console, name: str, talks: Sequence[Talk], rounds: int) -> None:
    model, vocabulary = build(name), MODELS[name]["vocab_size"]
    use_layouts(model)
    table = Table(title=f"{name} parameters, {CONVERSATIONS} conversations", title_justify="left")
    for heading in ("turns", "tokens at the end", "prompt tokens: anew", "kept", "seconds: anew", "kept", "ratio"):
        table.add_column(heading, justify="right")
    for talk in talks:
        anew, kept = [], []
        for _ in range(rounds):
            anew.append(converse(model, vocabulary, talk, keep=False))
            kept.append(converse(model, vocabulary, talk, keep=True))
        assert all(each.said == anew[0].said for each in (*anew, *kept))
        spoken = sum(map(len, anew[0].said.values())) / CONVERSATIONS
        length = PROMPT_TOKENS + spoken + (talk.turns - 1) * talk.between
        seconds = [min(each.seconds for each in side) for side in (anew, kept)]
        computed = [side[0].prompts.computed for side in (anew, kept)]
        numbers = (f"{talk.turns}", f"{length:,.0f}", *(f"{each:,}" for each in computed))
        table.add_row(*numbers, *(f"{each:.2f}" for each in seconds), f"{seconds[0] / seconds[1]:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model and conversations that show only that it runs")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console = Console(width=140)
    if given.tiny:
        compare(console, "tiny", [Talk(2, 8)], rounds=1)
        return
    compare(console, "1M", [Talk(turns, between) for turns in (2, 4, 8) for between in (16, 256)], rounds=2)


if __name__ == "__main__":
    main()
