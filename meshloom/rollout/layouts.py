"""How a pass of the engine attends: one new token per running sequence, whole new prompts, or both end to end.

Owns: writing keys and values into the cache and reading them back. Refuses to know: sampling, scheduling. Always holds:
what depends on lengths alone (write index, masks, slices) is made once a pass, not once a layer.

Legend: H query heads, K key-value heads, G queries per key-value head, T tokens of the pass, N running sequences of a
bank, L tokens visible, C capacity, D width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshloom.config.errors import UserError
from meshloom.rollout.continued import ContinuedAttention
from meshloom.rollout.kv_cache import Bank, Span
from meshloom.train.attention import PackedAttention


class BankDecode:
    """One new token for each of the first ``count`` sequences of a bank."""

    def __init__(self, bank: Bank, count: int) -> None:
        self.count, self._bank = count, bank
        shape = bank.shape
        self._lengths = bank.lengths[:count]
        self._shortest, self._longest = int(self._lengths.min()), int(self._lengths.max())
        self._lengths_N = torch.from_numpy(self._lengths.copy()).to(shape.device)
        row = torch.arange(count * shape.num_kv_heads, device=shape.device).view(count, shape.num_kv_heads)
        self._write_at = (row * bank.capacity + self._lengths_N[:, None]).flatten()
        self._views: dict[int | None, tuple[slice, Tensor | None]] = {}

    def attend(
        self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        shape = self._bank.shape
        keys, values = self._bank.keys(layer), self._bank.values(layer)
        keys.view(-1, shape.head_dim).index_copy_(0, self._write_at, key_NKD.reshape(-1, shape.head_dim))
        values.view(-1, shape.head_dim).index_copy_(0, self._write_at, value_NKD.reshape(-1, shape.head_dim))
        if window not in self._views:
            self._views[window] = self._view(window)
        visible, mask = self._views[window]
        query_NKGD = query_NHD.unflatten(1, (shape.num_kv_heads, -1))
        keys, values = keys[: self.count, :, visible], values[: self.count, :, visible]
        return scaled_dot_product_attention(query_NKGD, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)

    def _view(self, window: int | None) -> tuple[slice, Tensor | None]:
        """Tokens that any sequence sees, and an additive mask [N, 1, 1, L] where not all see the same."""
        stop = self._longest + 1
        start = 0 if window is None else max(0, self._shortest + 1 - window)
        if self._shortest == self._longest:
            return slice(start, stop), None
        place = torch.arange(start, stop, device=self._bank.shape.device)
        own = self._lengths_N[:, None]
        seen = place <= own
        if window is not None:
            seen &= place > own - window
        mask = torch.zeros(seen.shape, dtype=self._bank.shape.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return slice(start, stop), mask[:, None, None, :]


class DecodeLayout:
    """One new token for each running sequence, bank after bank."""

    def __init__(self, parts: Sequence[BankDecode]) -> None:
        self._parts = parts
        self._counts = [part.count for part in parts]

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        rows = [x.transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD)]
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, *rows, scale, window)
        pieces = zip(self._parts, *(x.split(self._counts) for x in rows), strict=True)
        return torch.cat([part.attend(layer, *qkv, scale, window) for part, *qkv in pieces])


class PrefillLayout:
    """Prompts end to end, of each what is not in its slots yet; keys and values are written to all slots that share it.

    Args:
        lengths: tokens of each prompt.
        starts: the first of each that is computed.
        targets: for each prompt, where it is written.
    """

    def __init__(self, lengths: list[int], starts: list[int], targets: Sequence[Sequence[Span]]) -> None:
        self._bounds, self._targets = list(zip(starts, lengths, strict=True)), targets
        self._counts = [length - start for start, length in self._bounds]
        self._attention = ContinuedAttention(lengths, starts) if any(starts) else PackedAttention(lengths)
        self._written: set[int] = set()
        """Layers that have attended in this pass."""

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        self._require_once(layer)
        new = zip(key_KTD.split(self._counts, 1), value_KTD.split(self._counts, 1), strict=True)
        for (start, stop), spans, (key, value) in zip(self._bounds, self._targets, new, strict=True):
            for span in spans:
                span.bank.keys(layer)[span.start : span.stop, :, start:stop] = key
                span.bank.values(layer)[span.start : span.stop, :, start:stop] = value
        if isinstance(self._attention, PackedAttention):
            return self._attention.attend(layer, query_HTD, key_KTD, value_KTD, scale=scale, window=window)
        keys, values = [], []
        for (_, stop), (span, *_) in zip(self._bounds, self._targets, strict=True):
            keys.append(span.bank.keys(layer)[span.start, :, :stop].transpose(0, 1))
            values.append(span.bank.values(layer)[span.start, :, :stop].transpose(0, 1))
        query_CHD = query_HTD.transpose(0, 1)
        return self._attention.attend(query_CHD, torch.cat(keys), torch.cat(values), scale=scale, window=window)

    def _require_once(self, layer: int) -> None:
        if layer in self._written:
            raise UserError(
                f"layer {layer} of the model attends more than once in a pass, and its cache has one place for each layer",
                where="model.path",
                why="later tokens would be computed with the keys and values of another time",
                fix="take a model of another family, such as Llama, Qwen2, Qwen3 or Gemma 3",
            )
        self._written.add(layer)


class MixedLayout:
    """Running sequences first, then new prompts, in one pass of the model."""

    def __init__(self, decode: DecodeLayout, prefill: PrefillLayout, num_decode: int) -> None:
        self._decode, self._prefill, self._num_decode = decode, prefill, num_decode

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        sizes = [self._num_decode, query_HTD.shape[1] - self._num_decode]
        old, new = zip(*(x.split(sizes, 1) for x in (query_HTD, key_KTD, value_KTD)), strict=True)
        out = [
            self._decode.attend(layer, *old, scale=scale, window=window),
            self._prefill.attend(layer, *new, scale=scale, window=window),
        ]
        return torch.cat(out)
