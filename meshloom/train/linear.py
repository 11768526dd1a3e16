"""Linear layers on a processor: oneDNN's float32 kernels in place of the default ones.

torch hands float32 matrix products on a processor to MKL, which on processors of other makers takes two to three times as
long as oneDNN, a library that torch carries as well. Owns: which of the two computes a product. Refuses to know: what a model
is. Always holds: the same shapes and threads take the same kernel, so a run repeats itself; float64, bfloat16 and GPUs are
left to torch; a torch without the operator computes as before.

Legend: N rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

_FEW_ROWS = 32
"""Below this a call of oneDNN costs more than it saves."""

_available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _serves(x: Tensor, weight: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return plain and _available and x.numel() >= _FEW_ROWS * x.shape[-1]


def _product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, as ``torch.nn.functional.linear``, differentiable in all three. ``x`` is [..., I]."""
    if not _serves(x, weight_OI):
        return nn.functional.linear(x, weight_OI, bias_O)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight_OI, bias_O)
    return _product(x, weight_OI, bias_O)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _product(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_NO, x_NI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad_NO, weight_OI.t()).view_as(x) if needs_x else None,
            _product(grad_NO.t(), x_NI.t()) if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )


class _ProcessorLinear(nn.Linear):
    """A linear layer that computes through ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_processor_kernels(model: nn.Module) -> None:
    """Let a model's plain linear layers compute through ``linear``; their parameters and names stay."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = _ProcessorLinear
