"""What a worker process has of a supervised run: its part of the model that is trained.

Owns: building it. Refuses to know: data, the loss, what comes after what. The verbs are those of ``loop.worker_host``.
"""

from pathlib import Path

import torch

from meshloom.config.settings import SftSettings
from meshloom.data.tokenizer import load_tokenizer
from meshloom.fabric.verbs import verb
from meshloom.loop.rank_build import new_actor_on_mesh, role_mesh
from meshloom.loop.residents import Residents, check_room, folder_of
from meshloom.loop.worker_host import WorkerHost
from meshloom.plan.layout import Layout
from meshloom.plan.placement import Role
from meshloom.plan.stays import sft_stays
from meshloom.train.mesh_snapshot import restore_on_mesh


class SftHost(WorkerHost):
    """The model of one device. Arguments as of ``WorkerHost``."""

    settings: SftSettings

    @verb()
    def build(self, settings: SftSettings, layout: Layout, checkpoint: Path | None, updates: int) -> None:
        """Build the model over all ranks at once.

        Args:
            settings: of the run.
            layout: of its model; ranks are numbers of devices.
            checkpoint: that the run goes on from.
            updates: made before.

        Raises:
            UserError: if the model cannot be loaded or cut.
        """
        self.settings, self.layout = settings, layout
        torch.manual_seed(settings.seed)
        mesh = role_mesh(layout, Role.ACTOR, self.device)
        if mesh is None:
            raise RuntimeError(f"{self.seat} is not on the mesh of a run that trains on all devices")
        model = new_actor_on_mesh(settings, load_tokenizer(settings.model.path), mesh, checkpoint)
        self._models[Role.ACTOR] = model
        planned, folder = sft_stays(settings), folder_of(settings)
        check_room(folder, planned, {Role.ACTOR: model}, {Role.ACTOR: layout.topology.devices_per_node})
        models, rank = {str(Role.ACTOR): model}, self.seat.rank
        self._residents = Residents(planned, models, folder=folder, log=self._note_memory, rank=rank)
        mesh.agree(0)  # the first rank empties the folder that what moves goes to, on each rank from now on
        if checkpoint is not None:  # by now what moves is never whole on the device
            restore_on_mesh(model, checkpoint, updates)
