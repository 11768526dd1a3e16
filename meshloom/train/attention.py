"""Attention of a transformers model over our own layouts: packed samples in training, a key-value cache in generation.

Owns: the attention function that a model's layers call, and packed causal attention. Refuses to know: how a model
computes queries, keys and values. Always holds: attention never crosses samples; a layer that is called without a layout
is an error, so a model family that does not hand its keyword arguments down is refused instead of trained wrongly.

Legend: H query heads, K key-value heads, T tokens end to end, D width of a head.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

NAME = "meshloom"


class AttentionLayout(Protocol):
    """Where a layer's keys and values are and which queries may see them."""

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention output of the tokens at hand, [T, H, D]. ``window``: a token sees itself and window − 1 before it."""
        ...


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
    """The function transformers calls in each layer: query [1, H, T, D], key and value [1, K, T, D]."""
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
    """Causal attention over samples that stand end to end.

    Neighbours of equal length are computed in one call, each longer run in its own; no score is computed between samples.

    Args:
        lengths: tokens of each sample, in their order.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.runs: list[tuple[int, int]] = []
        for length in lengths:
            count = self.runs.pop()[1] if self.runs and self.runs[-1][0] == length else 0
            self.runs.append((length, count + 1))
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        sizes = [length * count for length, count in self.runs]
        grouped = query_HTD.shape[0] != key_KTD.shape[0]
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
