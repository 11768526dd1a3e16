"""Gradients narrower than float32 on their way into float32 totals.

Owns: when they are added, and in how few launches. Refuses to know: what the totals are used for. Always holds: each gradient
of a backward pass is added once and in float32; those that wait are bounded in bytes, so that a large model never holds a
second copy of its gradients.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_MOST_WAITING_BYTES = 256 * 2**20
"""One launch for each: all of a small model's, a few layers of a large one's."""


class GradientTotals:
    """Takes the gradients of parameters as the backward pass makes them, and adds them to their masters' ``grad``.

    Args:
        masters: the float32 tensor of each narrow parameter.
    """

    def __init__(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        self._masters = dict(masters)
        self._waiting: list[nn.Parameter] = []
        self._waiting_bytes = 0
        for parameter in self._masters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def of(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's total, zeros if it has none yet: for who adds to it past the parameter's ``grad``."""
        master = self._masters[parameter]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    @torch.no_grad()
    def add_waiting(self) -> None:
        """Add what waits; due after each backward pass, before another one adds to a gradient that is narrow."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for dtype in {p.dtype for p in waiting}:
            self._add([p for p in waiting if p.dtype == dtype])
        for parameter in waiting:
            parameter.grad = None

    def _take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # it was added to the total already
            return
        self._waiting.append(parameter)
        self._waiting_bytes += parameter.grad.nbytes
        if self._waiting_bytes >= _MOST_WAITING_BYTES:
            self.add_waiting()

    def _add(self, parameters: list[nn.Parameter]) -> None:
        gradients = [p.grad.contiguous() for p in parameters if p.grad is not None]
        totals: list[Tensor] = []
        fresh: list[bool] = []
        for master in (self._masters[p] for p in parameters):
            fresh.append(master.grad is None)
            total = torch.empty_like(master) if master.grad is None else master.grad
            master.grad = total
            totals.append(total)
        if totals[0].is_cuda:
            # Imported here: its kernel needs Triton, which torch for the processor does not bring.
            from meshloom.train.gradient_kernels import add_gradients

            add_gradients(totals, gradients, fresh)
            return
        for total, gradient, is_fresh in zip(totals, gradients, fresh, strict=True):
            total.copy_(gradient) if is_fresh else total.add_(gradient)
