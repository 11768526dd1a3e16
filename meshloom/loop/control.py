"""The control of a reinforcement-learning run: what comes after what.

Owns: the order of a run (roll out, judge, learn, sync, report, validate, save), how far rollouts run ahead, the bounded buffer,
retries and drops, the wish to stop, where a run stands. Refuses to know: tensors, models, engines, devices, files, clocks; a
``Stage`` does the work. No torch here, so that a simulation runs this very class. Always holds: every draw is trained on once,
dropped and counted, or in the buffer when the run is saved; nothing is in flight then; nothing is trained on that is more than
``max_lag_versions`` behind, but for what dynamic sampling has made beyond a step's need.

With dynamic sampling a step may take several rollouts, called rounds, and what they give beyond its need waits for the next
step (``loop.sieve``); as many rounds run ahead as steps would.

Synchronous training is asynchronous training with a lag of zero: the rollout of a step is begun as soon as it is sure to be
fresh enough when its turn comes. A step makes ``updates_per_step`` versions at most, so rollouts may be ``max_lag_versions //
updates_per_step`` steps ahead of the step that is trained; with none ahead, a rollout begins after the sync of the step before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshloom.config.errors import RunFault
from meshloom.config.settings import TrainSettings
from meshloom.data.order import PromptOrder
from meshloom.loop.buffer import GroupBuffer
from meshloom.loop.sieve import Sieve, SieveRule
from meshloom.loop.stage import Attempt, Collected, Draw, Group, Job, Progress, Sifted, Stage, StepDone
from meshloom.plan.lag import most_updates

GroupT = TypeVar("GroupT")


def due(every_steps: int, step: int) -> bool:
    """Whether something that is done every so many steps (0: never) is done after a step."""
    return every_steps > 0 and step % every_steps == 0


def tried_twice(
    draws: Sequence[Draw], first: Attempt[GroupT], again: Callable[[Sequence[Draw]], Attempt[GroupT]]
) -> Collected[GroupT]:
    """What draws give in the end: those that were unfinished are tried once more, then dropped.

    Args:
        draws: all of them.
        first: what they gave at first.
        again: tries some of them once more.
    """
    groups, dropped = dict(first.groups), first.unfinished
    if first.unfinished:
        second = again(first.unfinished)
        groups |= second.groups
        dropped = second.unfinished
    in_order = [groups[draw.number] for draw in draws if draw.number in groups]
    return Collected(in_order, tuple(dropped), retried=len(first.unfinished))


def nothing_finished(dropped: int, deadline_s: float) -> RunFault:
    """What ends a run one of whose steps has no group: so many prompts were given up."""
    return RunFault(
        "no group of this step was finished",
        where="rollout.deadline_s",
        why=f"{dropped} prompts ran out of {deadline_s:g} s twice",
        fix="a longer deadline, shorter responses, or fewer prompts a step",
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The numbers of a run that the control goes by.

    Args:
        steps: of the whole run.
        prompts_per_step: that a step consumes.
        updates_per_step: optimizer updates of a step, at most.
        max_lag_versions: how many versions a token may be older than the weights it trains.
        validate_first: validate before the first step.
        validate_every: steps; 0 for none between the first and the last.
        validate_last: validate after the last step in any case.
        save_every: steps; 0 for at the end only.
        save_last: save the last step in any case; a run that is stopped before saves where it is.
        deadline_s: of a rollout, named where nothing was finished in it.
        sieve: numbers of dynamic sampling; none without it.
    """

    steps: int
    prompts_per_step: int
    updates_per_step: int = 1
    max_lag_versions: int = 0
    validate_first: bool = False
    validate_every: int = 0
    validate_last: bool = True
    save_every: int = 0
    save_last: bool = True
    deadline_s: float = float("inf")
    sieve: SieveRule | None = None

    @classmethod
    def of(cls, settings: TrainSettings, steps: int) -> "Schedule":
        """Of a run's settings."""
        return cls(
            sieve=sieve_rule(settings),
            steps=steps,
            prompts_per_step=settings.batch.prompts_per_step,
            updates_per_step=most_updates(settings.batch),
            max_lag_versions=settings.algorithm.max_lag_versions,
            validate_first=settings.validation.before_training,
            validate_every=settings.validation.every_steps,
            validate_last=settings.validation.after_training,
            save_every=settings.checkpoint.every_steps,
            save_last=settings.checkpoint.at_end,
            deadline_s=settings.rollout.deadline_s,
        )

    @property
    def steps_ahead(self) -> int:
        """Steps whose rollouts may be in flight, beside the step that is trained next."""
        return self.max_lag_versions // self.updates_per_step

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts that are drawn at once: those of a step, or of a round."""
        return self.prompts_per_step if self.sieve is None else self.sieve.prompts_per_round


def sieve_rule(settings: TrainSettings) -> SieveRule | None:
    """The numbers of dynamic sampling, where the settings ask for it."""
    given, batch = settings.algorithm.filter_groups, settings.batch
    if not given.enabled:
        return None
    return SieveRule(
        prompts_per_step=batch.prompts_per_step,
        prompts_per_round=given.prompts_per_round or batch.prompts_per_step,
        max_rounds=given.max_rounds,
        max_age_versions=settings.algorithm.max_lag_versions + given.surplus_steps * most_updates(batch),
    )


@dataclass(frozen=True)
class _Flight:
    """A job and its draws."""

    draws: tuple[Draw, ...]
    job: Job[Any]


@dataclass
class ControlLoop:
    """A run and where it stands.

    Args:
        schedule: its numbers.
        stage: that does the work.
        order: of the prompts, already where the run stands.
        step: steps done.
        version: of the weights: optimizer updates made.
        draws: prompts drawn so far.
        saved_step: step of the newest checkpoint, 0 before the first.
        score: of the validation after this step, if there was one.
        retried: draws that needed another job, and no step has reported yet.
        dropped: draws that were given up, and no step has reported yet.
    """

    schedule: Schedule
    stage: Stage[Any, Any, Any]
    order: PromptOrder
    step: int = 0
    version: int = 0
    draws: int = 0
    saved_step: int = 0
    score: float | None = None
    retried: int = 0
    dropped: int = 0
    buffer: GroupBuffer = field(init=False)
    sieve: Sieve | None = field(init=False, default=None)
    _flights: deque[_Flight] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.buffer = GroupBuffer(self.schedule.max_lag_versions)
        if self.schedule.sieve is not None:
            self.sieve = Sieve(self.schedule.sieve)

    def run(self) -> bool:
        """Train until the last step or the wish to stop; whether the last step was reached."""
        schedule, stage = self.schedule, self.stage
        if self.step == 0 and schedule.validate_first and not stage.stop_wanted:
            self.score = stage.validate(self.step)
        while self.step < schedule.steps and not stage.stop_wanted:
            self.roll_out()
            self.train()
            is_last = schedule.validate_last and self.step == schedule.steps
            if is_last or due(schedule.validate_every, self.step):
                self.score = stage.validate(self.step)
            if due(schedule.save_every, self.step):
                self.save()
        if self.step > self.saved_step and (schedule.save_last or self.step < schedule.steps):
            self.save()
        return self.step == schedule.steps

    def roll_out(self) -> None:
        """Begin the rollouts that may begin, and wait for the one whose groups the next step needs; with dynamic sampling, for
        as many as it needs.

        Raises:
            RunFault: if none of its groups was finished.
        """
        if self.sieve is not None:
            self._sift(self.sieve)
            return
        lost = self._draw(self.buffer.drop_stale(self.version))
        anew = _Flight(lost, self.stage.begin_rollout(lost, self.version)) if lost else None
        self._begin()
        if anew is not None:
            self.buffer.add(self._collect(anew))
        if not len(self.buffer):
            self.buffer.put(self._collect(self._flights.popleft()))
        self._require_any(bool(self.buffer.steps[0]))

    def _sift(self, sieve: Sieve) -> None:
        """Rounds until the next step has enough groups with spread, or has had all of its rounds."""
        sieve.drop_stale(self.version)
        self._begin()
        while sieve.wants_more:
            if not len(self.buffer):
                self.buffer.put(self._collect(self._flights.popleft()))
            sieve.look(self.buffer.take(), self.version)
            self._begin()
        self._require_any(sieve.has_any)

    def _require_any(self, has_any: bool) -> None:
        if not has_any:
            raise nothing_finished(self.dropped, self.schedule.deadline_s)

    def train(self) -> None:
        """A step on the groups that wait for it: new weights, and the engines have them."""
        sifted: Sifted | None = None
        if self.sieve is None:
            groups = self.buffer.take()
        else:
            groups, sifted = self.sieve.take()
        lag = self.version - min(group.oldest_version for group in groups)
        batch = self.stage.judge(groups)
        learned = self.stage.learn(batch, self.version)
        self.version += learned.num_updates
        self.stage.sync(self.version)
        self.step, self.score = self.step + 1, None
        self.stage.report(
            StepDone(
                step=self.step,
                version=self.version,
                epoch=self.order.epoch + self.order.position / self.order.num_prompts,
                batch=batch,
                learned=learned,
                lag=lag,
                retried=self.retried,
                dropped=self.dropped,
                stale=self._stale,
                sifted=sifted,
            )
        )
        self.retried = self.dropped = 0

    def save(self) -> None:
        """Let the stage write everything that decides the future, once nothing is in flight.

        The next step would wait for the oldest rollout in any case, and those that run ahead are trained on as they are: a run
        that is resumed repeats itself.
        """
        while self._flights:
            self.buffer.put(self._collect(self._flights.popleft()))
        surplus = () if self.sieve is None else self.sieve.kept
        self.stage.save(self.progress(), (*surplus, *self.buffer.groups), self.score)
        self.saved_step = self.step

    def progress(self) -> Progress:
        """Where the run stands."""
        return Progress(
            step=self.step,
            version=self.version,
            draws=self.draws,
            order=self.order.state(),
            stale=self._stale,
            surplus=0 if self.sieve is None else len(self.sieve.kept),
            waiting=tuple(map(len, self.buffer.steps)),
            retried=self.retried,
            dropped=self.dropped,
        )

    def load(self, progress: Progress, waiting: Sequence[Group[Any]]) -> None:
        """Stand where a run was saved.

        Args:
            progress: as saved.
            waiting: groups that were in the buffer.
        """
        self.step, self.version, self.draws = progress.step, progress.version, progress.draws
        self.saved_step = self.step
        self.order.load(progress.order)
        self.buffer.load(waiting[progress.surplus :], progress.waiting, progress.stale)
        if self.sieve is not None:
            self.sieve.kept = list(waiting[: progress.surplus])
        self.retried, self.dropped = progress.retried, progress.dropped

    @property
    def _stale(self) -> int:
        return self.buffer.dropped_stale + (0 if self.sieve is None else self.sieve.dropped_stale)

    def _begin(self) -> None:
        """Begin rollouts for the next steps, as far ahead as their samples are sure to be fresh enough."""
        steps = min(1 + self.schedule.steps_ahead, self.schedule.steps - self.step)
        if self.sieve is not None:
            steps -= self.sieve.steps_ready
        while len(self.buffer) + len(self._flights) < steps:
            draws = self._draw(self.schedule.prompts_per_rollout)
            self._flights.append(_Flight(draws, self.stage.begin_rollout(draws, self.version)))

    def _draw(self, count: int) -> tuple[Draw, ...]:
        first, self.draws = self.draws, self.draws + count
        return tuple(Draw(first + i, prompt) for i, prompt in enumerate(self.order.take(count)))

    def _collect(self, flight: _Flight) -> Sequence[Group[Any]]:
        """Wait for a job; what it gave, once its unfinished draws were tried again."""

        def again(draws: Sequence[Draw]) -> Attempt[Group[Any]]:
            return self.stage.begin_rollout(draws, self.version).collect()

        collected = tried_twice(flight.draws, flight.job.collect(), again)
        self.retried += collected.retried
        self.dropped += len(collected.dropped)
        return collected.groups
