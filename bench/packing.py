"""Packed training against padded training: seconds and memory of one forward and backward over the same samples.

Usage: python bench/packing.py [--tiny] [--threads N] [--models 1M 50M]

Samples with long-tailed or equal response lengths, or in groups of eight that share a prompt and have long-tailed responses
(as in GRPO), are cut into microbatches of whole samples. Packed is
``TrainedModel.forward_backward`` as runs use it. Padded is the same model with transformers' own attention (sdpa), right
padding and an attention mask, in three kinds: on packed's own microbatches with logits at every place; the same with our
chunked log-probs where a token is predicted, which leaves the padding itself as the only difference; and with samples of
similar length together, the best a padded trainer can do. The loss is one whose gradient differs at every token, and all
sides' gradients must be equal before anything is timed. The optimizer is left out: it is the same for all. Packed also
computes the entropy of each prediction, as runs report it; padded with whole logits does not.

Sides take turns, the fastest round of each counts. Peak memory is that of a process of its own which makes the gradient
twice, less what it held once the model was loaded.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from engine import MODELS, build, lengths_of
from memory import peak_bytes
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshloom.config.settings import ModelSettings, OptimizerSettings
from meshloom.plan.compute import logits_chunk_bytes
from meshloom.samples import Samples
from meshloom.train.attention import use_layouts
from meshloom.train.head import OutputHead
from meshloom.train.logprobs import logprobs_and_entropy
from meshloom.train.model import LossParts, MicrobatchBound, TrainedModel
from meshloom.train.sharing import Computed, pack_samples

GROUPS, GROUP = "groups", 8
CHUNK_BYTES = logits_chunk_bytes(ModelSettings(path="-"), gpu=False)
PACKED, WHOLE, CHUNKED, SORTED = "packed", "padded", "padded, chunked head", "padded, similar lengths"
SIDES = (PACKED, WHOLE, CHUNKED, SORTED)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured: a model by name, samples, and the tokens a microbatch may hold."""

    model: str
    kind: str
    count: int
    longest: int
    tokens_per_microbatch: int

    def samples(self) -> Samples:
        """Prompts of 16 to 64 tokens and responses, with a weight for each predicted token."""
        random = torch.Generator().manual_seed(0)
        vocabulary, repeat = MODELS[self.model]["vocab_size"], GROUP if self.kind == GROUPS else 1
        ids, mask = [], []
        for i, response in enumerate(lengths_of(self.kind, self.count, self.longest)):
            if i % repeat == 0:
                size = 40 if self.kind == "equal" else int(torch.randint(16, 65, (), generator=random))
                prompt = torch.randint(1, vocabulary, (size,), generator=random)
            ids.append(torch.cat([prompt, torch.randint(1, vocabulary, (response,), generator=random)]))
            mask.append(torch.arange(len(ids[-1])) >= len(prompt))
        samples = Samples(torch.tensor([len(x) for x in ids]), {"ids": torch.cat(ids), "mask": torch.cat(mask)})
        weight = torch.randn(samples.num_tokens, generator=random) / samples.num_tokens
        return samples.with_tokens(weight=weight)

    def microbatches(self, samples: Samples, side: str) -> list[list[int]]:
        """Samples that are computed together."""
        lengths = samples.lengths.tolist()
        if side != SORTED:
            return pack_samples(samples, tokens_per_microbatch=self.tokens_per_microbatch, samples_per_microbatch=None)
        return list(_by_length(lengths, self.tokens_per_microbatch))


def _by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Samples of similar length together, as many as the padded microbatch may hold."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def weighted(microbatch: Samples, logprob_T: Tensor, entropy_T: Tensor) -> LossParts:
    """A loss whose gradient differs at every token."""
    return LossParts((microbatch["weight"] * logprob_T * microbatch["mask"]).sum(), {})


