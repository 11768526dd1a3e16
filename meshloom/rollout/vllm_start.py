"""A quick start of vLLM that leaves no trace: what it does for processes of another kind than ours is left out.

Owns: what is left out, and how; arithmetic that is as before. Refuses to know: settings, weights, requests. Always holds: what
vLLM computes is the same without it; an installed vLLM that lacks what one of these needs starts as it would by itself.
"""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_FEW = (1, 2, 4, 8)
_STEP, _WIDE_STEP, _WIDE, _MOST = 16, 32, 256, 512
_SAMPLERS = "vllm.v1.sample.ops.topk_topp_sampler"


def graph_sizes(max_sequences: int, prefill_tokens: int) -> list[int]:
    """Numbers of tokens of a pass for which vLLM shall capture graphs; a pass is filled up to the next one.

    vLLM's own are twice as many, a step of 8 tokens apart, which saves no time in a pass: products are computed in tiles of 16
    rows and more. A full batch of sequences that decode is a size of its own.

    Args:
        max_sequences: decoded at once.
        prefill_tokens: of a pass at most, not fewer than sequences.
    """
    most = min(2 * max_sequences, _MOST, prefill_tokens)
    sizes = {*_FEW, *range(_STEP, _WIDE, _STEP), *range(_WIDE, most + 1, _WIDE_STEP), min(max_sequences, _MOST), most}
    return sorted(size for size in sizes if size <= most)


def know_model_class(folder: Path) -> None:
    """Show vLLM the class of a model, so that it does not start a process which imports torch and vLLM again to look at it.

    That process is there to keep CUDA out of the one that asks; here CUDA is in use, and the class needed a moment later.

    Args:
        folder: of the model.
    """
    # What is not there, or cannot be imported, is refused by vLLM in words of its own.
    with suppress(OSError, ImportError, AttributeError):
        from vllm import ModelRegistry

        for name in json.loads((folder / "config.json").read_text()).get("architectures") or ():
            if name in ModelRegistry.models:
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextmanager
def filters_uncompiled() -> Iterator[None]:
    """Inside, vLLM's trial passes draw from all tokens: the kernel that keeps the likeliest takes seconds to compile, and is
    compiled by the first step that asks for it, which most runs never do."""
    try:
        samplers = importlib.import_module(_SAMPLERS)
        apply = samplers.apply_top_k_top_p
    except (ImportError, AttributeError):
        yield
        return
    samplers.apply_top_k_top_p = _unfiltered
    try:
        yield
    finally:
        samplers.apply_top_k_top_p = apply


@contextmanager
def arithmetic_kept() -> Iterator[None]:
    """Afterwards this process multiplies float32 as its settings said before. vLLM says by name what is the default, whole
    float32; compilers take the two for different and would find nothing of what they have made."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        yield
    finally:
        if (before, settings.fp32_precision) == ("none", "ieee"):
            settings.fp32_precision = before


def _unfiltered(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    return logits
