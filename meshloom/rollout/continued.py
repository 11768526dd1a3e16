"""Attention of sequences some of whose tokens are in a cache already: the last tokens of each over all of them.

Owns: that attention. Refuses to know: where keys and values are kept. Always holds: a token's output is what it is when the
whole sequence is computed, up to the order of sums.

Legend: C computed tokens, A tokens that attention sees, H query heads, K key-value heads, D width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshloom.train.attention import kernel_for
from meshloom.train.attention_kernels import Bounds


class ContinuedAttention:
    """Causal attention over sequences that stand end to end.

    Args:
        lengths: tokens of each.
        starts: the first of each that is computed.
    """

    def __init__(self, lengths: Sequence[int], starts: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._counts = [length - start for length, start in zip(lengths, starts, strict=True)]
        self._queries, self._keys = Bounds(self._counts), Bounds(self._lengths)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(
        self, query_CHD: Tensor, key_AKD: Tensor, value_AKD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Output of the computed tokens, [C, H, D]. ``window``: a token sees itself and window − 1 before it."""
        if (kernel := kernel_for("auto", query_CHD)) is not None:
            return kernel(query_CHD, key_AKD, value_AKD, self._queries, self._keys, None, scale=scale, window=window)
        group = query_CHD.shape[1] // key_AKD.shape[1]
        outputs = []
        queries = query_CHD.split(self._counts)
        for query, key, value in zip(
            queries, key_AKD.split(self._lengths), value_AKD.split(self._lengths), strict=True
        ):
            if query.is_cuda:
                # In float32 a GPU has a kernel that keeps no scores only for heads that are not grouped.
                key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            mask = self._mask(len(query), len(key), window, query.device)
            out = scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (query, key, value)),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=group > 1 and not query.is_cuda,
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def _mask(self, count: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
        """Which tokens the last ``count`` of ``length`` see, [count, length]; none where it is a triangle."""
        window = None if window is None or window >= length else window
        if window is None and count == length:
            return None
        if (count, length, window) not in self._masks:
            place = torch.arange(length, device=device)
            distance = place[length - count :, None] - place[None, :]
            seen = distance >= 0
            self._masks[count, length, window] = seen if window is None else seen & (distance < window)
        return self._masks[count, length, window]
