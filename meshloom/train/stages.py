"""Stages of a pipeline: each rank keeps some neighbouring layers of a model, or several such stretches.

Owns: what of a model belongs to which stage, what stands in place of the rest. Refuses to know: when a stage computes, what
passes between stages. Always holds: the model stays the plain one and its layers keep their names and numbers; the first stage
has the embedding, the last one the norm and the head, and the table too where both are one. Rank r of p has the stages r,
p + r, 2p + r, …, so the first stage is on the first rank and the last on the last.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.plan.shards import device_layers
from meshloom.train.head import decoder_of
from meshloom.train.mesh import TrainMesh
from meshloom.train.value_head import head_of, put_head


class Elsewhere(nn.Module):
    """A module that another stage computes: what it is given goes through."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        # Some families ask a layer which kind it is.
        for name in ("attention_type", "layer_type"):
            if name in of.__dict__:
                setattr(self, name, of.__dict__[name])

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x


def keep_stages(model: PreTrainedModel, mesh: TrainMesh, stages_per_device: int = 1) -> list[str]:
    """Leave a model this rank's stages, in place.

    Args:
        model: whole.
        mesh: with an axis ``pp``.
        stages_per_device: of each rank.

    Returns:
        Names of the parameters that the first and the last stage both have.

    Raises:
        UserError: if the model has fewer layers than there are stages, or keeps them in another way than usual.
    """
    decoder, ranks, place = decoder_of(model), mesh.size("pp"), mesh.place["pp"]
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(getattr(decoder, "norm", None), nn.Module):
        raise UserError(
            f"{type(model).__name__} does not keep its layers as a pipeline needs them",
            where="parallel.actor.pipeline",
            fix="parallel.actor.pipeline=1",
        )
    if len(layers) < ranks * stages_per_device:
        _refuse_stages(len(layers), ranks, stages_per_device)
    table, head = model.get_input_embeddings(), head_of(model)
    tied = table.weight is head.weight
    kept = {index for stretch in device_layers(len(layers), ranks, place, stages_per_device) for index in stretch}
    for index in set(range(len(layers))) - kept:
        layers[index] = Elsewhere(layers[index])
    first, last = place == 0, place == ranks - 1
    if not last:
        decoder.norm = Elsewhere(decoder.norm)
        put_head(model, Elsewhere(head))
    if not first and not (last and tied):
        model.set_input_embeddings(Elsewhere(table))
    return [name for name, p in model.named_parameters() if p is table.weight] if tied and (first or last) else []


def _refuse_stages(layers: int, ranks: int, stages_per_device: int) -> None:
    stages = ranks * stages_per_device
    if ranks > layers or stages_per_device == 1:
        fix = f"parallel.actor.pipeline={layers} or less"
    else:
        fix = f"parallel.actor.stages_per_device={layers // ranks} or less"
    raise UserError(f"{layers} layers do not make {stages} stages", where="parallel.actor.pipeline", fix=fix)


class StageViews:
    """A decoder of which a rank has several stages, so that it computes one of them at a time.

    Args:
        decoder: with this rank's layers, and ``Elsewhere`` in place of the others.
        mesh: with an axis ``pp``.
        stages_per_device: of each rank.
    """

    def __init__(self, decoder: nn.Module, mesh: TrainMesh, stages_per_device: int) -> None:
        layers: nn.ModuleList = decoder.layers
        own = device_layers(len(layers), mesh.size("pp"), mesh.place["pp"], stages_per_device)
        # Each has all numbers, as some families go by a layer's number.
        self._layers = [
            nn.ModuleList(layer if index in stretch else Elsewhere(layer) for index, layer in enumerate(layers))
            for stretch in own
        ]
        self._own = [[layers[index] for index in stretch] for stretch in own]
        self._decoder, self._whole, self._ranks = decoder, layers, mesh.size("pp")
        self._norm, self._no_norm = decoder.norm, Elsewhere(decoder.norm)

    def layers_of(self, stage: int) -> list[nn.Module]:
        """Layers of one of this rank's stages; ``stage``: its number among all stages."""
        return self._own[stage // self._ranks]

    @contextmanager
    def alone(self, stage: int) -> Iterator[None]:
        """Inside, the decoder is one of this rank's stages, and the norm is part of it if it is the last of all.

        Args:
            stage: its number among all stages.
        """
        own = stage // self._ranks
        self._decoder.layers = self._layers[own]
        if own < len(self._layers) - 1:
            self._decoder.norm = self._no_norm
        try:
            yield
        finally:
            self._decoder.layers, self._decoder.norm = self._whole, self._norm
