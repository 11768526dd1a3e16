"""What the controller of a run over devices holds of each sample, and what it sends: bytes a token, and for a whole step.

    python bench/controller_memory.py                      # 4,096 samples of 4,096 tokens, from 64 that are measured
    python bench/controller_memory.py --samples 512 --tokens 8192 --measured 16

An engine that gives random tokens stands for replicas; the collector, the samples and what is written are those of a run.
"""

import argparse
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshloom.data.rows import Prompt, Row
from meshloom.fabric.wire import encode
from meshloom.loop.collect import Collector
from meshloom.loop.stage import Draw
from meshloom.observe.timing import PhaseClock
from meshloom.rewards.outcome import Reward
from meshloom.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from meshloom.rollout.travel import Completions
from meshloom.samples import Samples, concat

VOCABULARY, PROMPT_TOKENS, TOGETHER = 150_000, 256, 1


class Engine:
    """Samples of random tokens, as they come from a worker."""

    version = 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def generate(self, requests: Sequence[Request], *, deadline_s: float, feed: Any = None) -> Iterator[Completion]:
        chance = random.Random(1)
        wanted = [(request.id, index) for request in requests for index in range(len(request.seeds))]
        for at in range(0, len(wanted), TOGETHER):
            yield from Completions.of([self._one(chance, *place) for place in wanted[at : at + TOGETHER]]).each()

    def _one(self, chance: random.Random, number: int, index: int) -> Completion:
        ids = [chance.randrange(VOCABULARY) for _ in range(self.tokens)]
        logprobs = [-chance.random() for _ in range(self.tokens)]
        versions = [0] * self.tokens
        return Completion(
            request_id=number, index=index, ids=ids, logprobs=logprobs, versions=versions, finish=FinishReason.STOP
        )


@dataclass
class Scoring:
    def result(self) -> Reward:
        return Reward(value=1.0)


class Scorer:
    """Scores at once, and keeps nothing."""

    def submit(self, request: Any) -> Scoring:
        return Scoring()

    def begin(self, group: Sequence[Scoring]) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4096, help="of a step")
    parser.add_argument("--tokens", type=int, default=4096, help="of a response")
    parser.add_argument("--measured", type=int, default=64, help="samples that are made here")
    args = parser.parse_args()
    prompt = Prompt(
        row=Row(index=0, prompt="p", answer="a", data_source="", extra={}), ids=[5] * PROMPT_TOKENS, text="p"
    )
    collector = Collector(
        engine=Engine(args.tokens),
        scorer=Scorer(),
        prompts=[prompt],
        decode=lambda ids: ["word" * len(each) for each in ids],
        params=SamplingParams(max_tokens=args.tokens),
        samples_per_prompt=8,
        seed=0,
        decode_at_once=1,  # of a few samples, those that are looked at together would be many
    )
    draws = [Draw(number, 0) for number in range(args.measured // 8)]
    tracemalloc.start()
    found = collector.attempt(draws, deadline_s=1.0, clock=PhaseClock())
    held, most = tracemalloc.get_traced_memory()
    batch = concat(list(found.groups.values()))
    tensors = sum(column.nbytes for column in (*batch.tokens.values(), *batch.rows.values()))
    text = sum(len(each) for each in batch.meta["response"])
    logprob = batch["sampler_logprob"]
    full = replace(batch.with_tokens(old_logprob=logprob.clone(), reference_logprob=logprob.clone()), meta={})
    asked = Samples(batch.lengths, {name: batch.tokens[name] for name in ("ids", "mask")})
    rows = [
        ("while samples come in, Python's own memory", most),
        ("texts of the responses", text),
        ("the step's tensors", tensors),
        ("sent for log-probs, once for each model asked", _wire(asked)),
        ("sent for an update", _wire(full)),
    ]
    scale = args.samples / args.measured
    each = batch.num_tokens
    print(
        f"{args.samples:,} samples of {args.tokens:,} tokens, from {args.measured}; {held / each:.1f} B/token are kept"
    )
    for name, count in rows:
        print(f"{name:<48} {count / each:7.1f} B/token {scale * count / 2**30:8.2f} GiB a step")


def _wire(samples: Samples) -> int:
    """Bytes that are written for one rank that is given all of them."""
    header, blobs = encode({"samples": samples})
    return sum(len(memoryview(blob).cast("B")) for blob in blobs)


if __name__ == "__main__":
    main()
