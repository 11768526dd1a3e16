"""Log-probabilities and entropy of many tokens over a large vocabulary, against whole logits.

Usage: python bench/gpu_logprobs.py [--tokens 65536] [--size 0.5b] [--chunk-mib 128 256 512] [--profile] [--tiny]

Ours is ``logprobs_and_entropy`` as training uses it, with the chunk size of its settings. Backward gives the gradients of the
hidden states and of the head's weight. Whole logits are made in the same arithmetic (bfloat16 product, float32 after it) for so
many tokens at a time as fit, all of them in turn; the best that plain torch does is the one that has no entropy. Results are
compared before anything is timed.

Extra memory is the most that was allocated, less what was before: everything counts that the call makes, gradients too. The
weight's gradient in float32 is the largest part of ours; in training it lies in the master's own gradient.
"""

import argparse
from collections.abc import Callable

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from gpu_common import console, print_ratio, print_table, require_gpu, seconds_of, versions_line
from gpu_models import SHAPES
from gpu_train_pass import DEVICE, TINY_VOCABULARY, show_profile
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM, Qwen2Config

from meshloom.config.settings import ModelSettings
from meshloom.plan.compute import logits_chunk_bytes
from meshloom.train.head import OutputHead
from meshloom.train.logprobs import logprobs_and_entropy
from meshloom.train.products import way_to_add

CHUNK_BYTES = logits_chunk_bytes(ModelSettings(path="-"), gpu=DEVICE.type == "cuda")
"""As runs have it by default."""


class Case:
    """Hidden states, targets, and a head of a size.

    Args:
        size: one of ``SHAPES``.
        tokens: rows.
        at_once: rows that whole logits are made of at a time.
    """

    def __init__(self, size: str, tokens: int, at_once: int) -> None:
        shape, self.at_once = SHAPES[size], at_once
        config = Qwen2Config(
            vocab_size=shape.vocabulary or TINY_VOCABULARY,
            hidden_size=shape.hidden,
            num_hidden_layers=1,
            intermediate_size=8,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
        with DEVICE:
            self.head = OutputHead(AutoModelForCausalLM.from_config(config, dtype=dtype))
            self.hidden_ND = torch.randn(tokens, shape.hidden, dtype=dtype).requires_grad_()
            self.targets_N = torch.randint(0, config.vocab_size, (tokens,))
            self.grad_N = torch.randn(tokens)

    def ours(self, chunk_bytes: int = CHUNK_BYTES) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(self.head, self.hidden_ND, self.targets_N, temperature=1.0, chunk_bytes=chunk_bytes)

    def ours_and_gradients(self, chunk_bytes: int = CHUNK_BYTES) -> tuple[Tensor, Tensor]:
        logprob_N, _ = self.ours(chunk_bytes)
        return torch.autograd.grad(logprob_N, (self.hidden_ND, self.head.weight), self.grad_N)

    def whole(self, *, entropy: bool, gradients: bool) -> list[Tensor]:
        """Log-probs (and entropy) from whole logits, or the gradients instead."""
        weight_VD = self.head.weight.detach().requires_grad_()
        pieces, hidden = [], []
        for at in range(0, len(self.targets_N), self.at_once):
            part = slice(at, at + self.at_once)
            hidden_CD = self.hidden_ND[part].detach().requires_grad_(gradients)
            logits_CV = linear(hidden_CD, weight_VD).float()
            logprob_C = -cross_entropy(logits_CV, self.targets_N[part], reduction="none")
            if entropy:
                with torch.no_grad():
                    logp_CV = logits_CV.log_softmax(-1)
                    logp_CV.mul_(logp_CV.exp()).sum(-1)
                    del logp_CV
            del logits_CV
            if gradients:
                (logprob_C * self.grad_N[part]).sum().backward()
                hidden.append(hidden_CD.grad)
            else:
                pieces.append(logprob_C.detach())
        return [torch.cat(hidden), weight_VD.grad] if gradients else [torch.cat(pieces)]


def extra_bytes(work: Callable[[], object]) -> int:
    """Most bytes allocated on the GPU by some work, beyond those before it; 0 without a GPU."""
    if DEVICE.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def check(case: Case) -> None:
    """Both ways give the same numbers, up to the rounding of bfloat16."""
    with torch.no_grad():
        gap = float((case.ours()[0] - case.whole(entropy=False, gradients=False)[0]).abs().max())
    assert gap < 0.1, f"log-probs differ by {gap:.3g}"
    for ours, theirs in zip(case.ours_and_gradients(), case.whole(entropy=False, gradients=True), strict=True):
        apart = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        assert apart < 0.02, f"gradients differ by {apart:.3g} of their norm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke run of seconds, on any device")
    parser.add_argument("--size", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--at-once", type=int, default=8192, help="tokens that whole logits are made of at a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk-mib", type=int, nargs="*", default=[], help="other chunk sizes, timed too")
    parser.add_argument("--profile", action="store_true", help="print the kernels of our forward and backward")
    given = parser.parse_args()
    require_gpu(given.tiny)
    if given.tiny:
        given.size, given.tokens, given.at_once, given.repeats = "tiny", 512, 256, 3
    case, out = Case(given.size, given.tokens, given.at_once), console()
    out.print(versions_line())
    check(case)
    if DEVICE.type == "cuda":
        out.print(f"products are added to the float32 total by: {way_to_add(DEVICE, case.head.weight.dtype)}")
    if given.profile:
        show_profile(case.ours_and_gradients)
    sides: dict[str, Callable[[], object]] = {
        "ours, forward": lambda: _without_gradient(case.ours),
        "whole logits, forward": lambda: _without_gradient(lambda: case.whole(entropy=True, gradients=False)),
        "the same without entropy": lambda: _without_gradient(lambda: case.whole(entropy=False, gradients=False)),
        "ours, forward and backward": case.ours_and_gradients,
        "whole logits, forward and backward": lambda: case.whole(entropy=True, gradients=True),
        "the same without its entropy": lambda: case.whole(entropy=False, gradients=True),
    }
    for mib in given.chunk_mib:
        sides[f"ours, forward and backward, {mib} MiB"] = lambda mib=mib: case.ours_and_gradients(mib * 2**20)
    seconds = {name: seconds_of(work, given.repeats) for name, work in sides.items()}
    extra = {name: extra_bytes(work) for name, work in sides.items()}
    rows = [
        [name, f"{seconds[name] * 1e3:.1f}", f"{extra[name] / 2**20:,.0f}" if extra[name] else "–"] for name in sides
    ]
    vocabulary = len(case.head.weight)
    title = f"{given.tokens:,} tokens, vocabulary {vocabulary:,}; whole logits {given.at_once:,} tokens at a time"
    print_table(out, title, ["", "ms", "extra MiB"], rows)
    ours, whole, alone = list(sides)[3:6]
    forward, _, forward_alone = list(sides)[:3]
    limit = extra[ours] / 2**30
    print_ratio(out, f"{given.size}, extra memory", limit, "GiB, forward and backward, gradients counted")
    print_ratio(out, f"{given.size}, forward", seconds[forward] / seconds[forward_alone], "seconds ÷ without entropy")
    print_ratio(out, f"{given.size}, with entropy", seconds[ours] / seconds[whole], "seconds ÷ whole logits")
    print_ratio(out, given.size, seconds[ours] / seconds[alone], "seconds ÷ whole logits without entropy")


@torch.no_grad()
def _without_gradient(work: Callable[[], object]) -> object:
    return work()


if __name__ == "__main__":
    main()
