"""Exchanges between ranks with gradients.

Owns: what an exchange's gradient is. Refuses to know: what is exchanged, meshes. Always holds: every rank of a group calls the
same exchanges in the same order, forward and backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.compiler.disable
def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same on each rank, where ranks go on to compute different parts: the gradient is the sum of theirs."""
    return _Enter.apply(x, group)


@torch.compiler.disable
def add_up(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' parts, where ranks go on to compute the same: each part's gradient is that of the sum."""
    return _AddUp.apply(x, group)


@torch.compiler.disable
def swap(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, …]: piece ``r`` goes to rank ``r``, and stands there in the place of this rank."""
    return _Swap.apply(x, group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _swapped(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _swapped(grad, ctx.group), None


def _swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
