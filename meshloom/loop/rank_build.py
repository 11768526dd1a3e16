"""What a rank has of a run, built from the settings and the plan: its parts of models, its engine, and what moves weights.

Owns: which parts there are on a device, and the order in which they are built. Refuses to know: what is done with them
(``loop.worker_host``). Always holds: process groups are made by all ranks of the run in one order, whatever their roles.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from meshloom.config.reward_settings import reward_models
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.data.tokenizer import load_tokenizer
from meshloom.fabric.seats import Seat
from meshloom.loop.build import decoder, set_end_tokens
from meshloom.loop.critic_role import critic_on_mesh
from meshloom.loop.engine_copies import build_copy
from meshloom.loop.movers import Ends, EngineMover, ReferenceMover, WeightMover
from meshloom.loop.reference_role import reference_on_mesh
from meshloom.loop.residents import Residents, check_room, folder_of
from meshloom.plan.layout import Layout, RoleLayout
from meshloom.plan.placement import Role
from meshloom.plan.reference import refreshes
from meshloom.plan.stays import stays
from meshloom.rewards.model import RewardModels
from meshloom.rollout.embedded import embedded_engine
from meshloom.rollout.protocol import ReplicaEngine
from meshloom.train.build_on_mesh import build_model
from meshloom.train.mesh import TrainMesh, mesh_of_plan
from meshloom.train.mesh_model import MeshModel
from meshloom.train.mesh_snapshot import restore_on_mesh
from meshloom.train.model import MicrobatchBound
from meshloom.train.snapshot import MODEL
from meshloom.weights.engine_copy import EngineCopy


@dataclass(frozen=True)
class RankEngine:
    """A rank's end of the rollout. What brings weights is there on all ranks of the run, also without an engine.

    Args:
        engine: that samples here.
        mover: brings the actor's weights.
        copy: weights of the embedded engine.
    """

    engine: ReplicaEngine | None
    mover: EngineMover
    copy: EngineCopy | None = None


class RankBuilder:
    """Builds the parts of one rank; each method is due on all ranks of the run at once, in the order in which they stand here.

    Args:
        settings: of the run.
        layout: of all roles; ranks are numbers of devices.
        seat: of the rank.
    """

    def __init__(self, settings: TrainSettings, layout: Layout, seat: Seat) -> None:
        self._settings, self._layout = settings, layout
        self._rank, self._device = seat.rank, torch.device(seat.device)
        self._tokenizer = load_tokenizer(settings.model.path)
        of_node = layout.topology.devices_per_node
        self._nodes = [rank // of_node for rank in range(layout.topology.num_devices)]

    def models(self, checkpoint: Path | None, updates: int, critic_updates: int) -> dict[Role, MeshModel]:
        """The rank's parts of actor, reference and critic.

        Args:
            checkpoint: that the run goes on from.
            updates: of the actor, made before.
            critic_updates: of the critic, made before.

        Raises:
            UserError: if a model cannot be loaded or cut.
        """
        settings, found = self._settings, {}
        meshes = {
            role: role_mesh(self._layout, role, self._device) for role in (Role.ACTOR, Role.REFERENCE, Role.CRITIC)
        }
        if (mesh := meshes[Role.ACTOR]) is not None:
            found[Role.ACTOR] = actor_on_mesh(settings, self._tokenizer, mesh, checkpoint, updates)
        if (mesh := meshes[Role.REFERENCE]) is not None:
            found[Role.REFERENCE] = reference_on_mesh(settings, mesh, checkpoint)
        if (mesh := meshes[Role.CRITIC]) is not None:
            found[Role.CRITIC] = critic_on_mesh(settings, mesh, checkpoint, critic_updates)
        return found

    def engine(self, actor: MeshModel | None) -> RankEngine:
        """What samples here, and what brings the actor's weights to all that sample.

        Raises:
            UserError: if the engine's model cannot be loaded or cut, or vLLM is not there, or refuses to start.
        """
        settings, rollout = self._settings, self._layout.role(Role.ROLLOUT)
        ends = self._ends(actor, rollout)
        if settings.rollout.engine == "vllm":
            from meshloom.loop.vllm_ranks import build_vllm

            vllm = build_vllm(settings, self._tokenizer, ends, self.replica)
            return RankEngine(vllm.engine, vllm)
        copy = build_copy(settings.model, rollout, self._rank, self._device)
        engine = None if copy is None else self._embedded(copy)
        return RankEngine(engine, WeightMover(ends, copy, engine), copy)

    def refresher(self, models: Mapping[Role, MeshModel]) -> ReferenceMover | None:
        """What brings the actor's weights to the reference, if the run refreshes it."""
        if not refreshes(self._settings):
            return None
        ends = self._ends(models.get(Role.ACTOR), self._layout.role(Role.REFERENCE))
        return ReferenceMover(ends, models.get(Role.REFERENCE))

    def scorers(self) -> RewardModels | None:
        """Reward models, if they are on this device."""
        return RewardModels(reward_models(self._settings.reward), self._device) if self._has(Role.REWARD) else None

    def residents(
        self,
        models: Mapping[Role, MeshModel],
        scorers: RewardModels | None,
        log: Callable[[Mapping[str, Any]], None],
    ) -> Residents:
        """Who is where in a phase, of what was built.

        Raises:
            UserError: if what shall go to disk has no room there.
        """
        here: dict[str, MeshModel | RewardModels] = {str(role): model for role, model in models.items()}
        if scorers is not None:
            here[str(Role.REWARD)] = scorers
        planned, folder = stays(self._settings, self._layout), folder_of(self._settings)
        check_room(folder, planned, here, {role: self._ranks_here(Role(role)) for role in here})
        return Residents(planned, here, folder=folder, log=log, rank=self._rank)

    @property
    def replica(self) -> list[int]:
        """Ranks of the engine's replica that this rank is of; none if there is none here."""
        if not self._has(Role.ROLLOUT):
            return []
        found = self._layout.role(Role.ROLLOUT)
        size = found.mesh.size("tp")
        first = found.ranks.index(self._rank) // size * size
        return found.ranks[first : first + size]

    def _ends(self, actor: MeshModel | None, takes: RoleLayout) -> Ends:
        """Of the movements to a role."""
        givers = self._layout.role(Role.ACTOR).ranks
        return Ends(actor=actor, givers=givers, takers=takes.ranks, device=self._device, nodes=self._nodes)

    def _has(self, role: Role) -> bool:
        """Whether a role is on this device."""
        found = self._layout.role(role)
        return found is not None and found.devices.rank_of(self._rank) is not None

    def _ranks_here(self, role: Role) -> int:
        """How many ranks of this node have a part of a role."""
        here = self._nodes[self._rank]
        return sum(self._nodes[rank] == here for rank in self._layout.role(role).ranks)

    def _embedded(self, copy: EngineCopy) -> ReplicaEngine:
        rollout = self._settings.rollout
        return embedded_engine(
            copy.module,
            eos_ids=set_end_tokens(copy.module, self._settings.data, self._tokenizer),
            max_sequences=rollout.max_sequences,
            kv_cache_bytes=rollout.kv_cache_bytes,
            prefill_tokens=rollout.prefill_tokens,
            decode=decoder(self._tokenizer),
            peers=copy.peers,
        )


