"""Settings of a model that is trained: its folder, its arithmetic, its adapters, its optimizer.

Owns: their defaults, ranges and meaning. Refuses to know: devices, tensors, files' contents.
"""

from typing import Literal

from meshloom.config.base import Count, CountOrZero, NotNegative, Place, Positive, Settings, Share


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft; the base stays frozen."""

    rank: Count = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Scale of the adapters: they are multiplied by alpha / rank."""
    dropout: Share = 0.0
    """Dropout on the adapters' input. Anything but 0 makes sampler and trainer disagree."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get an adapter, or ``all-linear``: every linear layer but the head."""


class ModelSettings(Settings):
    """Which model is trained and in which arithmetic."""

    path: Place
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of forward and backward. ``auto``: bfloat16 on a GPU, float32 elsewhere. The optimizer always works on
    float32 master weights and float32 gradients."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute each layer in the backward pass instead of keeping its activations: less memory, about a third more time.
    ``auto``: where the plan's peak while updating would not fit without; a run decides it once, when it begins."""
    attention: Literal["auto", "varlen", "flash_attn", "sdpa"] = "auto"
    """Kernel of packed attention. ``varlen``: torch's own, for a GPU in bfloat16. ``flash_attn``: the package of that name.
    ``sdpa``: one call for each run of equal lengths, anywhere. ``auto``: varlen where it can be used, for compiled layers
    keep it in their graph; sdpa elsewhere."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each layer with ``torch.compile`` for training passes. ``auto``: on a GPU."""
    logits_chunk_bytes: Count | None = None
    """Bound on the bytes of logits and of their gradient alive at once; log-probs and entropy are computed in chunks of this
    size. Default: 64 MiB on the processor, 256 MiB on a GPU."""
    lora: LoraSettings | None = None
    """Train adapters instead of the whole model."""


class OptimizerSettings(Settings):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) on float32 master weights. Schedules advance per optimizer update."""

    lr: NotNegative = 1e-6
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; on matrices only, not on biases, norms and embeddings."""
    max_grad_norm: Positive | None = 1.0
    """Clip the gradient to this norm; none: do not clip."""
    warmup_updates: CountOrZero = 0
    """Updates over which the rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over the updates of the whole run."""
    min_lr_ratio: Share = 0.0
    """Share of the peak rate that linear and cosine schedules end at."""
