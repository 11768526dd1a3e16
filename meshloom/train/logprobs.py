"""Log-probabilities and entropy from hidden states, in chunks.

Owns: the only place where training touches logits. Always holds: no tensor of size tokens × vocabulary is ever alive,
forward or backward; the backward pass computes each chunk's logits again.

With z = logits / temperature, p = softmax(z): log-prob = z_y − logsumexp(z), entropy H = −Σ p log p, and
∂log-prob/∂z_j = 1[j = y] − p_j, ∂H/∂z_j = −p_j (log p_j + H).

Legend: N rows, D hidden, V vocabulary, C rows of a chunk.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # the head calls this
    from meshloom.train.head import OutputHead


def logprobs_and_entropy(
    head: "OutputHead", hidden_ND: Tensor, targets_N: Tensor, *, temperature: float, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, at a temperature.

    Args:
        head: the model's output head.
        hidden_ND: last hidden states of the rows that predict.
        targets_N: token that follows each.
        temperature: divides the logits, above 0.
        chunk_bytes: bound on the bytes of logits alive at once; on a GPU, of their gradient too.

    Returns:
        Log-probabilities and entropies in nats, each [N], float32 (float64 for a float64 model). Both carry gradients
        to the hidden states and to the head's weight and bias, where those require them. On a GPU the weight's gradient goes
        to ``head.gradient_total`` instead, if that is given.
    """
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float64:
        # Imported here: its kernels need Triton, which torch for the processor does not bring.
        from meshloom.train.fused_logprobs import fused_logprobs_and_entropy

        return fused_logprobs_and_entropy(head, hidden_ND, targets_N, temperature=temperature, chunk_bytes=chunk_bytes)
    return _ChunkedLogprobs.apply(hidden_ND, head.weight, head.bias, targets_N, head, temperature, chunk_bytes)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND, weight_VD, bias_V, targets_N, head, temperature, chunk_bytes):
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        rows = max(1, chunk_bytes // (weight_VD.shape[0] * wide.itemsize))
        logprob_N = torch.empty(len(hidden_ND), dtype=wide, device=hidden_ND.device)
        lse_N, entropy_N = torch.empty_like(logprob_N), torch.empty_like(logprob_N)
        if head.part is not None:
            targets_N = head.part.own(targets_N)
        for at in range(0, len(hidden_ND), rows):
            part = slice(at, at + rows)
            z_CV = _scaled(head.logits(hidden_ND[part]), temperature)
            highest_C = z_CV.amax(-1)
            z_CV -= highest_C[:, None]
            e_CV = z_CV.exp()
            sum_C = e_CV.sum(-1)
            log_sum_C = sum_C.log()
            logprob_N[part] = _chosen(z_CV, targets_N[part], highest_C, cut=head.part is not None) - log_sum_C
            entropy_N[part] = log_sum_C - torch.einsum("cv,cv->c", e_CV, z_CV) / sum_C
            lse_N[part] = highest_C + log_sum_C
        if head.part is not None:
            logprob_N, entropy_N, lse_N = head.part.combine(logprob_N, entropy_N, lse_N)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N)
        ctx.head, ctx.temperature, ctx.rows = head, temperature, rows
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None):
        hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        wide = lse_N.dtype
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros_like(lse_N)
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and ctx.needs_input_grad[2] else None
        for at in range(0, len(hidden_ND), ctx.rows):
            part = slice(at, at + ctx.rows)
            hidden_CD = hidden_ND[part]
            logits_CV = head.logits(hidden_CD)
            slope = head.scale / temperature
            if head.softcap is not None:
                slope = slope * (1 - (logits_CV / head.softcap).square())
            logp_CV = _scaled(logits_CV, temperature).sub_(lse_N[part, None])
            grad_C = grad_logprob_N[part, None]
            if grad_entropy_N is None:
                g_CV = logp_CV.exp_().mul_(-grad_C)
            else:
                p_CV = logp_CV.exp()
                g_CV = logp_CV.add_(entropy_N[part, None]).mul_(-grad_entropy_N[part, None]).sub_(grad_C).mul_(p_CV)
            _add_at(g_CV, targets_N[part, None], grad_C, cut=head.part is not None)
            if head.softcap is not None or slope != 1.0:
                g_CV *= slope
            narrow_CV = g_CV.to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = narrow_CV @ weight_VD
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, narrow_CV.T, hidden_CD)
            if grad_bias_V is not None:
                grad_bias_V += g_CV.sum(0)
        if head.part is not None and grad_hidden_ND is not None:
            grad_hidden_ND = head.part.add_up(grad_hidden_ND)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None, None


def _chosen(z_CV: Tensor, targets_C: Tensor, highest_C: Tensor, *, cut: bool) -> Tensor:
    """The targets' z less each row's highest; of a cut vocabulary, z is 0 for a target that is not here."""
    if not cut:
        return z_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    found_C = z_CV.gather(-1, targets_C.clamp(min=0)[:, None]).squeeze(-1)
    return torch.where(targets_C >= 0, found_C, -highest_C)


def _add_at(g_CV: Tensor, targets_C1: Tensor, grad_C1: Tensor, *, cut: bool) -> None:
    if cut:
        targets_C1, grad_C1 = targets_C1.clamp(min=0), torch.where(targets_C1 >= 0, grad_C1, 0)
    g_CV.scatter_add_(-1, targets_C1, grad_C1)


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in place: they are a fresh tensor, and each pass over them costs."""
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a total that may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
