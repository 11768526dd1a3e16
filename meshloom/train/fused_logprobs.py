"""Log-probabilities and entropy on a GPU: blocks of logits, two kernels, and products that add up in float32.

Owns: how the logits are cut. Always holds: what ``meshloom.train.logprobs`` says, and that the bytes of logits and of their
gradient alive at once stay under the bound.

Logits are cut into blocks of rows and of the vocabulary, about as many of each. A block's products then read and write little
beside what they compute: with rows alone, the gradient of the weight would be read and written once for every few hundred
rows, which takes longer than computing it.

Legend: N rows, D hidden, V vocabulary, R rows and W width of a block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshloom.train.logprob_kernels import RowState, Rule, gradient_block, reduce_block
from meshloom.train.products import add_product, put_product

if TYPE_CHECKING:
    from meshloom.train.head import OutputHead

_TILE = 128
"""Sizes of blocks are multiples of this, what a matrix unit's tile is made for."""


@dataclass(frozen=True)
class Blocks:
    """A cut of [N, V] into blocks of at most ``rows`` × ``width``."""

    num_rows: int
    vocabulary: int
    rows: int
    width: int

    @classmethod
    def of(cls, num_rows: int, vocabulary: int, most_logits: int) -> "Blocks":
        """The cut whose blocks have at most so many logits, at least 1."""
        most = max(1, most_logits)
        rows = _even(num_rows, max(math.isqrt(most), most // vocabulary))
        return cls(num_rows, vocabulary, rows, _even(vocabulary, max(1, most // rows)))

    def of_rows(self) -> Iterator[slice]:
        return (slice(at, min(at + self.rows, self.num_rows)) for at in range(0, self.num_rows, self.rows))

    def of_vocabulary(self) -> Iterator[slice]:
        return (slice(at, min(at + self.width, self.vocabulary)) for at in range(0, self.vocabulary, self.width))


def _even(total: int, most: int) -> int:
    """The size, at most ``most``, of pieces that are about equal."""
    if total <= most:
        return max(1, total)
    tile = _TILE if most >= _TILE else 1
    parts = -(-total // (most // tile * tile))
    return -(-total // (parts * tile)) * tile


def fused_logprobs_and_entropy(
    head: "OutputHead", hidden_ND: Tensor, targets_N: Tensor, *, temperature: float, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    """See ``meshloom.train.logprobs.logprobs_and_entropy``; for models up to float32."""
    return _FusedLogprobs.apply(hidden_ND, head.weight, head.bias, targets_N, head, temperature, chunk_bytes)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND, weight_VD, bias_V, targets_N, head, temperature, chunk_bytes):
        rule = Rule(bias_V, float(head.scale), head.softcap and float(head.softcap), float(temperature))
        narrow = 0 if weight_VD.dtype == torch.float32 else weight_VD.itemsize
        blocks = Blocks.of(len(hidden_ND), len(weight_VD), chunk_bytes // (4 + narrow))
        logits = hidden_ND.new_empty((blocks.rows, blocks.width), dtype=torch.float32)
        state = RowState(len(hidden_ND), hidden_ND.device)
        if head.part is not None:
            targets_N = head.part.own(targets_N)
        for rows in blocks.of_rows():
            hidden_RD, targets_R = hidden_ND[rows], targets_N[rows]
            for part in blocks.of_vocabulary():
                logits_RW = logits[: len(hidden_RD), : part.stop - part.start]
                put_product(logits_RW, hidden_RD, weight_VD[part].T)
                reduce_block(logits_RW, targets_R, state, rows.start, part.start, rule)
        logprob_N, entropy_N, lse_N = state.result()
        if head.part is not None:
            logprob_N, entropy_N, lse_N = head.part.combine(logprob_N, entropy_N, lse_N)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N)
        ctx.head, ctx.rule, ctx.blocks = head, rule, blocks
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None):
        hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros_like(lse_N)
        totals = _Totals(ctx, hidden_ND, weight_VD, bias_V)
        logits = hidden_ND.new_empty((blocks.rows, blocks.width), dtype=torch.float32)
        gradient = logits if weight_VD.dtype == torch.float32 else torch.empty_like(logits, dtype=weight_VD.dtype)
        for rows in blocks.of_rows():
            hidden_RD = hidden_ND[rows]
            targets_R, lse_R, entropy_R, grad_R = (
                x[rows].contiguous() for x in (targets_N, lse_N, entropy_N, grad_logprob_N)
            )
            grad_entropy_R = None if grad_entropy_N is None else grad_entropy_N[rows].contiguous()
            for part in blocks.of_vocabulary():
                at = (slice(len(hidden_RD)), slice(part.stop - part.start))
                put_product(logits[at], hidden_RD, weight_VD[part].T)
                gradient_block(
                    logits[at],
                    gradient[at],
                    targets_R,
                    lse_R,
                    entropy_R,
                    grad_R,
                    grad_entropy_R,
                    part.start,
                    ctx.rule,
                )
                totals.add(gradient[at], hidden_RD, part)
            totals.end_rows(rows)
        del logits, gradient  # before the totals are cast, which needs as much again
        grad_hidden_ND, *others = totals.gradients()
        if ctx.head.part is not None and grad_hidden_ND is not None:
            grad_hidden_ND = ctx.head.part.add_up(grad_hidden_ND)
        return (grad_hidden_ND, *others, None, None, None, None)


class _Totals:
    """The gradients that a backward pass adds up, float32 until they are complete."""

    def __init__(self, ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        self._weight_VD = weight_VD
        self._hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        self._hidden_RD = hidden_ND.new_zeros((ctx.blocks.rows, hidden_ND.shape[1]), dtype=torch.float32)
        elsewhere = ctx.head.gradient_total if wants_weight else None
        self._returns_weight = wants_weight and elsewhere is None
        self._total_VD: Tensor | None = None
        if wants_weight:
            self._total_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if elsewhere is None else elsewhere()
        self._total_V: Tensor | None = None
        if bias_V is not None and wants_bias:
            self._total_V = torch.zeros_like(bias_V, dtype=torch.float32)
        self._bias_dtype = None if bias_V is None else bias_V.dtype

    def add(self, gradient_RW: Tensor, hidden_RD: Tensor, part: slice) -> None:
        """Take in the gradient of a block's logits."""
        if self._hidden_ND is not None:
            add_product(self._hidden_RD[: len(hidden_RD)], gradient_RW, self._weight_VD[part])
        if self._total_VD is not None:
            add_product(self._total_VD[part], gradient_RW.T, hidden_RD)
        if self._total_V is not None:
            self._total_V[part] += gradient_RW.sum(0, dtype=torch.float32)

    def end_rows(self, rows: slice) -> None:
        """All of the vocabulary has been taken in for these rows."""
        if self._hidden_ND is not None:
            self._hidden_ND[rows] = self._hidden_RD[: rows.stop - rows.start]
            self._hidden_RD.zero_()

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of the hidden states, of the weight (none where it is added up elsewhere) and of the bias."""
        returned = self._total_VD if self._returns_weight else None
        weight = None if returned is None else returned.to(self._weight_VD.dtype)
        bias = None if self._total_V is None else self._total_V.to(self._bias_dtype)
        return self._hidden_ND, weight, bias
