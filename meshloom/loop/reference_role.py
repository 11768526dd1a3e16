"""The reference of a run, built from its settings: on one device, or on this rank's part of a mesh; and in a checkpoint.

Owns: what of the actor's settings it shares, where a refreshed one is in a checkpoint. Refuses to know: when it is refreshed,
how a model is cut. Always holds: a reference that was refreshed is in the checkpoint as a model's folder of its own, so a run
that is resumed measures from the same weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.config.settings import KlPlace, ModelSettings, TrainSettings
from meshloom.loop.build import build_actor
from meshloom.loop.session import Snapshot
from meshloom.plan.reference import has_own_reference
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.reference import Reference
from meshloom.train.snapshot import MODEL

if TYPE_CHECKING:
    from meshloom.train.mesh import TrainMesh
    from meshloom.train.mesh_model import MeshModel

FOLDER = "reference"
"""Of a checkpoint."""


def reference_settings(settings: TrainSettings, checkpoint: Path | None) -> ModelSettings:
    """The reference as the settings of a model: whole, as it was when it was saved."""
    saved = None if checkpoint is None else checkpoint / FOLDER / MODEL
    path = str(saved) if saved is not None and saved.is_dir() else settings.reference.model or settings.model.path
    return settings.model.model_copy(update={"path": path, "lora": None})


def reference_bound(settings: TrainSettings) -> MicrobatchBound:
    """Size of its microbatches."""
    return MicrobatchBound(settings.batch.tokens_per_microbatch, settings.batch.samples_per_microbatch)


def build_reference(settings: TrainSettings, actor: TrainedModel, checkpoint: Path | None) -> Reference | None:
    """The model the divergence is measured from, only where a divergence is used."""
    if settings.algorithm.kl is KlPlace.NONE:
        return None
    if not has_own_reference(settings):
        return Reference(actor, adapters=False)
    described, bound = reference_settings(settings, checkpoint), reference_bound(settings)
    frozen = build_actor(described, None, bound, device=settings.device, seed=settings.seed, checkpoint=None)
    return Reference(frozen, adapters=True)


def reference_on_mesh(settings: TrainSettings, mesh: "TrainMesh", checkpoint: Path | None) -> "MeshModel":
    """This rank's part of the reference; due on all of its ranks at once.

    Args:
        settings: of the run.
        mesh: of the reference.
        checkpoint: that the run goes on from.
    """
    # It brings torch.distributed, which a run on one device does without.
    from meshloom.train.build_on_mesh import build_model

    return build_model(
        reference_settings(settings, checkpoint),
        mesh,
        reference_bound(settings),
        None,
        seed=settings.seed,
        stages_per_device=settings.parallel.reference.stages_per_device,
    )


@dataclass(frozen=True)
class WithReference:
    """What is trained, and a reference that was refreshed, between two steps.

    Args:
        trained: models that are trained.
        reference: the reference.
    """

    trained: Snapshot
    reference: Snapshot

    @property
    def num_bytes(self) -> int:
        """About what all files take."""
        return self.trained.num_bytes + self.reference.num_bytes

    def write(self, folder: Path) -> None:
        """Write the files of both."""
        self.trained.write(folder)
        (folder / FOLDER).mkdir()
        self.reference.write(folder / FOLDER)
