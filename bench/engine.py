"""The embedded engine against ``transformers.generate``: tokens a second on the same model and the same wanted tokens.

Usage: python bench/engine.py [--tiny] [--threads N]

64 requests, prompts of 16 to 64 tokens, responses whose lengths are either long-tailed or equal, forced for both sides
(no token ends a sample; each is cut at its own length). ``generate`` gets its own attention (sdpa), left padding, each
batch size in turn, requests in the order of arrival, and stops a batch when its longest row is done. The last line of
each table is the engine's tokens a second divided by the best of ``generate``'s. Rounds alternate between the sides, and
the fastest round of each counts. Processor time is shown too: it holds on a machine that others use as well.
"""

import argparse
import time
from collections.abc import Callable

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from meshloom.rollout.protocol import Request, SamplingParams
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.attention import use_layouts

MODELS = {
    "tiny": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                 head_dim=16, vocab_size=128, tie_word_embeddings=True),
    "1M": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
               head_dim=32, vocab_size=1024, tie_word_embeddings=True),
    "50M": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4,
                head_dim=64, vocab_size=32768, tie_word_embeddings=True),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**MODELS[name])).eval()
    model.generation_config.eos_token_id = None
    return model


def lengths_of(kind: str, count: int, longest: int) -> list[int]:
    """Response lengths: equal, or log-normal with the tail cut at ``longest``."""
    if kind == "equal":
        return [longest // 2] * count
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 8), 0.9, count)
    return np.clip(drawn, 4, longest).astype(int).tolist()


def run_engine(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
    engine = TorchEngine(model, eos_ids=(), max_sequences=64)
    requests = [
        Request(id=i, prompt_ids=prompt, params=SamplingParams(max_tokens=length), seeds=[i])
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    done = sum(len(completion.ids) for completion in engine.generate(requests, deadline_s=3600))
    assert done == sum(lengths)


def run_generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch_size: int) -> None:
    for start in range(0, len(prompts), batch_size):
        batch, wanted = prompts[start : start + batch_size], lengths[start : start + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        options = dict(do_sample=True, top_k=0, max_new_tokens=max(wanted), pad_token_id=0)
        out = model.generate(ids, attention_mask=mask, **options)
        assert out.shape == (len(batch), width + max(wanted))


Side = tuple[PreTrainedModel, Callable[[PreTrainedModel], None]]


def measure(sides: dict[str, Side], rounds: int) -> dict[str, tuple[float, float]]:
    """Fewest seconds on the clock and of the processor for each side; the sides take turns."""
    clock, processor = dict.fromkeys(sides, float("inf")), dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, (model, run) in sides.items():
            start, used = time.perf_counter(), time.process_time()
            with torch.no_grad():
                run(model)
            clock[name] = min(clock[name], time.perf_counter() - start)
            processor[name] = min(processor[name], time.process_time() - used)
    return {name: (clock[name], processor[name]) for name in sides}


def compare(
    console: Console, name: str, kind: str, *, count: int, longest: int, batch_sizes: list[int], rounds: int
) -> None:
    theirs, ours = build(name), build(name)
    use_layouts(ours)
    random = np.random.default_rng(1)
    vocabulary = MODELS[name]["vocab_size"]
    prompts = [random.integers(1, vocabulary, random.integers(16, 65)).tolist() for _ in range(count)]
    lengths = lengths_of(kind, count, longest)
    sides = {"engine": (ours, lambda model: run_engine(model, prompts, lengths))}
    for size in batch_sizes:
        sides[f"generate, batch {size}"] = (
            theirs,
            lambda model, size=size: run_generate(model, prompts, lengths, size),
        )
    seconds = measure(sides, rounds)
    table = Table(
        title=f"{name} parameters, {kind} lengths, {count} requests, {sum(lengths)} tokens", title_justify="left"
    )
    for heading in ("side", "seconds", "processor seconds", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for side, (clock, processor) in seconds.items():
        table.add_row(side, f"{clock:.2f}", f"{processor:.2f}", f"{sum(lengths) / clock:,.0f}")
    console.print(table)
    ratios = [min(took[i] for side, took in seconds.items() if side != "engine") / seconds["engine"][i] for i in (0, 1)]
    console.print(f"ratio ({name}, {kind}): {ratios[0]:.2f} on the clock, {ratios[1]:.2f} in processor time\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--threads", type=int, help="threads of torch; default: one for 1M, where more cost generate")
    parser.add_argument("--models", nargs="+", default=["1M", "50M"], choices=list(MODELS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 16, 32, 64], help="of generate")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads = options.threads or torch.get_num_threads()
    console = Console()
    for kind in ("long-tailed", "equal"):
        if options.tiny:
            compare(console, "tiny", kind, count=4, longest=16, batch_sizes=[2, 4], rounds=1)
            continue
        for name in options.models:
            torch.set_num_threads(1 if name == "1M" and not options.threads else threads)
            longest = 256 if name == "50M" else 512
            compare(
                console, name, kind, count=64, longest=longest, batch_sizes=options.batch_sizes, rounds=options.rounds
            )


if __name__ == "__main__":
    main()
