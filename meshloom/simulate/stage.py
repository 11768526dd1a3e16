"""The stage of a run on virtual devices: every call of the control loop takes virtual time.

Owns: the clock of a simulated run, and what is counted along it. Refuses to know: what comes after what (``loop.control``), how
long anything takes (``simulate.costs``). Always holds: the clock never goes back; nothing depends on the time of this machine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshloom.loop.stage import Attempt, Draw, Group, Progress, StepDone
from meshloom.simulate.costs import Costs, Spent
from meshloom.simulate.engine import Made, Rollout, VirtualEngine


@dataclass(frozen=True)
class VirtualJob:
    """A rollout that was begun."""

    stage: "VirtualStage"
    rollout: Rollout

    def collect(self) -> Attempt[Group[Made]]:
        """Let time pass until all of it is finished and scored."""
        stage = self.stage
        at, found = stage.engine.collect(self.rollout, stage.now)
        stage.counts.waited_s += at - stage.now
        stage.now = at
        return found


@dataclass(frozen=True)
class Updates:
    """The updates of a step."""

    num_updates: int


@dataclass
class Counts:
    """What has happened so far.

    Args:
        worked_s: seconds of each role that computes with a model.
        generated_s: of the replicas, on average.
        slots_s: seconds of slots in use, over all replicas.
        waited_s: in which training waited for a rollout.
        synced_s: from the wish to move weights until they are there.
        tokens: of prompts and responses as a run counts them: a prompt in each sample, and greedy responses too.
        response_tokens: of all responses.
        samples: trained on.
        lags: how many samples were so many versions older than the weights that they began to train.
        retried: groups that were tried again.
        dropped: groups that were given up, or too old.
        rounds: of dynamic sampling.
    """

    worked_s: Counter[str] = field(default_factory=Counter)
    generated_s: float = 0.0
    slots_s: float = 0.0
    waited_s: float = 0.0
    synced_s: float = 0.0
    tokens: int = 0
    response_tokens: int = 0
    samples: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    retried: int = 0
    dropped: int = 0
    rounds: int = 0

    def since(self, before: "Counts") -> "Counts":
        """What has happened since."""
        numbers = {
            name: value - getattr(before, name) for name, value in vars(self).items() if not isinstance(value, Counter)
        }
        worked, lags = Counter(self.worked_s), Counter(self.lags)
        worked.subtract(before.worked_s)
        lags.subtract(before.lags)
        return Counts(worked_s=worked, lags=+lags, **numbers)

    def copy(self) -> "Counts":
        return self.since(Counts())


@dataclass(frozen=True)
class Mark:
    """The end of a step."""

    now: float
    counts: Counts


@dataclass
class VirtualStage:
    """Virtual devices.

    Args:
        costs: of the run.
        engine: that generates.
        updates_per_step: versions that a step makes.
        marks: takes the counts at the end of the steps that it names.
        until: steps after which the run shall stop.
        warmup_steps: in which the critic alone learns.
    """

    costs: Costs
    engine: VirtualEngine
    updates_per_step: int
    marks: dict[int, Mark | None]
    until: int
    warmup_steps: int = 0
    now: float = 0.0
    step: int = 0
    ends: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    @property
    def stop_wanted(self) -> bool:
        return self.step >= self.until

    def begin_rollout(self, draws: Sequence[Draw], version: int) -> VirtualJob:
        return VirtualJob(self, self.engine.begin(draws, self.now))

    def judge(self, groups: Sequence[Group[Made]]) -> list[Made]:
        batch = [group.content for group in groups]
        self._spend(self.costs.scoring(batch))
        self._spend(self.costs.judging(batch))
        return batch

    def learn(self, batch: list[Made], version: int) -> Updates:
        for made in batch:
            self.counts.lags.update(version - sampled for sampled in made.versions)
            self.counts.response_tokens += sum(made.drawn.responses)
            self.counts.tokens += made.drawn.prompt * len(made.versions) + sum(made.drawn.responses)
            self.counts.samples += len(made.versions)
        is_warming_up = self.step < self.warmup_steps
        self._spend(self.costs.learning(batch, only_critic=is_warming_up))
        return Updates(0 if is_warming_up else self.updates_per_step)

    def sync(self, version: int) -> None:
        """Weights move as soon as the engine lets them in; training waits for that."""
        moved = self.engine.take_weights(version, self.now, self.costs.sync_s)
        self.counts.synced_s += moved - self.now
        if self.costs.apart:
            self.counts.worked_s["actor"] += self.costs.sync_s
        self.now = moved

    def report(self, done: StepDone[list[Made], Updates]) -> None:
        self.now += self.costs.beside_s
        self.step = done.step
        self.ends.append(self.now)
        self.counts.retried += done.retried
        self.counts.dropped += done.dropped
        self.counts.rounds += 1 if done.sifted is None else done.sifted.rounds
        if done.step in self.marks:
            self.engine.advance(self.now)
            replicas = self.engine.replicas
            self.counts.generated_s = sum(replica.busy_s for replica in replicas) / len(replicas)
            self.counts.slots_s = sum(replica.slot_s for replica in replicas)
            self.marks[done.step] = Mark(self.now, self.counts.copy())

    def validate(self, step: int) -> float | None:
        """Validation is not simulated."""

    def save(self, progress: Progress, waiting: Sequence[Group[Made]], score: float | None) -> None:
        """Nothing is kept."""

    def _spend(self, spent: Spent) -> None:
        """Let training work; on devices that generate, once they are free."""
        self.now = self.engine.lend(self.now, spent.seconds) if spent.among_engines else self.now + spent.seconds
        self.counts.worked_s.update(spent.by_role)
