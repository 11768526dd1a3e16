"""A training pass: forward and backward of a model of random weights over packed samples.

Usage: python bench/gpu_train_pass.py [--size 0.5b 1.5b 7b] [--shared] [--compare] [--recompute] [--profile] [--tiny]

What is timed is ``TrainedModel.forward_backward`` as runs use it: cutting samples, layers, log-probs and entropy, a loss whose
gradient differs at every token, gradients that add up in float32 masters. The optimizer's own step is not in it. Passes follow
each other without a wait, as microbatches do; the median interval counts, after one pass that compiles and one that warms up.
Beside it stands what the kernels of one pass took in all: where the clock shows more, the device waited for the processor.

Operations are 6·N·T: N all parameters but an embedding table that is not the head's too, T all tokens of the samples, also
those that are not predicted. The share is of this device's own matrix rate, an 8192³ bfloat16 product measured here.

7B with its masters and gradients in float32 leaves little of 140 GB for 16k tokens' activations: at that size the optimizer is
left out and gradients are in bfloat16 (--masters keeps it).
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from gpu_common import console, matrix_rate, print_ratio, print_table, require_gpu, synchronize, versions_line
from gpu_models import SHAPES, config_of
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshloom.config.settings import ModelSettings, OptimizerSettings
from meshloom.samples import Samples
from meshloom.train.attention import use_layouts
from meshloom.train.flops import Cost
from meshloom.train.logprobs import logprobs_and_entropy
from meshloom.train.model import LossParts, MicrobatchBound, TrainedModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUP = 8
TINY_VOCABULARY = 512
WITHOUT_MASTERS = {"7b"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One row of the table."""

    seconds: float
    kernels_s: float
    launches: int
    first_s: float
    head_s: float
    tokens: int
    flops: float
    peak_bytes: int


def build(size: str) -> PreTrainedModel:
    """A model of random weights on the device, in bfloat16 on a GPU."""
    shape = SHAPES[size]
    config = config_of(shape, shape.vocabulary or TINY_VOCABULARY)
    torch.manual_seed(0)
    with DEVICE:
        dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    use_layouts(model)
    return model


