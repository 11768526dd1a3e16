"""The critic of a run, built from its settings: on one device, or on this rank's part of a mesh.

Owns: what of the actor's settings it shares. Refuses to know: how values are used, how a model is cut. Always holds: it
computes as the actor does (arithmetic, kernels, recompute), whole, whatever the actor trains of itself.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.config.errors import UserError
from meshloom.config.settings import ModelSettings, TrainSettings
from meshloom.plan.placement import has_critic
from meshloom.train.load import pick_device, pick_dtype
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.snapshot import CRITIC
from meshloom.train.value_head import load_value_model

if TYPE_CHECKING:
    from meshloom.train.mesh import TrainMesh
    from meshloom.train.mesh_model import MeshModel


def critic_model_settings(settings: TrainSettings) -> ModelSettings:
    """The critic as the settings of a model: whole, whatever the actor trains of itself."""
    return settings.model.model_copy(update={"path": settings.critic.model or settings.model.path, "lora": None})


def critic_bound(settings: TrainSettings) -> MicrobatchBound:
    """Size of the critic's microbatches."""
    batch = settings.batch
    return MicrobatchBound(
        settings.critic.tokens_per_microbatch or batch.tokens_per_microbatch, batch.samples_per_microbatch
    )


def build_critic(settings: TrainSettings, checkpoint: Path | None) -> TrainedModel | None:
    """The critic, from its folder or from a checkpoint, if the run has one; its optimizer is restored by the caller."""
    if not has_critic(settings):
        return None
    described, where = critic_model_settings(settings), pick_device(settings.device)
    path = described.path if checkpoint is None else checkpoint / CRITIC
    module = load_value_model(path, pick_dtype(described.dtype, where), where)
    return TrainedModel(module, described, critic_bound(settings), settings.critic.optimizer)


def critic_on_mesh(settings: TrainSettings, mesh: "TrainMesh", checkpoint: Path | None, updates: int) -> "MeshModel":
    """This rank's part of the critic; due on all of its ranks at once.

    Args:
        settings: of the run.
        mesh: of the critic.
        checkpoint: that the run goes on from.
        updates: that the critic made before.

    Raises:
        UserError: if its folder cannot be used, or it cannot be cut so.
    """
    # They bring torch.distributed, which a run on one device does without.
    from meshloom.train.build_on_mesh import build_model
    from meshloom.train.mesh_snapshot import restore_on_mesh

    try:
        model = build_model(
            critic_model_settings(settings),
            mesh,
            critic_bound(settings),
            settings.critic.optimizer,
            path=None if checkpoint is None else checkpoint / CRITIC,
            scalar_head=True,
            stages_per_device=settings.parallel.critic.stages_per_device,
        )
    except UserError as error:
        named = (text.replace("parallel.actor", "parallel.critic") for text in (error.where, error.why, error.fix))
        where, why, fix = named
        raise UserError(error.what, where=where, why=why, fix=fix) from error
    if checkpoint is not None:
        restore_on_mesh(model, checkpoint, updates)
    return model
