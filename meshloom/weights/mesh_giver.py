"""What a rank gives of a model that is trained over a mesh: its shards, under the names of the model's folder.

Owns: names, adapters merged on the way. Refuses to know: who takes. Always holds: the trainer's weights are not touched; of
adapters each rank holds the small matrices whole for the time of a movement, and of a merged weight no more than is asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshloom.train.load_sharded import source_names
from meshloom.train.mesh_model import MeshModel
from meshloom.train.shard import release
from meshloom.weights.layouts import Box
from meshloom.weights.shards import TensorGiver


@dataclass(frozen=True)
class _Adapter:
    """``weight + scale · up · down``."""

    down: Tensor
    up: Tensor
    scale: float


class MeshGiver(TensorGiver):
    """A rank's shards.

    Args:
        model: over a mesh; each of its ranks has a giver.
    """

    def __init__(self, model: MeshModel) -> None:
        super().__init__(lambda: mesh_tensors(model))
        self._model = model
        self._adapters: dict[str, _Adapter] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Give back what is gathered of the model, and gather its adapters; due on all ranks of the mesh."""
        super().begin()
        self._adapters = self._gathered()

    @torch.no_grad()
    def read(self, name: str, box: Box) -> Tensor:
        values = self.view(name, box)
        if (adapter := self._adapters.get(name)) is None:
            return values
        rows, columns = (slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
        return torch.addmm(values.float(), adapter.up[rows], adapter.down[:, columns], alpha=adapter.scale)

    def _gathered(self) -> dict[str, _Adapter]:
        module = self._model.module
        if not hasattr(module, "peft_config"):
            return {}
        from peft.tuners.lora import LoraLayer

        layers = {
            f"{name}.base_layer.weight": layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)
        }
        return {
            source: _Adapter(
                down=_whole(layers[name].lora_A["default"].weight).float(),
                up=_whole(layers[name].lora_B["default"].weight).float(),
                scale=layers[name].scaling["default"],
            )
            for name, source in source_names(module)
            if name in layers
        }


def mesh_tensors(model: MeshModel) -> Iterator[tuple[str, Tensor]]:
    """A rank's shards of a model, under the names of the model's folder; what is gathered of it is given back, so it is due on
    all ranks of the mesh."""
    release(model.root)
    parameters = dict(model.module.named_parameters())
    return ((source, parameters[name]) for name, source in source_names(model.module))


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
