"""The operations of a decode step, in Triton on a GPU and in plain torch elsewhere, behind one interface.

Owns: launching kernels, and what each computes in plain torch. Refuses to know: models, scheduling. Always holds: both
compute the same, up to the order of sums; nothing waits for the device.

Legend: N rows, T tokens, H query heads, K key-value heads, G queries per key-value head, P tokens of a page, D width of a
head, V vocabulary, L layers, F width of the feed-forward layer, B slots.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from meshloom.rollout.protocol import SamplingParams
from meshloom.rollout.sampling import Rows, filter_logits, uniform
from meshloom.rollout.slot_state import Field, Finish, Number


@dataclass(frozen=True)
class HeadShape:
    """Shape of attention: heads, and the tokens of a page."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class NormKind:
    """A root-mean-square norm: its epsilon; Gemma's multiplies by 1 + weight, before rounding."""

    eps: float
    gemma: bool


class TermNorms(NamedTuple):
    """Weights [E] of the norms that what is added to the residual goes through before, each none where there is no norm."""

    x: Tensor | None
    y: Tensor | None


NO_NORMS = TermNorms(None, None)


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of all positions, each [positions, D / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each query and key head before the rotation, [D] each."""

    query: Tensor
    key: Tensor
    kind: NormKind


@dataclass(frozen=True)
class Pool:
    """Pages of keys and values: a tensor [pages, 2, K, P, D] for each layer, and their addresses, int64 [L]."""

    layers: list[Tensor]
    addresses: Tensor


@dataclass(frozen=True)
class Slots:
    """The running sequences on the device.

    Args:
        state: int64 [fields, B], see ``slot_state.Field``.
        numbers: float32 [fields, B], see ``slot_state.Number``.
        table: pages of each sequence, int32 [B, most pages].
        seen: tokens that attention sees, int64 [B].
        places: page × P + place of the newest token, or −1, int64 [B].
        stops: tokens that end a sample, padded with −1, int64 [rules, stops].
        ids: output, int32 [rows, longest response].
        logprobs: output, float32 [rows, longest response].
    """

    state: Tensor
    numbers: Tensor
    table: Tensor
    seen: Tensor
    places: Tensor
    stops: Tensor
    ids: Tensor
    logprobs: Tensor


class Ops(Protocol):
    """What a decode step is made of."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, kind: NormKind) -> Tensor: ...

    def norm_of_sum(
        self, residual_TE: Tensor, x_TE: Tensor, weight_E: Tensor, kind: NormKind, terms: TermNorms = NO_NORMS
    ) -> tuple[Tensor, Tensor]:
        """Norm of ``residual + x``, which is neither rounded nor kept; and ``x``, which may come in ``pieces``.

        With a norm of its own, that norm of ``x`` is what is added, not rounded before; ``x`` comes back without it.
        """
        ...

    def norm_of_kept_sum(
        self,
        residual_TE: Tensor,
        x_TE: Tensor,
        y_TE: Tensor,
        weight_E: Tensor,
        kind: NormKind,
        terms: TermNorms = NO_NORMS,
    ) -> Tensor:
        """``residual += x + y`` in place, rounded once; returns its norm. ``y`` may come in ``pieces``; ``terms`` as before."""
        ...

    def rope_store(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rope: Rope,
        positions: Tensor,
        places: Tensor,
        pool: Pool,
        layer: int,
        norms: HeadNorms | None,
        keep_key: bool,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate queries (and keys, with ``keep_key``) of ``qkv`` [T, (H + 2K) × D] in place; keep keys and values.

        Where ``qkv`` comes in ``pieces``, to which ``bias`` is added, the result is a new tensor with the queries alone.
        """
        ...

    def attend(
        self, qkv: Tensor, shape: HeadShape, slots: Slots, pool: Pool, layer: int, scale: float, window: int | None
    ) -> Tensor:
        """Attention of the newest token of each row over its pages, [N, H × D]."""
        ...

    def gated(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        """act(gate) × up of [T, 2F], gates first."""
        ...

    def gated_product(self, x_TE: Tensor, weight: Tensor, is_gelu: bool) -> Tensor:
        """act(x gateᵀ) × (x upᵀ) of a weight [2F, E], gates first."""
        ...

    def pieces(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor | None:
        """Pieces [S, T, N] in float32 whose sum, once rounded, is x weightᵀ; none where such a product is better done whole."""
        ...

    def prepare(self, slots: Slots, count: int, page: int) -> None:
        """Fill ``seen`` and ``places`` of the first ``count`` slots."""
        ...

    def draw(self, logits_NV: Tensor, slots: Slots, *, filtered: bool) -> None:
        """Draw a token for each running row, write it out and advance the row. ``filtered``: top-k, top-p or min-p is asked."""
        ...


class TorchOps:
    """The operations in plain torch, on the processor: they say what the kernels compute, and where they round."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, kind: NormKind) -> Tensor:
        return _normed(_wide(x_TE), weight_E, kind).to(x_TE.dtype)

    def norm_of_sum(
        self, residual_TE: Tensor, x_TE: Tensor, weight_E: Tensor, kind: NormKind, terms: TermNorms = NO_NORMS
    ) -> tuple[Tensor, Tensor]:
        x_TE = _whole(x_TE, residual_TE.dtype)
        total = _wide(residual_TE) + _term(x_TE, terms.x, kind)
        return _normed(total, weight_E, kind).to(residual_TE.dtype), x_TE

    def norm_of_kept_sum(
        self,
        residual_TE: Tensor,
        x_TE: Tensor,
        y_TE: Tensor,
        weight_E: Tensor,
        kind: NormKind,
        terms: TermNorms = NO_NORMS,
    ) -> Tensor:
        y_TE = _whole(y_TE, residual_TE.dtype)
        residual_TE.copy_(_wide(residual_TE) + _term(x_TE, terms.x, kind) + _term(y_TE, terms.y, kind))
        return self.rms_norm(residual_TE, weight_E, kind)

    def rope_store(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rope: Rope,
        positions: Tensor,
        places: Tensor,
        pool: Pool,
        layer: int,
        norms: HeadNorms | None,
        keep_key: bool,
        bias: Tensor | None = None,
    ) -> Tensor:
        qkv = _whole(qkv if bias is None else qkv.sum(0, keepdim=True) + bias, rope.cos.dtype)
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        query, key, value = heads.split(sizes, 1)
        wide_query, wide_key = _wide(query), _wide(key)
        if norms is not None:
            wide_query = _normed(wide_query, norms.query, norms.kind)
            wide_key = _normed(wide_key, norms.key, norms.kind)
        rotated_key = _rotate(wide_key, rope, positions).to(qkv.dtype)
        query.copy_(_rotate(wide_query, rope, positions))
        if keep_key:
            key.copy_(rotated_key)
        kept = places >= 0
        page, place = places[kept] // shape.page, places[kept] % shape.page
        pool.layers[layer][page, 0, :, place] = rotated_key[kept]
        pool.layers[layer][page, 1, :, place] = value[kept]
        return qkv

    def attend(
        self, qkv: Tensor, shape: HeadShape, slots: Slots, pool: Pool, layer: int, scale: float, window: int | None
    ) -> Tensor:
        count = len(qkv)
        query = qkv.unflatten(-1, (-1, shape.head_dim))[:, : shape.num_heads]
        pages = max(1, -(-int(slots.seen[:count].max()) // shape.page))  # there is one, also where no row is in use
        cells = pool.layers[layer][slots.table[:count, :pages].long()]
        keys, values = cells.transpose(1, 2).transpose(2, 3).flatten(3, 4).unbind(1)
        place, seen = torch.arange(pages * shape.page, device=qkv.device), slots.seen[:count, None]
        visible = place < seen
        if window is not None:
            visible &= place >= seen - window
        grouped = query.unflatten(1, (shape.num_kv_heads, shape.group))
        score = torch.einsum("nkgd,nktd->nkgt", _wide(grouped), _wide(keys)) * scale
        score = score.masked_fill(~visible[:, None, None], -torch.inf)
        weight = (score - torch.nan_to_num(score.amax(-1, keepdim=True), neginf=0.0)).exp()
        values = _wide(values.masked_fill(~visible[:, None, :, None], 0.0))
        # Weights are rounded before they are divided by their sum, as a matrix unit takes them.
        summed = torch.einsum("nkgt,nktd->nkgd", _wide(weight.to(qkv.dtype)), values)
        return (summed / weight.sum(-1, keepdim=True).clamp(min=1.0)).flatten(1).to(qkv.dtype)

    def gated(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        gate, up = _wide(gate_up).chunk(2, -1)
        return ((gelu(gate, approximate="tanh") if is_gelu else silu(gate)) * up).to(gate_up.dtype)

    def gated_product(self, x_TE: Tensor, weight: Tensor, is_gelu: bool) -> Tensor:
        return self.gated(linear(x_TE, weight), is_gelu)

    def pieces(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor | None:
        return None

    def prepare(self, slots: Slots, count: int, page: int) -> None:
        state = slots.state[:, :count]
        running, length = state[Field.FINISH] == Finish.RUNNING, state[Field.LENGTH]
        pages = slots.table[:count].gather(1, torch.where(running, length // page, 0)[:, None])[:, 0]
        slots.seen[:count] = torch.where(running, length + 1, 0)
        slots.places[:count] = torch.where(running, pages * page + length % page, -1)

    def draw(self, logits_NV: Tensor, slots: Slots, *, filtered: bool) -> None:
        rows = (slots.state[Field.FINISH, : len(logits_NV)] == Finish.RUNNING).nonzero().squeeze(-1)
        state, numbers = slots.state[:, rows], slots.numbers[:, rows]
        logits = logits_NV[rows]
        greedy = numbers[Number.TEMPERATURE] == 0
        z = logits / torch.where(greedy, 1.0, numbers[Number.TEMPERATURE])[:, None].to(logits.dtype)
        if filtered:
            for place in (~greedy).nonzero().squeeze(-1).tolist():
                one = numbers[:, place].tolist()
                params = SamplingParams(
                    max_tokens=1,
                    top_k=int(state[Field.TOP_K, place]),
                    top_p=one[Number.TOP_P],
                    min_p=one[Number.MIN_P],
                )
                filter_logits(z[place : place + 1], Rows.of([params], [0], z.device))
        logprob = z.double().log_softmax(-1)
        until = logprob.exp().cumsum(-1)
        chance = torch.from_numpy(uniform(state[Field.KEY].numpy().view(np.uint64), state[Field.COUNT].numpy()))
        drawn = (until <= (chance * until[:, -1])[:, None]).sum(-1).clamp(max=z.shape[1] - 1)
        token = torch.where(greedy, z.argmax(-1), drawn)
        own = logprob.gather(1, token[:, None])[:, 0]
        out = state[Field.ROW], state[Field.COUNT]
        slots.ids[out] = token.int()
        slots.logprobs[out] = torch.where(greedy, own * 0, own).float()
        stopped = (slots.stops[state[Field.RULE]] == token[:, None]).any(1)
        at_limit = state[Field.COUNT] + 1 >= state[Field.LIMIT]
        finish = torch.where(at_limit, Finish.LENGTH, Finish.RUNNING)
        slots.state[Field.TOKEN, rows] = token
        slots.state[Field.LENGTH, rows] += 1
        slots.state[Field.COUNT, rows] += 1
        slots.state[Field.FINISH, rows] = torch.where(stopped, Finish.STOP, finish)


def _whole(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor [T, N] itself, or the rounded sum of pieces [S, T, N]."""
    return x.sum(0).to(dtype) if x.ndim == 3 else x


def _wide(x: Tensor) -> Tensor:
    """In float32, or float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def _normed(wide: Tensor, weight_E: Tensor, kind: NormKind) -> Tensor:
    """The norm, not rounded."""
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + kind.eps) * (_wide(weight_E) + kind.gemma)


def _term(x_TE: Tensor, norm_E: Tensor | None, kind: NormKind) -> Tensor:
    return _wide(x_TE) if norm_E is None else _normed(_wide(x_TE), norm_E, kind)


def _rotate(x_THD: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Of values in float32 or float64; not rounded."""
    cos, sin = _wide(rope.cos[positions][:, None]), _wide(rope.sin[positions][:, None])
    low, high = x_THD.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
