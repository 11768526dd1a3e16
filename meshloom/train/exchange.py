"""Exchanges between ranks with gradients.

Owns: what an exchange's gradient is. Refuses to know: what is exchanged, meshes. Always holds: every rank of a group calls the
same exchanges in the same order, forward and backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Move = Callable[[Tensor, dist.ProcessGroup, int], Tensor]
"""What ranks make of their tensors together, along a dim."""


@torch.compiler.disable
def add_up(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' parts, where ranks go on to compute the same: each part's gradient is that of the sum."""
    return _AddUp.apply(x, group)


@torch.compiler.disable
def gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The ranks' pieces together, where ranks go on to compute different parts: a piece's gradient is the sum of theirs."""
    return _Exchange.apply(x, group, dim, _gathered, _own_of_sum)


@torch.compiler.disable
def add_up_own(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's piece of the sum of the ranks' parts."""
    return _Exchange.apply(x, group, dim, _own_of_sum, _gathered)


@torch.compiler.disable
def gather_same(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The ranks' pieces together, where ranks go on to compute the same: a piece's gradient is that of its place."""
    return _Exchange.apply(x, group, dim, _gathered, _piece)


@torch.compiler.disable
def own(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's piece of what is the same on each rank."""
    return _Exchange.apply(x, group, dim, _piece, _gathered)


@torch.compiler.disable
def swap(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, …]: piece ``r`` goes to rank ``r``, and stands there in the place of this rank."""
    return _Exchange.apply(x, group, 0, _swapped, _swapped)


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    """One exchange forward, and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return there(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group, ctx.dim), None, None, None, None


def _swapped(x: Tensor, group: dist.ProcessGroup, _: int) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _gathered(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim)


def _own_of_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    pieces = [piece.contiguous() for piece in x.chunk(dist.get_world_size(group), dim)]
    total = torch.empty_like(pieces[0])
    dist.reduce_scatter(total, pieces, group=group)
    return total


def _piece(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()
