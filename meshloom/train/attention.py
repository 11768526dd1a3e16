"""Attention of a transformers model over our own layouts: packed samples in training, a key-value cache in generation.

Owns: the attention function that a model's layers call, and packed causal attention. Refuses to know: how a model
computes queries, keys and values. Always holds: attention never crosses samples; a layer that is called without a layout
is an error, so a model family that does not hand its keyword arguments down is refused instead of trained wrongly.

Legend: H query heads, K key-value heads, T tokens end to end, D width of a head.
"""

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.plan.compute import AttentionChoice, NotPossible, choose_attention
from meshloom.train.attention_kernels import Bounds, Kernel, flash_attn_kernel, varlen_kernel

NAME = "meshloom"


class AttentionLayout(Protocol):
    """Where a layer's keys and values are and which queries may see them."""

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention output of the tokens at hand, [T, H, D]. ``window``: a token sees itself and window − 1 before it."""
        ...


@torch.compiler.disable
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: AttentionLayout | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer: query [1, H, T, D], key and value [1, K, T, D].

    Never inside compiled code, which would be another one for each layer and each layout.
    """
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} did not hand the attention layout down; this model family is not supported"
        )
    if unused.get("softcap") is not None or unused.get("s_aux") is not None:
        raise RuntimeError(
            f"{type(module).__name__} caps attention scores or uses sinks; this model family is not supported"
        )
    if dropout:
        raise RuntimeError(
            "attention dropout makes sampler and trainer disagree; set attention_dropout to 0 in the model's config"
        )
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], scale=scaling, window=sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, _attention)


def use_layouts(model: PreTrainedModel) -> None:
    """Make a model's layers attend through the ``layout`` keyword of its forward."""
    model.set_attn_implementation(NAME)


class PackedAttention:
    """Causal attention over samples that stand end to end; no score is computed between samples.

    The kernel follows from the choice and from what the queries are (``meshloom.plan.compute``). ``sdpa`` computes
    neighbours of equal length in one call, each longer run in its own; the others take all samples in one.

    Args:
        lengths: tokens of each sample, in their order.
        choice: the setting ``model.attention``.
    """

    def __init__(self, lengths: list[int], choice: AttentionChoice = "auto") -> None:
        self.choice = choice
        self.bounds = Bounds(lengths)
        self.runs: list[tuple[int, int]] = []
        for length in lengths:
            count = self.runs.pop()[1] if self.runs and self.runs[-1][0] == length else 0
            self.runs.append((length, count + 1))
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        if (kernel := kernel_for(self.choice, query_HTD)) is not None:
            query_THD, key_TKD, value_TKD = (x.transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD))
            return kernel(query_THD, key_TKD, value_TKD, self.bounds, self.bounds, scale=scale, window=window)
        sizes = [length * count for length, count in self.runs]
        grouped = query_HTD.shape[0] != key_KTD.shape[0]
        if grouped and query_HTD.is_cuda:
            # In float32 a GPU has a kernel that keeps no scores only for heads that are not grouped.
            key_KTD, value_KTD = (
                x.repeat_interleave(query_HTD.shape[0] // x.shape[0], 0) for x in (key_KTD, value_KTD)
            )
            grouped = False
        outputs = []
        parts = zip(
            self.runs, query_HTD.split(sizes, 1), key_KTD.split(sizes, 1), value_KTD.split(sizes, 1), strict=True
        )
        for (length, count), q, k, v in parts:
            q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
            mask = self._window_mask(length, window, q) if window is not None and window < length else None
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _window_mask(self, length: int, window: int, like: Tensor) -> Tensor:
        if (length, window) not in self._masks:
            place = torch.arange(length, device=like.device)
            distance = place[:, None] - place[None, :]
            self._masks[length, window] = (distance >= 0) & (distance < window)
        return self._masks[length, window]


def kernel_for(choice: AttentionChoice, query: Tensor) -> Kernel | None:
    """The kernel that takes all samples in one call; none where ``scaled_dot_product_attention`` is used."""
    return _kernel(choice, query.is_cuda, query.dtype in (torch.bfloat16, torch.float16), query.shape[-1])


@cache
def _kernel(choice: AttentionChoice, gpu: bool, narrow: bool, head_dim: int) -> Kernel | None:
    flash = flash_attn_kernel() if gpu and choice in ("auto", "flash_attn") else None
    try:
        name = choose_attention(choice, gpu=gpu, narrow=narrow, head_dim=head_dim, flash_attn=flash is not None)
    except NotPossible as error:
        raise UserError(
            f"{choice} cannot compute this model's attention",
            where="model.attention",
            why=str(error),
            fix="model.attention=auto",
        ) from error
    return {"sdpa": None, "flash_attn": flash, "varlen": varlen_kernel() if name == "varlen" else None}[name]