def role_mesh(layout: Layout, role: Role, device: torch.device) -> TrainMesh | None:
    """A model's mesh, if it is on this device; due on all ranks of the run at once."""
    found = layout.role(role)
    return None if found is None else mesh_of_plan(found.mesh, found.ranks, device)


def actor_on_mesh(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, mesh: TrainMesh, checkpoint: Path | None, updates: int
) -> MeshModel:
    """This rank's part of the model that is trained, as a checkpoint has it; due on all of its ranks at once.

    Args:
        settings: of the run.
        tokenizer: of the model.
        mesh: of the model.
        checkpoint: that the run goes on from.
        updates: that were made before.

    Raises:
        UserError: if the model cannot be loaded or cut.
    """
    model = new_actor_on_mesh(settings, tokenizer, mesh, checkpoint)
    if checkpoint is not None:
        restore_on_mesh(model, checkpoint, updates)
    return model


def new_actor_on_mesh(
    settings: TrainSettings | SftSettings, tokenizer: PreTrainedTokenizerBase, mesh: TrainMesh, checkpoint: Path | None
) -> MeshModel:
    """The same without adapters and optimizer of the checkpoint, which ``restore_on_mesh`` brings."""
    batch = settings.batch
    model = build_model(
        settings.model,
        mesh,
        MicrobatchBound(batch.tokens_per_microbatch, batch.samples_per_microbatch),
        settings.optimizer,
        seed=settings.seed,
        stages_per_device=settings.parallel.actor.stages_per_device,
        path=checkpoint / MODEL if checkpoint is not None and settings.model.lora is None else None,
    )
    set_end_tokens(model.module, settings.data, tokenizer)
    return model
