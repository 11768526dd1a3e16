"""What the controller of a run over devices holds of each sample, and what it sends: bytes a token, and for a whole step.

    python bench/controller_memory.py                      # 4,096 samples of 4,096 tokens, from 64 that are measured
    python bench/controller_memory.py --samples 512 --tokens 8192 --measured 16

An engine that gives random tokens stands for replicas; the collector, the samples, the shares of ranks and what is written to
them are those of a run. Where a replica has several ranks (``--ranks``), what each of them is sent counts.
"All that it needs" are columns as the batch has them, with entropies beside log-probs.
"""

import argparse
import random
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshloom.config.settings import AlgorithmSettings
from meshloom.data.rows import Prompt, Row
from meshloom.fabric.dispatch import GroupLayout
from meshloom.fabric.wire import encode
from meshloom.loop.collect import Collector
from meshloom.loop.correction import learned
from meshloom.loop.held import HeldSamples, Shares, what_is_new
from meshloom.loop.objective import PolicyObjective
from meshloom.loop.sharing import Sharing, shared_out
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
        self.tokens, self.told_bytes = tokens, 0

    def generate(self, requests: Sequence[Request], *, deadline_s: float, feed: Any = None) -> Iterator[Completion]:
        chance = random.Random(1)
        wanted = [(request.id, index) for request in requests for index in range(len(request.seeds))]
        for at in range(0, len(wanted), TOGETHER):
            told = Completions.of([self._one(chance, *place) for place in wanted[at : at + TOGETHER]])
            self.told_bytes += written(told)
            yield from told.each()

    def _one(self, chance: random.Random, number: int, index: int) -> Completion:
        ids = [chance.randrange(VOCABULARY) for _ in range(self.tokens)]
        logprobs = [_float32(-chance.random()) for _ in range(self.tokens)]
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
    parser.add_argument("--replicas", type=int, default=4, help="of the model that is trained")
    parser.add_argument("--ranks", type=int, default=1, help="of each of them")
    parser.add_argument("--updates", type=int, default=2, help="of a step")
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
    rows = [
        ("held while samples come in, Python's own memory", most),
        ("held: texts of the responses", text),
        ("held: the step's tensors", tensors),
    ]
    traffic = [
        ("from engines", collector.engine.told_bytes, 24 * args.measured * args.tokens),
        *Step(batch, args.replicas, args.ranks, args.updates).rows(),
    ]
    scale = args.samples / args.measured
    each = batch.num_tokens
    print(
        f"{args.samples:,} samples of {args.tokens:,} tokens, from {args.measured}; {held / each:.1f} B/token are kept"
    )
    for name, count in rows:
        print(f"{name:<48} {count / each:7.1f} B/token {scale * count / 2**30:8.2f} GiB a step")
    print(
        f"{'passes the controller':<48} {'':>7} B/token {'':>8} GiB a step    B/token if each call sends all that it needs"
    )
    for name, count, whole in traffic:
        print(f"{name:<48} {count / each:7.1f} {'':7} {scale * count / 2**30:8.2f} {'':10} {whole / each:7.1f}")


class Step:
    """What a step sends over its ranks, from its log-probs to its updates.

    Args:
        batch: of the step.
        replicas: of the model that is trained, and of the reference on the same ranks.
        ranks: of each replica.
        updates: of the step, as even as prompts make them.
    """

    def __init__(self, batch: Samples, replicas: int, ranks: int, updates: int) -> None:
        self.layout = GroupLayout.of_mesh(range(replicas * ranks), [("fsdp", replicas), ("tp", ranks)], ["fsdp"])
        untold = ("old_logprob", "reference_logprob")
        all_ranks = self.layout.ranks
        self.held = HeldSamples(all_ranks, learner=self.layout, readers=all_ranks, untold=untold)
        self.count = updates
        self.batch = replace(self.held.begin(batch, self.cut), meta={})

    def cut(self, batch: Samples) -> list[Samples]:
        """The updates."""
        place = torch.unique_consecutive(batch["group"], return_inverse=True)[1]
        number = place * self.count // (int(place.max()) + 1)
        return [learned(batch.select((number == i).nonzero().squeeze(1))) for i in range(self.count)]

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """What each call sends, and what comes back; and what that would be if each were told all that it needs."""
        for name in ("old_logprob", "reference_logprob"):
            asked = Samples(self.batch.lengths, {n: self.batch[n] for n in ("ids", "mask")}, self.batch.rows)
            parts, *sent = self.send(asked)
            yield f"to ranks for {name}", *sent
            column_T = self.batch["sampler_logprob"] + len(name)
            tells = self.held.need_tell(name, asked, parts, self.layout, self.layout.ranks)
            yield f"back: {name}", tells * written(column_T), 2 * written(column_T)
            at = dict(zip(self.layout.ranks, self.layout.data_index, strict=True))
            column_T = self.held.computed(name, column_T if tells else None, asked, parts, at)
            self.batch = self.batch.with_tokens(**{name: column_T})
        each_S = torch.randn(len(self.batch), dtype=torch.float64).repeat_interleave(self.batch.lengths)
        batch = self.batch.with_tokens(advantages=torch.where(self.batch["mask"], each_S, 0.0))
        settings = AlgorithmSettings()
        for epoch in ("first", "second"):
            updates = [PolicyObjective.of(update, settings, 0).read(update) for update in self.cut(batch)]
            sent = [self.send(update) for update in updates]
            yield f"to ranks for the {epoch} epoch of updates", *(sum(each[i] for each in sent) for i in (1, 2))

    def send(self, samples: Samples) -> tuple[list[list[int]], int, int]:
        """Parts of a call, the bytes that are written to all ranks, and how many their parts have."""
        parts = shared_out(Sharing(tokens_per_microbatch=2**40), samples, self.layout, self.held)
        each = what_is_new("samples")({"samples": Shares(samples, parts, self.held)}, self.layout)
        whole = [written(Samples(samples.lengths, samples.tokens).select(part)) for part in parts]
        return parts, sum(map(written, each)), sum(whole[index] for index in self.layout.data_index)


def written(value: Any) -> int:
    """Bytes that a message has beside its header."""
    _, blobs = encode(value)
    return sum(len(memoryview(blob).cast("B")) for blob in blobs)


def _float32(value: float) -> float:
    """As a float32 has it, in which engines compute."""
    return struct.unpack("f", struct.pack("f", value))[0]


if __name__ == "__main__":
    main()
