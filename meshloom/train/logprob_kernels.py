"""Triton kernels between logits and log-probabilities. Imported where a GPU computes, or under Triton's interpreter.

Owns: one pass over a block of logits (some rows, some of the vocabulary) in each direction. Refuses to know: where logits
come from. Always holds: each logit is read once and nothing of a block's size is written but the gradient; what a family does
to its logits (bias, scale, soft cap) and the temperature are applied in registers, in float32.

With z = logits / temperature: a row's state over the blocks seen so far is m = max z, s = Σ e^(z − m), t = Σ e^(z − m)(z − m)
and the target's z. Then logsumexp = m + log s, and the entropy is log s − t / s.

Legend: R rows of a block, V vocabulary, W width of a block in it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_REDUCE_BLOCK, _REDUCE_WARPS = 4096, 8
_GRADIENT_BLOCK, _GRADIENT_WARPS = 2048, 4
_LOWEST = -1e30


@dataclass(frozen=True)
class Rule:
    """How a logit becomes z: z = softcap · tanh((logit + bias) · scale / softcap) / temperature.

    Args:
        bias_V: added to the logits, [V]; none: 0.
        scale: of the family.
        softcap: bound of the family; none: no bound.
        temperature: above 0.
    """

    bias_V: Tensor | None
    scale: float
    softcap: float | None
    temperature: float


class RowState:
    """What is known of so many rows: float32 [rows] each, see the module's head."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.highest = torch.full((rows,), _LOWEST, device=device)
        # Each a tensor of its own: all begin at an aligned address, for which the kernels are compiled once.
        self.total, self.weighted, self.chosen = (torch.zeros(rows, device=device) for _ in range(3))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the target, entropy, logsumexp."""
        log_total = self.total.log()
        lse = self.highest + log_total
        return self.chosen - lse, log_total - self.weighted / self.total, lse


def reduce_block(logits_RW: Tensor, targets_R: Tensor, state: RowState, first_row: int, start: int, rule: Rule) -> None:
    """Take a block of logits into the state of its rows.

    Args:
        logits_RW: float32, rows apart by their stride, of tokens ``start`` to ``start + W``.
        targets_R: token that follows each row, of the whole vocabulary, int64.
        state: of all rows.
        first_row: place of the block's first row in the state.
        start: first token of the block.
        rule: of the logits.
    """
    rows, width = logits_RW.shape
    block = min(_REDUCE_BLOCK, triton.next_power_of_2(width))
    part = slice(first_row, first_row + rows)
    _reduce[rows,](
        logits_RW,
        targets_R,
        state.highest[part],
        state.total[part],
        state.weighted[part],
        state.chosen[part],
        logits_RW if rule.bias_V is None else rule.bias_V,
        logits_RW.stride(0),
        width,
        start,
        rule.scale,
        rule.softcap or 1.0,
        rule.temperature,
        HAS_BIAS=rule.bias_V is not None,
        HAS_CAP=rule.softcap is not None,
        BLOCK=block,
        num_warps=_REDUCE_WARPS if block == _REDUCE_BLOCK else 4,
    )


def gradient_block(
    logits_RW: Tensor,
    gradient_RW: Tensor,
    targets_R: Tensor,
    lse_R: Tensor,
    entropy_R: Tensor,
    grad_logprob_R: Tensor,
    grad_entropy_R: Tensor | None,
    start: int,
    rule: Rule,
) -> None:
    """Gradient of a block of logits.

    Args:
        logits_RW: float32, as for ``reduce_block``.
        gradient_RW: where the gradient is written, in its dtype; may be ``logits_RW`` itself.
        targets_R: token that follows each row, int64.
        lse_R: logsumexp of each row.
        entropy_R: entropy of each row.
        grad_logprob_R: gradient of each log-probability.
        grad_entropy_R: gradient of each entropy; none: 0.
        start: first token of the block.
        rule: of the logits.
    """
    rows, width = logits_RW.shape
    block = min(_GRADIENT_BLOCK, triton.next_power_of_2(width))
    _gradient[rows, triton.cdiv(width, block)](
        logits_RW,
        gradient_RW,
        targets_R,
        lse_R,
        entropy_R,
        grad_logprob_R,
        lse_R if grad_entropy_R is None else grad_entropy_R,
        logits_RW if rule.bias_V is None else rule.bias_V,
        logits_RW.stride(0),
        gradient_RW.stride(0),
        width,
        start,
        rule.scale,
        rule.softcap or 1.0,
        rule.temperature,
        HAS_BIAS=rule.bias_V is not None,
        HAS_CAP=rule.softcap is not None,
        HAS_ENTROPY=grad_entropy_R is not None,
        BLOCK=block,
        num_warps=_GRADIENT_WARPS,
    )


@triton.jit
def _capped(x, bias, column, inside, start, scale, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    if HAS_BIAS:
        x += tl.load(bias + start + column, mask=inside, other=0.0).to(tl.float32)
    x *= scale
    if HAS_CAP:
        # tanh(a) = 2σ(2a) − 1.
        x = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
    return x


@triton.jit
def _reduce(
    logits, targets, highest, total, weighted, chosen, bias, stride, width, start, scale, cap, temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row) - start
    m, s, t = tl.load(highest + row), tl.load(total + row), tl.load(weighted + row)
    for at in range(0, width, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(logits + row * stride + column, mask=inside, other=0.0)
        z = _capped(x, bias, column, inside, start, scale, cap, HAS_BIAS, HAS_CAP) / temperature
        z = tl.where(inside, z, float("-inf"))
        new = tl.maximum(m, tl.max(z, 0))
        shifted = tl.where(inside, z - new, 0.0)
        e = tl.where(inside, tl.exp(shifted), 0.0)
        down = tl.exp(m - new)
        t = down * (t + (m - new) * s) + tl.sum(e * shifted, 0)
        s = down * s + tl.sum(e, 0)
        m = new
        if (target >= at) & (target < at + BLOCK) & (target < width):
            tl.store(chosen + row, tl.sum(tl.where(column == target, z, 0.0), 0))
    tl.store(highest + row, m)
    tl.store(total + row, s)
    tl.store(weighted + row, t)


@triton.jit
def _gradient(
    logits, gradient, targets, lses, entropies, grad_logprobs, grad_entropies, bias,
    stride, gradient_stride, width, start, scale, cap, temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    target = tl.load(targets + row) - start
    grad = tl.load(grad_logprobs + row)
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0)
    capped = _capped(x, bias, column, inside, start, scale, cap, HAS_BIAS, HAS_CAP)
    logp = capped / temperature - tl.load(lses + row)
    slope = scale / temperature
    weight = grad
    if HAS_ENTROPY:
        weight = grad + tl.load(grad_entropies + row) * (logp + tl.load(entropies + row))
    g = tl.where(column == target, grad, 0.0) - tl.exp(logp) * weight
    if HAS_CAP:
        g *= 1.0 - (capped / cap) * (capped / cap)
    g *= slope
    tl.store(gradient + row * gradient_stride + column, g.to(gradient.dtype.element_ty), mask=inside)
