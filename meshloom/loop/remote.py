"""The stage of a reinforcement-learning run whose roles are on workers.

Owns: rollouts in the background where engines have devices of their own, checkpoints that all ranks write, memory that all
ranks report. Refuses to know: how models are cut, how workers are started. Always holds: the algorithm is that of ``loop.rl``,
whose class this is; where engine and trainer share devices they take turns as in one process.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from meshloom.config.errors import RunFault
from meshloom.fabric.groups import WorkerGroup
from meshloom.fabric.workers import Workers
from meshloom.loop.held import HeldSamples
from meshloom.loop.model_role import COMPUTE_DEADLINE_S
from meshloom.loop.rl import RLStage
from meshloom.loop.roles import Lesson
from meshloom.loop.stage import Attempt, Draw, Group, Job
from meshloom.observe.timing import PhaseClock
from meshloom.plan.residency import Phase
from meshloom.samples import Samples
from meshloom.train.shared_files import Spec, create

_SAVE_DEADLINE_S = 3600.0
_LOOK_S = 0.05
_SMALL_DEADLINE_S = 300.0


@dataclass(frozen=True)
class StartedJob:
    """A rollout that is on while others work.

    Args:
        stage: whose it is.
        found: what it gives.
    """

    stage: "RemoteStage"
    found: "Future[Attempt[Samples]]"

    def collect(self) -> Attempt[Group[Samples]]:
        """Wait for it."""
        with self.stage.session.clock.phase("generate"):
            found = self.found.result()
        return self.stage.collected(found)


@dataclass
class RemoteStage(RLStage):
    """The roles of a run on many devices.

    Args:
        trained_group: ranks of the models that are trained.
        held: what ranks hold of a step's samples, from its log-probs to its updates.
        background: runs rollouts; none where engine and trainer take turns.
        beside: runs the critic's updates while the actor's are on; none where both share devices.
    """

    trained_group: WorkerGroup | None = None
    held: HeldSamples = field(default_factory=lambda: HeldSamples(()))
    background: ThreadPoolExecutor | None = None
    beside: ThreadPoolExecutor | None = None

    @property
    def takes_turns(self) -> bool:
        return self.background is None

    def begin_rollout(self, draws: Sequence[Draw], version: int) -> Job[Samples]:
        """A rollout of one group for each draw: it begins now if the engine has devices of its own."""
        if self.background is None or self.replay is not None:
            return super().begin_rollout(draws, version)
        collect, deadline_s = self.roles.collector.attempt, self.settings.rollout.deadline_s
        return StartedJob(self, self.background.submit(collect, draws, deadline_s=deadline_s, clock=PhaseClock()))

    def begun(self, batch: Samples) -> Samples:
        """A batch that is about to be judged: ranks keep what they get of it from now on."""
        return self.held.begin(batch, self.pieces)

    def judge(self, groups: Sequence[Group[Samples]]) -> Samples:
        """As of ``RLStage``; what ranks keep of a step's samples they keep from here to the end of ``learn``."""
        with self.held.ended_by_failure():
            return super().judge(groups)

    def learn(self, batch: Samples, version: int) -> Lesson:
        """The updates of a step, whose samples are kept no longer then."""
        with self.held.ended_by_failure():
            lesson = self._learned(batch, version)
        self.held.end()
        return lesson

    def _learned(self, batch: Samples, version: int) -> Lesson:
        """The updates; the critic's and the actor's at once, where they have devices of their own."""
        if self.beside is None:
            return super().learn(batch, version)
        updates = self.updates(batch)
        with self.session.clock.phase("update"):
            self.enter(Phase.UPDATE)
        values = self.beside.submit(self.value_updates, updates)
        lesson = self.policy_updates(updates, version)
        with self.session.clock.phase("critic"):
            return replace(lesson, critic=values.result())

    def snapshot_of_reference(self) -> "RemoteSnapshot":
        return snapshot_of(self.roles.reference.ranks.group, self.tokenizer, "reference")

    def snapshot_of_trained(self) -> "RemoteSnapshot":
        """The models that are trained as they are now, copied by each rank to its host's memory."""
        return snapshot_of(self.trained_group, self.tokenizer)


