"""The actor's weights to the engines of other layouts and other ranks, one tensor at a time.

Owns: which rank gives, which take. Refuses to know: schedules, how the actor is cut. Always holds: no rank holds more than one
whole tensor besides its own parts; every engine gets the same values, rounded to its dtype; adapters are merged on the way.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshloom.train.load_sharded import source_names
from meshloom.train.mesh_model import MeshModel


class WeightMover:
    """This rank's end of every movement. Made by all ranks of the world at once.

    Args:
        actor: the model that is trained, if this rank has a part of it.
        engine: the module that an engine here samples with, if it has weights of its own.
        actor_ranks: of the world, in the order of the actor's mesh.
        engine_ranks: of all engines.
        device: of this rank.
    """

    def __init__(
        self,
        actor: MeshModel | None,
        engine: nn.Module | None,
        actor_ranks: Sequence[int],
        engine_ranks: Sequence[int],
        device: torch.device,
    ) -> None:
        self._actor, self._engine, self._device = actor, engine, device
        apart = [rank for rank in engine_ranks if rank not in actor_ranks]
        self._giver, members = actor_ranks[0], [actor_ranks[0], *apart]
        group = dist.new_group(members) if apart else None
        self._group = group if dist.get_rank() in members else None

    @torch.no_grad()
    def move(self) -> None:
        """Give or take every tensor once; due on all ranks of actor and engines at once."""
        targets = {} if self._engine is None else dict(self._engine.named_parameters())
        if self._actor is None:
            for target in targets.values():
                dist.broadcast(target.data, src=self._giver, group=self._group)
            return
        for name, tensor in self._whole():
            if self._group is not None:
                dist.broadcast(tensor, src=self._giver, group=self._group)
            if name in targets:
                targets[name].copy_(tensor)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the folder, whole, in the order of the model's parameters."""
        module = self._actor.module
        parameters, adapted = dict(module.named_parameters()), _adapted(module)
        for name, source in source_names(module):
            tensor = _full(parameters[name])
            if (layer := adapted.get(name)) is not None:
                down, up = (_full(part["default"].weight).float() for part in (layer.lora_A, layer.lora_B))
                tensor = torch.addmm(tensor.float(), up, down, alpha=layer.scaling["default"])
            yield source, tensor.to(self._actor.compute)


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _adapted(module: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by the name of their base weight."""
    if not hasattr(module, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.base_layer.weight": child for name, child in module.named_modules() if isinstance(child, LoraLayer)
    }
