"""The optimizer of a model that is cut over ranks: AdamW on the part of each parameter that a rank holds.

Owns: gradients of parts, their norm over all ranks. Refuses to know: how a model is cut; who calls it. Always holds: what
``meshloom.train.optimizer`` says; the norm is that of the whole gradient, each value counted once; what several ranks hold
a copy of gets the same update on each of them.

Parameters are float32, so they are their own masters: a rank's master is the part it holds, in place.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshloom.config.settings import OptimizerSettings
from meshloom.train.mesh import TrainMesh
from meshloom.train.optimizer import Optimizer, StepStats


class ShardedOptimizer(Optimizer):
    """AdamW over the parts that this rank holds.

    Args:
        module: whose parameters are DTensors of float32 or wider.
        settings: rates, decay, clipping.
        mesh: over which it is cut.
        whole: parameters that each rank of ``tp`` has a copy of, and whether its gradient is a part of the sum (true) or
            already the sum (false).
        tied: parameters that the first and the last stage of a pipeline both have; each has a part of the gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        mesh: TrainMesh,
        whole: Mapping[str, bool],
        tied: Sequence[str] = (),
    ) -> None:
        self._mesh, self._whole, self._tied = mesh, dict(whole), tuple(tied)
        super().__init__(module, settings)
        self._shares = {name: 1.0 / self._copies(name) for name in self.masters}

    def _copies(self, name: str) -> int:
        """Ranks that have the same part of a parameter."""
        over_tensor = self._mesh.size("tp") if name in self._whole else 1
        return self._mesh.size("replicate") * over_tensor * (2 if name in self._tied else 1)

    def gradient_total(self, parameter: Tensor) -> None:
        """None: gradients go through the exchange between ranks."""
        return

    @torch.no_grad()
    def collect(self) -> None:
        """Take the gradients that the exchange between ranks has left in the parameters."""
        for name, parameter in self.parameters.items():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.to_local()

    def step(self, total_updates: int) -> StepStats:
        """See ``Optimizer.step``; due on all ranks at once."""
        self.collect()
        self._add_up_copies()
        return super().step(total_updates)

    def _add_up_copies(self) -> None:
        """Gradients of what several ranks have a copy of: one sum, the same on all of them."""
        for name in self._tied:
            if name in self.masters and self.masters[name].grad is not None:
                dist.all_reduce(self.masters[name].grad, group=self._mesh.groups.ends)
        if self._mesh.groups.tp is None:
            return
        found = {n: g for n in self._whole if n in self.masters and (g := self.masters[n].grad) is not None}
        if not found:
            return
        flat = torch.cat([g.reshape(-1) for g in found.values()])
        dist.all_reduce(flat, group=self._mesh.groups.tp)
        for (name, grad), total in zip(found.items(), flat.split([g.numel() for g in found.values()]), strict=True):
            grad.copy_(total.view_as(grad))
            if not self._whole[name]:
                grad /= self._mesh.size("tp")

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if not isinstance(parameter, DTensor) or parameter.dtype not in (torch.float32, torch.float64):
            raise TypeError("a parameter that is trained on a mesh is a DTensor of float32")
        return parameter.detach().to_local()

    def _is_copy(self, parameter: nn.Parameter, master: Tensor) -> bool:
        return False

    def _norm(self, grads: list[Tensor]) -> Tensor:
        held = [(m.grad, self._shares[n]) for n, m in self.masters.items() if m.grad is not None and m.grad.numel()]
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if held:
            norms = torch.stack(torch._foreach_norm([grad for grad, _ in held])).double()
            shares = torch.tensor([share for _, share in held], dtype=torch.float64)
            total += norms.square().dot(shares.to(norms.device, non_blocking=True))
        dist.all_reduce(total, group=self._mesh.groups.everyone)
        return total.sqrt().to(grads[0].dtype)

    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _not_finite(self) -> list[str]:
        """Names on all ranks; the norm, which all of them know, has brought each of them here."""
        return sorted({name for names in self._mesh.gather(super()._not_finite()) for name in names})