def padded_pass(model: PreTrainedModel, samples: Samples, microbatches: list[list[int]], *, chunked: bool) -> None:
    """Forward and backward with right padding."""
    head = OutputHead(model)
    for indices in microbatches:
        part = samples.select(indices)
        ids, mask, weight = (
            nn.utils.rnn.pad_sequence(part.column(c), batch_first=True) for c in ("ids", "mask", "weight")
        )
        width = torch.arange(ids.shape[1])
        attention_mask = (width[None] < part.lengths[:, None]).long()
        if chunked:
            hidden = model.get_decoder()(
                input_ids=ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
            predicts = mask[:, 1:]
            logprob, _ = logprobs_and_entropy(
                head, hidden[:, :-1][predicts], ids[:, 1:][predicts], temperature=1.0, chunk_bytes=CHUNK_BYTES
            )
            (weight[:, 1:][predicts] * logprob).sum().backward()
        else:
            logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
            logprob = -nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            (weight[:, 1:] * logprob * mask[:, 1:]).sum().backward()


def side_of(case: Case, side: str, samples: Samples) -> tuple[PreTrainedModel, Callable[[], None]]:
    """A model, and what adds its gradient."""
    model = build(case.model)
    if side == PACKED:
        use_layouts(model)
        bound = MicrobatchBound(case.tokens_per_microbatch)
        trained = TrainedModel(model, ModelSettings(path="-"), bound, OptimizerSettings())
        return model, lambda: trained.forward_backward(samples, weighted, temperature=1.0)
    microbatches = case.microbatches(samples, side)
    return model, lambda: padded_pass(model, samples, microbatches, chunked=side == CHUNKED)


def check_equal(models: dict[str, PreTrainedModel]) -> float:
    """The largest difference between two sides' gradients of a parameter, relative to its largest entry."""
    worst = 0.0
    for name, expected in models[PACKED].named_parameters():
        size = float(expected.grad.abs().max())
        for model in models.values():
            worst = max(worst, float((model.get_parameter(name).grad - expected.grad).abs().max()) / size)
    assert worst < 1e-3, f"gradients differ by {worst:.2g} of the largest entry"
    return worst


def measure(case: Case, samples: Samples, rounds: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Fewest seconds on the clock and of the processor for each side, and how far the gradients differ."""
    sides = {name: side_of(case, name, samples) for name in SIDES}
    for _, run in sides.values():
        run()
    gap = check_equal({name: model for name, (model, _) in sides.items()})
    clock, processor = dict.fromkeys(SIDES, float("inf")), dict.fromkeys(SIDES, float("inf"))
    for _ in range(rounds):
        for name, (model, run) in sides.items():
            model.zero_grad(set_to_none=True)
            start, used = time.perf_counter(), time.process_time()
            run()
            clock[name] = min(clock[name], time.perf_counter() - start)
            processor[name] = min(processor[name], time.process_time() - used)
    return clock, processor, gap


def memory_of(case: Case, side: str, threads: int) -> int:
    """Peak bytes beyond the loaded model, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory", json.dumps({**vars(case), "side": side, "threads": threads})]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def memory_side(given: dict[str, str | int]) -> None:
    """The process that ``memory_of`` starts: prints its number."""
    side, threads = given.pop("side"), given.pop("threads")
    torch.set_num_threads(threads)
    case = Case(**given)
    model, run = side_of(case, side, case.samples())
    before = peak_bytes()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run()
    print(peak_bytes() - before)


def work(case: Case, samples: Samples, side: str) -> tuple[int, int, int]:
    """Tokens in the linear layers, pairs in attention, and rows of the head, that a side computes."""
    lengths, predicted = samples.lengths, int(samples["mask"].sum())
    if side == PACKED:
        parts = [Computed.of(samples.select(indices)) for indices in case.microbatches(samples, side)]
        pairs = sum(length**2 for part in parts for length in part.lengths)
        return sum(len(part.tokens_C) for part in parts), pairs, predicted
    shapes = [(len(b), int(lengths[b].max())) for b in case.microbatches(samples, side)]
    tokens, pairs = sum(n * width for n, width in shapes), sum(n * width**2 for n, width in shapes)
    return tokens, pairs, predicted if side == CHUNKED else tokens


def compare(console: Console, case: Case, rounds: int, with_memory: bool) -> None:
    samples = case.samples()
    peaks = {side: memory_of(case, side, torch.get_num_threads()) for side in SIDES} if with_memory else {}
    clock, processor, gap = measure(case, samples, rounds)
    parameters = sum(p.numel() for p in build(case.model).parameters())
    console.print(
        f"{case.model} ({parameters / 1e6:.1f} million parameters), {case.kind} lengths: {len(samples)} samples, "
        f"{samples.num_tokens} tokens, {int(samples['mask'].sum())} of them predicted, longest {int(samples.lengths.max())}; "
        f"at most {case.tokens_per_microbatch} tokens a microbatch; gradients equal to {gap:.0e}",
        highlight=False,
    )
    table = Table()
    headings = ("tokens computed", "attention pairs", "head rows", "seconds", "processor s", "÷ packed", "peak MiB")
    for heading in ("side", *headings):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    ours = work(case, samples, PACKED)
    for side in SIDES:
        amounts = [f"{n:,} ({n / base:.2f})" for n, base in zip(work(case, samples, side), ours, strict=True)]
        seconds = [f"{clock[side]:.3f}", f"{processor[side]:.3f}", f"{clock[side] / clock[PACKED]:.2f}"]
        table.add_row(side, *amounts, *seconds, f"{peaks[side] / 2**20:,.0f}" if peaks else "–")
    console.print(table)
    for side in SIDES[1:]:
        ratios = f"{clock[side] / clock[PACKED]:.2f} on the clock, {processor[side] / processor[PACKED]:.2f} in processor time"
        console.print(f"ratio ({case.model}, {case.kind}): {side} ÷ packed = {ratios}", highlight=False)
    console.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--threads", type=int, help="threads of torch; default: its own choice")
    parser.add_argument("--models", nargs="+", default=["1M", "50M"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        memory_side(options.memory)
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(width=max(Console().width, 128))
    for kind in ("long-tailed", "equal", GROUPS):
        if options.tiny:
            case = Case(model="tiny", kind=kind, count=4, longest=24, tokens_per_microbatch=256)
            compare(console, case, 1, with_memory=False)
            continue
        for name in options.models:
            count, longest = (24, 256) if name == "50M" else (64, 512)
            case = Case(model=name, kind=kind, count=count, longest=longest, tokens_per_microbatch=2048)
            compare(console, case, options.rounds, with_memory=True)


if __name__ == "__main__":
    main()