def make_samples(vocabulary: int, *, tokens: int, length: int, prompt: int, shared: bool) -> Samples:
    """Samples of one length, as many as a microbatch holds; with ``shared``, groups of eight begin with one prompt."""
    random = torch.Generator().manual_seed(0)
    count = max(1, tokens // length)
    ids_SL = torch.randint(1, vocabulary, (count, length), generator=random)
    if shared:
        ids_SL[:, :prompt] = ids_SL[torch.arange(count) // GROUP * GROUP, :prompt]
    mask_SL = (torch.arange(length) >= prompt).expand(count, length)
    columns = {"ids": ids_SL.flatten(), "mask": mask_SL.flatten()}
    columns["weight"] = torch.randn(count * length, generator=random) / (count * length)
    return Samples(torch.full((count,), length), columns)


def weighted(microbatch: Samples, logprob_T: Tensor, entropy_T: Tensor) -> LossParts:
    """A loss whose gradient differs at every token."""
    return LossParts((microbatch["weight"] * logprob_T).sum(), {})


def trained(size: str, settings: ModelSettings, tokens: int, *, masters: bool) -> TrainedModel:
    """The model as runs train it; without masters, one whose gradients are its own."""
    model = TrainedModel(build(size), settings, MicrobatchBound(tokens), OptimizerSettings() if masters else None)
    model.module.requires_grad_(True)
    return model


def intervals(work: Callable[[], object], repeats: int) -> float:
    """Median seconds between the ends of passes that follow each other without a wait."""
    if DEVICE.type != "cuda":
        ends = [time.perf_counter()]
        for _ in range(repeats):
            work()
            ends.append(time.perf_counter())
        return sorted(b - a for a, b in zip(ends, ends[1:], strict=False))[repeats // 2]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False))[repeats // 2]


def measure(given: argparse.Namespace, size: str, *, compiled: bool) -> Measured:
    """One model, from its first pass on."""
    settings = ModelSettings(path="-", compile=compiled, gradient_checkpointing=given.recompute)
    masters = given.masters or size not in WITHOUT_MASTERS
    model = trained(size, settings, given.tokens, masters=masters)
    samples = make_samples(
        model.head.weight.shape[0], tokens=given.tokens, length=given.length, prompt=given.prompt, shared=given.shared
    )

    def one_pass() -> None:
        if not masters:
            model.module.zero_grad(set_to_none=True)
        model.forward_backward(samples, weighted, temperature=1.0)

    synchronize()
    start = time.perf_counter()
    one_pass()
    synchronize()
    first_s = time.perf_counter() - start
    one_pass()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = intervals(one_pass, given.repeats)
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    if given.profile:
        show_profile(one_pass)
    shape = SHAPES[size]
    cost = Cost.of(model.decoder, model.head.weight, layers=shape.layers, query_width=shape.hidden)
    kernels_s, launches = device_work(one_pass)
    return Measured(
        seconds=seconds,
        kernels_s=kernels_s,
        launches=launches,
        first_s=first_s,
        head_s=head_seconds(model, int(samples["mask"].sum()), given.repeats),
        tokens=samples.num_tokens,
        flops=(cost.per_token + cost.per_prediction) * samples.num_tokens,
        peak_bytes=peak,
    )


def head_seconds(model: TrainedModel, rows: int, repeats: int) -> float:
    """Seconds of the pass that are log-probs and entropy, forward and backward, made here alone."""
    weight = model.head.weight
    hidden_ND = torch.randn(rows, weight.shape[1], device=DEVICE, dtype=weight.dtype).requires_grad_()
    targets_N = torch.randint(0, weight.shape[0], (rows,), device=DEVICE)

    def once() -> None:
        logprob_N, _ = logprobs_and_entropy(
            model.head, hidden_ND, targets_N, temperature=1.0, chunk_bytes=model.chunk_bytes
        )
        logprob_N.sum().backward()
        hidden_ND.grad = None

    once()
    return intervals(once, repeats)


def device_work(one_pass: Callable[[], object]) -> tuple[float, int]:
    """Seconds of all kernels and copies of a pass on the device, and their number; on a processor, of its operators.

    What the clock shows beyond them is time in which the device waited for the processor.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    gpu = DEVICE.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        one_pass()
        synchronize()
    events = found.key_averages()
    if gpu:
        events = [e for e in events if e.device_type == DeviceType.CUDA]
        return sum(e.self_device_time_total for e in events) / 1e6, sum(e.count for e in events)
    events = [e for e in events if e.key.startswith(("aten::", "meshloom::"))]
    return sum(e.self_cpu_time_total for e in events) / 1e6, sum(e.count for e in events)


def show_profile(one_pass: Callable[[], object]) -> None:
    """Where the device's time goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        one_pass()
        synchronize()
    order = "self_cuda_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90))


def run(given: argparse.Namespace, out: Console, size: str, rate: float) -> None:
    """All rows of a size, and its ratios."""
    sides = {"compiled": True, "not compiled": False} if given.compare else {"compiled": not given.eager}
    found = {}
    for name, compiled in sides.items():
        torch.compiler.reset()
        found[name if compiled else "not compiled"] = measure(given, size, compiled=compiled)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    rows = [
        [
            name,
            f"{m.seconds * 1e3:.1f}",
            f"{m.kernels_s * 1e3:.1f}",
            f"{m.launches:,}",
            f"{m.head_s * 1e3:.1f}",
            f"{m.tokens / m.seconds:,.0f}",
            f"{m.flops / m.seconds / 1e12:.1f}",
            f"{m.flops / m.seconds / rate:.1%}",
            f"{m.peak_bytes / 2**30:.1f}" if m.peak_bytes else "–",
            f"{m.first_s:.1f}",
        ]
        for name, m in found.items()
    ]
    headings = [
        "",
        "ms",
        "kernels ms",
        "launches",
        "of it head ms",
        "tokens/s",
        "TFLOP/s",
        "of matrix rate",
        "peak GiB",
    ]
    headings += ["first pass s"]
    kind = "shared prompts" if given.shared else "prompts of their own"
    tokens = next(iter(found.values())).tokens
    print_table(out, f"{size}, {tokens:,} tokens, {kind}; matrix rate {rate / 1e12:.0f} TFLOP/s", headings, rows)
    best = next(iter(found.values()))
    if given.compare:
        faster = found["not compiled"].seconds / found["compiled"].seconds
        print_ratio(out, f"{size}, compiled", faster, "seconds without compiling ÷ with")
    print_ratio(out, size, best.flops / best.seconds / rate, "6·N·T ÷ seconds ÷ matrix rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke run of seconds, on any device")
    parser.add_argument("--size", nargs="+", choices=list(SHAPES), default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens of the pass")
    parser.add_argument("--length", type=int, default=546, help="tokens of a sample")
    parser.add_argument("--prompt", type=int, default=34, help="of them, tokens of its prompt")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--shared", action="store_true", help="eight samples begin with one prompt")
    parser.add_argument("--recompute", action="store_true", help="model.gradient_checkpointing")
    parser.add_argument("--masters", action="store_true", help="float32 masters for 7b too")
    parser.add_argument("--eager", action="store_true", help="only without compiling")
    parser.add_argument("--compare", action="store_true", help="with and without compiling")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one pass")
    given = parser.parse_args()
    require_gpu(given.tiny)
    if given.tiny:
        given.size, given.tokens, given.length, given.prompt, given.repeats = ["tiny"], 256, 32, 8, 3
    out = console()
    out.print(versions_line())
    rate = matrix_rate(given.tiny)
    for size in given.size:
        run(given, out, size, rate)


if __name__ == "__main__":
    main()
