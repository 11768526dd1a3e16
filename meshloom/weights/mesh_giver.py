"""What a rank gives of a model that is trained over a mesh: its shards, under the names of the model's folder.

Owns: names, adapters merged on the way. Refuses to know: who takes. Always holds: the trainer's weights are not touched; of
adapters each rank holds the small matrices whole for the time of a movement, and of a merged weight no more than is asked for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshloom.train.load_sharded import source_names
from meshloom.train.mesh_model import MeshModel
from meshloom.train.shard import release
from meshloom.weights.layouts import Box
from meshloom.weights.shards import Part, held_by, local_of, untied


@dataclass(frozen=True)
class _Adapter:
    """``weight + scale · up · down``."""

    down: Tensor
    up: Tensor
    scale: float


class MeshGiver:
    """A rank's shards.

    Args:
        model: over a mesh; each of its ranks has a giver.
    """

    def __init__(self, model: MeshModel) -> None:
        self._model = model
        self._now: dict[str, tuple[Box, Tensor]] = {}
        self._adapters: dict[str, _Adapter] = {}

    def parts(self) -> dict[str, Part]:
        return {
            name: Part(tuple(tensor.shape), (held_by(tensor),), tensor.dtype)
            for name, tensor in self._tensors().items()
        }

    @torch.no_grad()
    def begin(self) -> None:
        """Give back what is gathered of the model, and gather its adapters; due on all ranks of the mesh."""
        self._now = {name: (held_by(tensor), local_of(tensor)) for name, tensor in self._tensors().items()}
        self._adapters = self._gathered()

    @torch.no_grad()
    def read(self, name: str, box: Box) -> Tensor:
        held, tensor = self._now[name]
        values = box.of(tensor, held)
        if (adapter := self._adapters.get(name)) is None:
            return values
        rows, columns = (slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
        return torch.addmm(values.float(), adapter.up[rows], adapter.down[:, columns], alpha=adapter.scale)

    def _tensors(self) -> dict[str, Tensor]:
        release(self._model.root)
        parameters = dict(self._model.module.named_parameters())
        named = ((source, parameters[name]) for name, source in source_names(self._model.module))
        return dict(untied(named))

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


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
