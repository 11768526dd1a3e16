"""Stages of a pipeline: each rank keeps some neighbouring layers of a model.

Owns: what of a model belongs to which stage, what stands in place of the rest. Refuses to know: when a stage computes, what
passes between stages. Always holds: the model stays the plain one and its layers keep their names and numbers; the first stage
has the embedding, the last one the norm and the head, and the table too where both are one.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.plan.shards import stage_layers
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


def keep_stage(model: PreTrainedModel, mesh: TrainMesh) -> list[str]:
    """Leave a model this rank's stage, in place.

    Args:
        model: whole.
        mesh: with an axis ``pp``.

    Returns:
        Names of the parameters that the first and the last stage both have.

    Raises:
        UserError: if the model has fewer layers than there are stages, or keeps them in another way than usual.
    """
    decoder, stages, stage = decoder_of(model), mesh.size("pp"), mesh.place["pp"]
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(getattr(decoder, "norm", None), nn.Module):
        raise UserError(
            f"{type(model).__name__} does not keep its layers as a pipeline needs them",
            where="parallel.actor.pipeline",
            fix="parallel.actor.pipeline=1",
        )
    if len(layers) < stages:
        raise UserError(
            f"{len(layers)} layers do not make {stages} stages",
            where="parallel.actor.pipeline",
            fix=f"parallel.actor.pipeline={len(layers)} or less",
        )
    table, head = model.get_input_embeddings(), head_of(model)
    tied = table.weight is head.weight
    for index in set(range(len(layers))) - set(stage_layers(len(layers), stages, stage)):
        layers[index] = Elsewhere(layers[index])
    first, last = stage == 0, stage == stages - 1
    if not last:
        decoder.norm = Elsewhere(decoder.norm)
        put_head(model, Elsewhere(head))
    if not first and not (last and tied):
        model.set_input_embeddings(Elsewhere(table))
    return [name for name, p in model.named_parameters() if p is table.weight] if tied and (first or last) else []
