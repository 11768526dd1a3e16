"""What a worker process does for the controller: the verbs of the roles that the plan puts on its device.

Owns: the verbs, and what they share (models, engine, the checkpoint that is being written). Refuses to know: how its parts are
built (``loop.rank_build``), prompts, rewards, the algorithm, what comes after what. Always holds: ranks of one role are called
together, each with its own part; results are told by one rank of each replica; nothing is written but parts of checkpoints,
into the folder that is named.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshloom.algorithms.own_checks import check_own
from meshloom.config.errors import RunFault
from meshloom.config.settings import TrainSettings
from meshloom.fabric.dispatch import GroupLayout, from_first
from meshloom.fabric.seats import Seat
from meshloom.fabric.verbs import note, teller, verb
from meshloom.loop.facts import DeviceFacts, ModelFacts
from meshloom.loop.handing import handed_on
from meshloom.loop.held import what_is_new
from meshloom.loop.interrupts import Interrupts
from meshloom.loop.movers import EngineMover, ReferenceMover
from meshloom.loop.parcels import KeptSamples, Parcel
from meshloom.loop.rank_build import RankBuilder
from meshloom.loop.residents import Residents
from meshloom.loop.telling import tell_each
from meshloom.observe.peaks import PhaseMemory
from meshloom.observe.timing import peak_memory
from meshloom.plan.layout import Layout
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.rewards.model import RewardModels
from meshloom.rollout.feed import ReplicaFeed
from meshloom.rollout.protocol import ReplicaEngine, Request
from meshloom.rollout.travel import Completions
from meshloom.samples.compact import Compact
from meshloom.train.head import plain_model
from meshloom.train.load import describe_device, free_memory
from meshloom.train.mesh_model import MeshModel
from meshloom.train.mesh_snapshot import (
    MeshSnapshot,
    full_bytes,
    held,
    is_first,
    specs_of,
    write_config,
)
from meshloom.train.model import Loss
from meshloom.train.optimizer import StepStats
from meshloom.train.shared_files import Spec
from meshloom.weights.engine_copy import EngineCopy


def from_answering(results: Sequence[Any], layout: GroupLayout) -> list[Any]:
    """One result of each replica, from the rank that has one."""
    return [
        next(
            result
            for result, index in zip(results, layout.data_index, strict=True)
            if index == part and result is not None
        )
        for part in range(layout.num_parts)
    ]


class WorkerHost:
    """The roles of one device.

    Args:
        seat: of this worker.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat, self.device = seat, torch.device(seat.device)
        self._models: dict[Role, MeshModel] = {}
        self._engine: ReplicaEngine | None = None
        self._replica: list[int] = []
        self._snapshot: MeshSnapshot | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._copy: EngineCopy | None = None
        self._mover: EngineMover | None = None
        self._refresher: ReferenceMover | None = None
        self._reference: MeshSnapshot | None = None
        self._residents: Residents | None = None
        self._scorers: RewardModels | None = None
        self._noted: list[dict[str, Any]] = []
        self._phases = PhaseMemory()
        self._interrupts = Interrupts()
        self._kept = KeptSamples()

    @verb()
    def device_facts(self) -> DeviceFacts:
        """What the plan and the run's records want to know of the device."""
        return DeviceFacts(free_bytes=free_memory(self.device), described=describe_device(self.device))

    @verb()
    def build(
        self, settings: TrainSettings, layout: Layout, checkpoint: Path | None, updates: int, critic_updates: int
    ) -> None:
        """Build the models of this device's roles, on all ranks at once.

        Args:
            settings: of the run.
            layout: of all roles; ranks are numbers of devices.
            checkpoint: that the run goes on from.
            updates: of the actor, made before.
            critic_updates: of the critic, made before.

        Raises:
            UserError: if a model cannot be loaded or cut.
        """
        self.settings, self.layout = settings, layout
        check_own(settings.algorithm)
        torch.manual_seed(settings.seed)
        builder = RankBuilder(settings, layout, self.seat)
        self._models = builder.models(checkpoint, updates, critic_updates)
        rollout = builder.engine(self._models.get(Role.ACTOR))
        self._engine, self._copy, self._mover = rollout.engine, rollout.copy, rollout.mover
        self._replica = builder.replica
        self._refresher = builder.refresher(self._models)
        self._scorers = builder.scorers()
        self._residents = builder.residents(self._models, self._scorers, self._note_memory)

    @property
    def _trained(self) -> list[MeshModel]:
        """Models of this rank that a checkpoint holds."""
        return [self._models[role] for role in (Role.ACTOR, Role.CRITIC) if role in self._models]

    @verb()
    def facts(self, role: Role) -> ModelFacts:
        """What the controller must know of a model that is trained."""
        model = self._models[role]
        return ModelFacts(
            vocabulary=plain_model(model.module).config.get_text_config().vocab_size,
            checkpoint_bytes=full_bytes(model) if is_first(model.mesh) else 0,
        )

    @verb(dispatch=what_is_new("samples"), collect=from_answering)
    def forward(
        self, samples: Parcel, role: Role, temperature: float, adapters: bool, kept_as: str, tells: bool
    ) -> dict[str, torch.Tensor] | None:
        """What a model's head says first of this replica's samples: log-probs, or values. They are kept under a name of their
        own where the samples are kept, and told if they are wanted."""
        model = self._models[role]
        names = {Role.REFERENCE: "reference", Role.CRITIC: "values"}
        self._phases.enter(names.get(role, "log_prob" if adapters else "reference"))
        column_T = model.forward(self._kept.take(handed_on(samples)), temperature=temperature, adapters=adapters)[0]
        if model.mesh.knows:
            self._kept.keep(samples, kept_as, column_T)
        if not model.mesh.answers:
            return None
        return {model.head.columns[0]: column_T} if tells else {}

    @verb(dispatch=what_is_new("samples"), collect=from_answering)
    def forward_backward(self, samples: Parcel, role: Role, loss: Loss, temperature: float) -> dict[str, Any] | None:
        """Add the gradient of this replica's part of an update."""
        model = self._models[role]
        self._phases.enter("critic" if role is Role.CRITIC else "update")
        self._seed_dropout(model)
        report = model.forward_backward(self._kept.take(handed_on(samples)), loss, temperature=temperature)
        return report if model.mesh.answers else None

    @verb()
    def let_go(self) -> int:
        """Give up what is kept of a step's samples; how many bytes that were."""
        count = self._kept.num_bytes
        self._kept.let_go()
        return count

    @verb(collect=from_first)
    def optim_step(self, role: Role, total_updates: int) -> StepStats:
        """One optimizer update."""
        return self._models[role].optim_step(total_updates)

    @verb()
    def take_utilization(self, seconds: float) -> dict[str, float]:
        """Share of the device's peak that the actor's updates reached."""
        return self._models[Role.ACTOR].take_utilization(seconds)

    @verb()
    def memory(self) -> dict[str, float]:
        """Most bytes that this device, or this process on the processors, has held so far; on a GPU also in each phase since
        the last call."""
        return {"peak_memory_bytes": float(peak_memory()), **self._phases.take()}

    @verb()
    def enter(self, phase: Phase, step: int, why: str) -> list[dict[str, Any]]:
        """Have every part of this rank's models where the plan has it in a phase; what was noted of memory."""
        self._noted = []
        self._residents.enter(phase, step=step, why=why)
        return self._noted

    @verb()
    def check_request(self, request: Request) -> None:
        """Refuse a request that this replica's cache could never hold."""
        self._need_engine().generate([request], deadline_s=0.0)

    @verb()
    def generate(
        self, requests: list[Request], deadline_s: float, number: int, largest: Request | None
    ) -> dict[str, Any]:
        """Generate, and tell samples as they finish, on the first rank of a replica; what ``memory`` says then, and tokens of
        prompts as ``PromptCount``.

        Args:
            requests: to begin with.
            deadline_s: of all of them.
            number: of this generation, higher than those before.
            largest: as long as any request that may join; none if none will.
        """
        self._phases.enter("generate")
        tells, engine = self.seat.rank == self._replica[0], self._need_engine()
        feed = None if largest is None else ReplicaFeed(largest, engine.first_says)
        stream = engine.generate(requests, deadline_s=deadline_s, feed=feed)
        with self._interrupts.hearing(number, engine, feed):
            if tells:
                tell = teller()
                tell_each(stream, lambda finished: tell(Completions.of(finished)))
            else:
                deque(stream, maxlen=0)
        prompts = engine.take_prompts()
        return {"memory": self.memory(), "prompts": [prompts.computed, prompts.reused]}

    @note
    def end_requests(self, number: int, request_ids: list[int], only_unbegun: bool) -> None:
        """Let requests of a generation end, while it is on or yet to come."""
        self._interrupts.tell(number, request_ids, only_unbegun=only_unbegun)

    @note
    def bring_requests(self, number: int, requests: list[Request]) -> None:
        """Let requests join a generation that is on or yet to come; they are dropped once it has nothing left to do."""
        self._interrupts.bring(number, requests)

    @note
    def await_no_more(self, number: int) -> None:
        """Have a generation end once it has nothing to do, instead of waiting for more."""
        self._interrupts.let_go(number)

    @verb()
    def score(self, name: str, ids: Compact, lengths: torch.Tensor) -> list[float]:
        """What a component's model gives for inputs that lie end to end."""
        if self._scorers is None:
            raise RuntimeError(f"{self.seat} has no reward model")
        self._phases.enter("score")
        inputs = [part.tolist() for part in ids.opened().split(lengths.tolist())]
        return self._scorers.scores(name, inputs)

    @verb()
    def sleep(self) -> None:
        """Give up the memory of the engine's cache, and of weights of its own."""
        self._need_engine().sleep()
        if self._copy is not None:
            self._copy.empty()

    @verb()
    def wake(self) -> None:
        """Take the cache's back. Weights have theirs since they were moved.

        Raises:
            RunFault: if they were not moved since the engine went to sleep.
        """
        if self._copy is not None and not self._copy.is_filled:
            raise RunFault("the engine wakes without weights", where="weights", why="none were moved since it slept")
        self._need_engine().wake()

    @verb()
    def move_weights(self, version: int) -> None:
        """Bring the actor's weights to the engine; called on all ranks of both."""
        self._phases.enter("sync")
        self._mover.bring(version)

    @verb()
    def refresh_reference(self, version: int) -> None:
        """Bring the actor's weights to the reference; called on all ranks of both."""
        self._phases.enter("reference")
        self._refresher.bring(version)
        self._residents.changed(Role.REFERENCE)

    @verb()
    def hold_reference(self) -> dict[str, dict[str, Spec]]:
        """As ``hold_snapshot``, of the reference."""
        model = self._models[Role.REFERENCE]
        self._reference = MeshSnapshot.take(model)
        return specs_of(held(model)) if is_first(model.mesh) else {}

    @verb()
    def write_reference(self, folder: Path) -> None:
        """As ``write_snapshot``, of the reference."""
        snapshot, self._reference = self._reference, None
        if self._models[Role.REFERENCE].mesh.rank == 0:
            with self._told_if_it_cannot_write():
                write_config(self._models[Role.REFERENCE], folder)
        self._writing = self._writer.submit(snapshot.write, folder)

    @verb()
    def hold_snapshot(self) -> dict[str, dict[str, Spec]]:
        """Copy what this rank writes of a checkpoint to the host's memory; whole tensors of its stages, told by one rank."""
        self._phases.enter("save")
        self.snapshot_written(wait=True)
        self._snapshot = MeshSnapshot.take(*self._trained)
        told: dict[str, dict[str, Spec]] = {}
        for model in self._trained:
            told |= specs_of(held(model)) if is_first(model.mesh) else {}
        return told

    @verb()
    def write_snapshot(self, folder: Path) -> None:
        """Begin to write it, into files that are there; rank 0 of each model writes what is no tensor too."""
        snapshot = self._snapshot
        if snapshot is None:
            raise RuntimeError("there is no snapshot to write")
        self._snapshot = None
        for model in self._trained:
            if model.mesh.rank == 0:
                with self._told_if_it_cannot_write():
                    write_config(model, folder)
        self._writing = self._writer.submit(snapshot.write, folder)

    @verb()
    def snapshot_written(self, wait: bool = False) -> bool:
        """Whether nothing is being written any more."""
        writing = self._writing
        if writing is None:
            return True
        if not wait and not writing.done():
            return False
        self._writing = None
        with self._told_if_it_cannot_write():
            writing.result()
        return True

    @contextmanager
    def _told_if_it_cannot_write(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFault(
                f"{self.seat} cannot write its part of a checkpoint",
                where=str(error.filename or self.settings.run_dir),
                why=error.strerror or str(error),
                fix="make room, or see that every node has the folder; the run goes on with --resume",
            ) from error

    def close(self) -> None:
        """End the thread that writes, and give up what is on disk."""
        self._writer.shutdown()
        if self._residents is not None:
            self._residents.close()

    def _note_memory(self, record: Mapping[str, Any]) -> None:
        self._noted.append({**record, "rank": self.seat.rank})

    def _need_engine(self) -> ReplicaEngine:
        if self._engine is None:
            raise RuntimeError(f"{self.seat} has no engine")
        return self._engine

    def _seed_dropout(self, model: MeshModel) -> None:
        """Dropout of adapters follows from the update and the part of the data, so that a run that is resumed repeats it."""
        updates = 0 if model.optimizer is None else model.optimizer.updates
        digest = hashlib.blake2b(
            f"dropout/{self.settings.seed}/{updates}/{model.mesh.data_place}".encode(), digest_size=8
        )
        torch.manual_seed(int.from_bytes(digest.digest(), "little") >> 1)