@dataclass(frozen=True)
class RemoteSnapshot:
    """Models between two steps, in the memory of their ranks' hosts.

    Args:
        group: their ranks.
        files: whole tensors, by file and name.
        tokenizer: written beside each model.
        what: as in ``snapshot_of``.
    """

    group: WorkerGroup
    files: Mapping[str, Mapping[str, Spec]]
    tokenizer: PreTrainedTokenizerBase
    what: str = "snapshot"

    @property
    def num_bytes(self) -> int:
        """What the files take."""
        return sum(spec.num_bytes for specs in self.files.values() for spec in specs.values())

    def write(self, folder: Path) -> None:
        """Let every rank write its parts; returns when all are on the disk. Verbs of the step go on meanwhile.

        Raises:
            WorkerFault: if a rank cannot write.
            RunFault: if one has not written in time: a disk that does not answer holds its thread for ever.
        """
        for name, specs in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            create(folder / name, specs)
        for of_model in {(folder / name).parent for name in self.files} - {folder}:
            self.tokenizer.save_pretrained(of_model)
        self.group.call(f"write_{self.what}", {"folder": folder.absolute()}, phase="save", deadline_s=_SAVE_DEADLINE_S)
        until = time.monotonic() + _SAVE_DEADLINE_S
        while not all(self.group.call("snapshot_written", phase="save", deadline_s=_SAVE_DEADLINE_S)):
            if time.monotonic() > until:
                what = f"a checkpoint was not written within {_SAVE_DEADLINE_S:g} s"
                raise RunFault(
                    what, where=str(folder), fix="see whether that disk answers; the run goes on with --resume"
                )
            time.sleep(_LOOK_S)


def snapshot_of(group: WorkerGroup, tokenizer: PreTrainedTokenizerBase, what: str = "snapshot") -> RemoteSnapshot:
    """A model as it is now, copied by each rank to its host's memory.

    Args:
        group: ranks of the model.
        tokenizer: written beside it.
        what: ``snapshot`` of what is trained, or ``reference``.
    """
    files: dict[str, dict[str, Spec]] = {}
    for told in group.call(f"hold_{what}", phase="save", deadline_s=_SAVE_DEADLINE_S):
        for name, specs in told.items():
            files.setdefault(name, {}).update(specs)
    return RemoteSnapshot(group, files, tokenizer, what)


class RemoteResidents:
    """Who is where in a phase, on all devices of models: see ``loop.residents.Residents``.

    Args:
        group: ranks of the models.
        log: takes each rank's record of a boundary.
    """

    def __init__(self, group: WorkerGroup, log: Any) -> None:
        self._group, self._log = group, log

    def enter(self, phase: str, *, step: int, why: str = "") -> None:
        """Make everything be where the plan has it in a phase."""
        told = self._group.call(
            "enter", {"phase": phase, "step": step, "why": why}, phase=str(phase), deadline_s=COMPUTE_DEADLINE_S
        )
        for records in told:
            for record in records:
                self._log(record)

    def changed(self, role: str) -> None:
        """Ranks note it themselves."""


class RankMemory:
    """Most memory that each device has held, for the records of a run.

    Args:
        workers: of the run.
        asked: ranks that are free between steps.
        told: what those that are not told when they last generated.
    """

    def __init__(self, workers: Workers, asked: Sequence[int], told: Mapping[int, Mapping[str, float]]) -> None:
        self._workers, self._asked, self._told = workers, list(asked), told

    def metrics(self) -> dict[str, float]:
        """The largest of all ranks, in all and in each phase, and each rank's in all."""
        answers = self._workers.call("memory", ranks=self._asked, phase="report", deadline_s=_SMALL_DEADLINE_S)
        largest: dict[str, float] = {}
        of_ranks: dict[int, float] = {}
        for rank, held in (*self._told.items(), *zip(self._asked, answers, strict=True)):
            largest |= {name: max(most, largest.get(name, 0.0)) for name, most in held.items()}
            of_ranks[rank] = held["peak_memory_bytes"]
        return largest | {f"peak_memory_bytes/rank{rank}": most for rank, most in sorted(of_ranks.items())}
