"""The operations of a decode step on a GPU.

Owns: grids, block sizes, workspaces. Refuses to know: what the kernels compute (``paged_kernels``, ``sampling_kernels``).
Always holds: launches depend on shapes alone, so they can be captured in a graph.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import linear
from triton import cdiv, next_power_of_2

from meshloom.rollout import paged_kernels, sampling_kernels
from meshloom.rollout.paged_ops import NO_NORMS, HeadNorms, HeadShape, NormKind, Pool, Rope, Slots, TermNorms
from meshloom.rollout.products import Choices, Kind, choices_for, gated_product, product_in_pieces

_LOG2E = math.log2(math.e)
_CHUNK = 4096
_MOST_SPLITS = 32
_FILLS, _STAGES = 3, 3
"""Of attention: programs for each processor of the device that are wanted, and pages on their way at once."""


class TritonOps:
    """See ``paged_ops.Ops``.

    Args:
        device: where the tensors are.
        choices: which products are done by kernels of our own; default: those that were measured to be faster there.
    """

    def __init__(self, device: torch.device, choices: Choices | None = None) -> None:
        self._choices = choices_for(device) if choices is None else choices
        found = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self._processors = 1 if found is None else found.multi_processor_count
        self._shared_bytes = None if found is None else found.shared_memory_per_block_optin

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, kind: NormKind) -> Tensor:
        return self._norm(x_TE, (), weight_E, kind, NO_NORMS, keep=False)[0]

    def norm_of_sum(
        self, residual_TE: Tensor, x_TE: Tensor, weight_E: Tensor, kind: NormKind, terms: TermNorms = NO_NORMS
    ) -> tuple[Tensor, Tensor]:
        return self._norm(residual_TE, (x_TE,), weight_E, kind, TermNorms(terms.x, None), keep=False)

    def norm_of_kept_sum(
        self,
        residual_TE: Tensor,
        x_TE: Tensor,
        y_TE: Tensor,
        weight_E: Tensor,
        kind: NormKind,
        terms: TermNorms = NO_NORMS,
    ) -> Tensor:
        return self._norm(residual_TE, (x_TE, y_TE), weight_E, kind, terms, keep=True)[0]

    def _norm(
        self,
        residual_TE: Tensor,
        terms: tuple[Tensor, ...],
        weight_E: Tensor,
        kind: NormKind,
        norms: TermNorms,
        *,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        """The norm, and the first term as it counts."""
        out = torch.empty_like(residual_TE)
        width = residual_TE.shape[-1]
        x, y = (*terms, residual_TE, residual_TE)[:2]
        rounded = torch.empty_like(residual_TE) if x.ndim == 3 else x
        x_norm, y_norm = (weight_E if norm is None else norm for norm in norms)
        paged_kernels.sum_rms_norm_kernel[(len(out),)](
            x, y, residual_TE, weight_E, x_norm, y_norm, out, rounded, kind.eps, width, residual_TE.numel(),
            NUM=len(terms), X_NORM=norms.x is not None, Y_NORM=norms.y is not None, KEEP=keep, GEMMA=kind.gemma,
            BLOCK=next_power_of_2(width), X_PIECES=_pieces(x), Y_PIECES=_pieces(y),
            num_warps=4 if width <= 4096 else 8,
        )  # fmt: skip
        return out, rounded

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
        pieces, qkv = qkv, torch.empty_like(qkv[0], dtype=rope.cos.dtype) if qkv.ndim == 3 else qkv
        kind = NormKind(0.0, False) if norms is None else norms.kind
        query_norm, key_norm = (qkv, qkv) if norms is None else (norms.query, norms.key)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        paged_kernels.rope_store_kernel[(len(qkv),)](
            qkv, pieces, qkv if bias is None else bias, rope.cos, rope.sin, positions, places, pool.addresses,
            query_norm, key_norm, kind.eps, layer, qkv.numel(),
            H=shape.num_heads, K=shape.num_kv_heads, HEADS=next_power_of_2(heads), D=shape.head_dim, P=shape.page,
            NORM=norms is not None, GEMMA=kind.gemma, KEEP_KEY=keep_key, PIECES=_pieces(pieces), BIAS=bias is not None,
            num_warps=4,
        )  # fmt: skip
        return qkv

    def attend(
        self, qkv: Tensor, shape: HeadShape, slots: Slots, pool: Pool, layer: int, scale: float, window: int | None
    ) -> Tensor:
        count, heads = len(qkv), shape.num_heads
        splits = self._splits(count * shape.num_kv_heads)
        out = torch.empty(count, heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        partial, stat = out, out
        if splits > 1:
            partial = torch.empty(count, heads, splits, shape.head_dim, dtype=torch.float32, device=qkv.device)
            stat = torch.empty(count, heads, splits, 2, dtype=torch.float32, device=qkv.device)
        paged_kernels.decode_attention_kernel[(count, shape.num_kv_heads, splits)](
            qkv, out, partial, stat, pool.addresses, slots.table, slots.seen,
            scale * _LOG2E, layer, slots.table.stride(0), 0 if window is None else window,
            H=heads, K=shape.num_kv_heads, G=shape.group, GP=max(16, next_power_of_2(shape.group)),
            D=shape.head_dim, P=shape.page, SPLITS=splits, WINDOW=window is not None,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=4, num_stages=self._stages(shape, qkv),
        )  # fmt: skip
        if splits > 1:
            paged_kernels.combine_kernel[(count * heads,)](
                partial, stat, out, D=shape.head_dim, SPLITS=splits, num_warps=1
            )
        return out

    def _splits(self, programs: int) -> int:
        """Pieces that a sequence's pages are cut into: enough programs to fill the device a few times."""
        return min(_MOST_SPLITS, next_power_of_2(max(1, cdiv(_FILLS * self._processors, programs))))

    def _stages(self, shape: HeadShape, like: Tensor) -> int:
        """Pages on their way at once: as many as shared memory holds, and are wanted."""
        bytes_each = 2 * shape.page * shape.head_dim * like.itemsize
        return (
            _STAGES if self._shared_bytes is None else max(1, min(_STAGES, self._shared_bytes * 9 // 10 // bytes_each))
        )

    def gated(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        width = gate_up.shape[-1] // 2
        out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
        block = 1024
        paged_kernels.gated_kernel[(len(gate_up), cdiv(width, block))](
            gate_up, out, width, GELU=is_gelu, BLOCK=block, num_warps=4
        )
        return out

    def gated_product(self, x_TE: Tensor, weight: Tensor, is_gelu: bool) -> Tensor:
        tile = self._choices.tile(Kind.GATED, x_TE, weight)
        if tile is None:
            return self.gated(linear(x_TE, weight), is_gelu)
        return gated_product(x_TE, weight, tile, is_gelu=is_gelu)

    def pieces(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor | None:
        tile = self._choices.tile(Kind.PIECES, x_TK, weight_NK)
        return None if tile is None else product_in_pieces(x_TK, weight_NK, tile)

    def prepare(self, slots: Slots, count: int, page: int) -> None:
        sampling_kernels.prepare_kernel[(count,)](
            slots.state, slots.table, slots.seen, slots.places, slots.state.shape[1], slots.table.stride(0), P=page,
            num_warps=1,
        )  # fmt: skip

    def draw(self, logits_NV: Tensor, slots: Slots, *, filtered: bool) -> None:
        count, vocabulary = logits_NV.shape
        num_slots, chunks = slots.state.shape[1], cdiv(vocabulary, _CHUNK)
        highs = torch.empty(count, chunks, dtype=torch.float32, device=logits_NV.device)
        sums, threshold = torch.empty_like(highs), torch.empty_like(highs[:, 0])
        if filtered:
            sampling_kernels.threshold_kernel[(count,)](
                logits_NV, slots.state, slots.numbers, threshold, vocabulary, num_slots, BLOCK=_CHUNK, num_warps=16
            )
        sampling_kernels.chunk_kernel[(count, chunks)](
            logits_NV, slots.state, slots.numbers, threshold, highs, sums, vocabulary, num_slots,
            FILTERED=filtered, CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip
        sampling_kernels.draw_kernel[(count,)](
            logits_NV, slots.state, slots.numbers, threshold, highs, sums, slots.stops, slots.ids, slots.logprobs,
            vocabulary, chunks, num_slots, slots.ids.shape[1],
            FILTERED=filtered, CHUNK=_CHUNK, CHUNKS=next_power_of_2(chunks), STOPS=slots.stops.shape[1], num_warps=8,
        )  # fmt: skip


def _pieces(term: Tensor) -> int:
    """How many pieces a term is the sum of; 0 if it is no such sum."""
    return len(term) if term.ndim == 3 else 0
