"""What the control loop asks of whatever runs a run's roles: one process, many devices, or a simulation.

Owns: the protocol between ``loop.control`` and a stage, and the plain records that cross it. Refuses to know: tensors, models,
engines, devices, clocks; what a group, a batch or an update holds is the stage's own, and passes through the control unread.
No torch here. Always holds: a record says which draw and which weights version made it, so order, retries, lag and resume need
nothing else.

A stage is asked in this order, and never by two callers at once::

    validate                                       before the first step, if the settings say so
    each step:  begin_rollout ...                  as many jobs as the lag allows; returns at once
                job.collect                        waits for the oldest job (unfinished draws: one more job, collected at once)
                judge, learn, sync                 sync ends when jobs that begin later sample with the new weights
                report, validate                   as due
                job.collect ..., save              as due, and at the end

With a lag of 0 one job is in flight at most, and it begins after ``sync``: the same engine and devices may serve both sides.
With a lag, jobs are in flight during ``judge`` to ``save``. Those that are in flight at ``sync`` go on; their later tokens may
come from the old weights or the new ones, and each group says its oldest. Before ``save`` all jobs are collected, so that a
run that is resumed trains on the very samples that it would have trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

ContentT = TypeVar("ContentT")
GroupT = TypeVar("GroupT")
BatchT = TypeVar("BatchT")
LearnedT = TypeVar("LearnedT", bound="Learned")


@dataclass(frozen=True)
class Draw:
    """One use of a prompt: the group it makes.

    Args:
        number: counts all draws of a run; seeds follow from it, so a repeated draw repeats itself.
        prompt: index of the prompt in its source.
    """

    number: int
    prompt: int


class Spread(StrEnum):
    """Whether the rewards of a group tell its samples apart."""

    SOME = "some"
    """They differ."""
    ALL_RIGHT = "all_right"
    """All are the same, and solve the prompt."""
    ALL_WRONG = "all_wrong"
    """All are the same, and do not."""
    TOO_FEW = "too_few"
    """Fewer than two samples have a valid reward."""


@dataclass(frozen=True)
class Group(Generic[ContentT]):
    """A finished group of samples.

    Args:
        number: of its draw.
        oldest_version: of the weights that sampled its oldest token.
        content: the stage's own: the samples, or where they are.
        spread: of its rewards.
    """

    number: int
    oldest_version: int
    content: ContentT
    spread: Spread = Spread.SOME


@dataclass(frozen=True)
class Attempt(Generic[GroupT]):
    """What a job gave.

    Args:
        groups: finished, by the number of their draw.
        unfinished: draws without a whole group at the deadline.
    """

    groups: Mapping[int, GroupT]
    unfinished: Sequence[Draw] = ()


@dataclass(frozen=True)
class Collected(Generic[GroupT]):
    """What the draws of a job gave in the end.

    Args:
        groups: in the order of their draws.
        dropped: draws that were unfinished twice.
        retried: how many were unfinished once.
    """

    groups: Sequence[GroupT] = ()
    dropped: Sequence[Draw] = ()
    retried: int = 0


class Job(Protocol[ContentT]):
    """A rollout that was begun."""

    def collect(self) -> Attempt[Group[ContentT]]:
        """Wait until every draw is finished and scored, or the job's deadline has passed."""
        ...


class Learned(Protocol):
    """What the updates of a step did."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates that were made; each is a weights version."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sifted:
    """What dynamic sampling did for a step.

    Args:
        rounds: of generation that it took.
        filtered: groups without spread, by why.
        missing: groups that the step has fewer than it should, as its rounds were used up.
        surplus: groups with spread that wait for the next step.
        is_flat: whether the step has groups without spread, as no round gave another.
    """

    rounds: int = 0
    filtered: Mapping[Spread, int] = field(default_factory=dict)
    missing: int = 0
    surplus: int = 0
    is_flat: bool = False


@dataclass(frozen=True, kw_only=True)
class StepDone(Generic[BatchT, LearnedT]):
    """A step that is over.

    Args:
        step: its number, from 1.
        version: of the weights after it.
        epoch: passes over the prompts that have been drawn, with their fraction.
        batch: as judged.
        learned: by its updates.
        lag: versions that the oldest token of the batch was behind the weights it began to train.
        retried: draws that needed another job.
        dropped: draws that were given up.
        stale: groups that were too old to be trained on, since the run began.
        sifted: what dynamic sampling did; none without it.
    """

    step: int
    version: int
    epoch: float
    batch: BatchT
    learned: LearnedT
    lag: int
    retried: int
    dropped: int
    stale: int
    sifted: Sifted | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands between two steps: all that the control decides by.

    Args:
        step: steps done.
        version: of the weights.
        draws: made so far.
        order: of the prompts, as ``PromptOrder.state``.
        stale: groups that were too old to be trained on.
        surplus: groups that were generated beyond what a step needed.
        waiting: groups that wait for each of the next steps; with dynamic sampling those of each round.
        retried: draws that needed another job, and no step has reported yet.
        dropped: draws that were given up, and no step has reported yet.
    """

    step: int
    version: int
    draws: int
    order: dict[str, Any]
    stale: int = 0
    surplus: int = 0
    waiting: tuple[int, ...] = ()
    retried: int = 0
    dropped: int = 0

    def values(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "waiting": list(self.waiting)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Progress":
        """What ``values`` gave, among other values or alone."""
        given = {each.name: values[each.name] for each in fields(cls)}
        return cls(**{**given, "waiting": tuple(given["waiting"])})


class Stage(Protocol[ContentT, BatchT, LearnedT]):
    """Runs the roles of a run. Every wait inside of it has a deadline; a fault is raised, and ends the run."""

    @property
    def stop_wanted(self) -> bool:
        """Whether the run shall end at the next boundary, saved. Looked at between steps only."""
        ...

    def begin_rollout(self, draws: Sequence[Draw], version: int) -> Job[ContentT]:
        """Begin to generate and score a group for each draw, with the weights of ``version`` or newer ones."""
        ...

    def judge(self, groups: Sequence[Group[ContentT]]) -> BatchT:
        """Make a batch to learn from: log-probs, values, advantages. The groups stand in the order of their draws."""
        ...

    def learn(self, batch: BatchT, version: int) -> LearnedT:
        """Make the updates of a step, on weights of ``version``."""
        ...

    def sync(self, version: int) -> None:
        """The weights are of ``version`` now: the engines get them."""
        ...

    def report(self, done: StepDone[BatchT, LearnedT]) -> None:
        """Write what a step was."""
        ...

    def validate(self, step: int) -> float | None:
        """Validate the present weights; the score by which checkpoints are compared, if there is one."""
        ...

    def save(self, progress: Progress, waiting: Sequence[Group[ContentT]], score: float | None) -> None:
        """Write everything that decides the future, with the groups that wait to be trained on."""
        ...
