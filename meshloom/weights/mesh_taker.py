"""What a rank takes into a model over a mesh that is only asked: its shards, under the names of the model's folder.

Owns: names, the shards' places. Refuses to know: who gives. Always holds: parameters stay the same objects.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshloom.train.load_sharded import source_names
from meshloom.train.mesh_model import MeshModel
from meshloom.train.shard import release
from meshloom.weights.layouts import Box
from meshloom.weights.shards import Part, held_by, local_of, untied


class MeshTaker:
    """A rank's shards.

    Args:
        model: over a mesh; each of its ranks has a taker.
    """

    def __init__(self, model: MeshModel) -> None:
        self._model = model
        self._now: dict[str, tuple[Box, Tensor]] = {}

    def parts(self) -> dict[str, Part]:
        return {
            name: Part(tuple(tensor.shape), (held_by(tensor),), tensor.dtype)
            for name, tensor in self._tensors().items()
        }

    @torch.no_grad()
    def begin(self) -> None:
        """Give back what is gathered of the model; due on all ranks of the mesh."""
        self._now = {name: (held_by(tensor), local_of(tensor)) for name, tensor in self._tensors().items()}

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        held, tensor = self._now[name]
        yield box, box.of(tensor, held)

    def _tensors(self) -> dict[str, Tensor]:
        release(self._model.root)
        parameters = dict(self._model.module.named_parameters())
        return dict(untied((source, parameters[name]) for name, source in source_names(self._model.module)))
