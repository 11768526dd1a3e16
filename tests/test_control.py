"""The control of a run: what comes after what, how far rollouts run ahead, what a resumed run does again."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from meshloom.config.errors import RunFault
from meshloom.data.order import PromptOrder
from meshloom.loop.control import ControlLoop, Schedule
from meshloom.loop.stage import Attempt, Draw, Group, Progress, StepDone


@dataclass
class Updates:
    num_updates: int


@dataclass
class Script:
    """A stage that notes what it is asked; groups are the numbers of their draws, made by the version that began them."""

    updates: int = 1
    late: dict[int, int] = field(default_factory=dict)
    stop_after: int = 10**9
    log: list[str] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    saved: list[tuple[dict[str, Any], list[Group[int]]]] = field(default_factory=list)
    reports: list[StepDone[Any, Any]] = field(default_factory=list)
    begun: int = 0

    @property
    def stop_wanted(self) -> bool:
        return len(self.trained) >= self.stop_after

    def begin_rollout(self, draws: Sequence[Draw], version: int) -> "ScriptedJob":
        self.begun += 1
        self.log.append(f"begin {self.begun} with {version}")
        return ScriptedJob(self, self.begun, draws, version)

    def judge(self, groups: Sequence[Group[int]]) -> list[int]:
        self.log.append("judge")
        return [group.content for group in groups]

    def learn(self, batch: list[int], version: int) -> Updates:
        self.log.append("learn")
        self.trained.append(batch)
        return Updates(self.updates)

    def sync(self, version: int) -> None:
        self.log.append(f"sync {version}")

    def report(self, done: StepDone[Any, Any]) -> None:
        self.log.append("report")
        self.lags.append(done.lag)
        self.reports.append(done)

    def validate(self, step: int) -> float | None:
        self.log.append("validate")
        return None

    def save(self, progress: Progress, waiting: Sequence[Group[int]], score: float | None) -> None:
        self.log.append("save")
        self.saved.append((progress.values(), list(waiting)))


@dataclass
class ScriptedJob:
    stage: Script
    number: int
    draws: Sequence[Draw]
    version: int

    def collect(self) -> Attempt[Group[int]]:
        """Draws that are late are left over as often as the script says."""
        self.stage.log.append(f"collect {self.number}")
        late = self.stage.late
        unfinished = [draw for draw in self.draws if late.get(draw.number, 0) > 0]
        for draw in unfinished:
            late[draw.number] -= 1
        done = [draw.number for draw in self.draws if draw not in unfinished]
        return Attempt({number: Group(number, self.version, number) for number in done}, unfinished)


def control_of(stage: Script, *, steps: int = 4, prompts: int = 4, lag: int = 0, **more: Any) -> ControlLoop:
    schedule = Schedule(
        steps=steps, prompts_per_step=prompts, updates_per_step=stage.updates, max_lag_versions=lag, **more
    )
    return ControlLoop(schedule, stage, PromptOrder(10, seed=1, shuffle=True))


def test_without_a_lag_each_rollout_begins_after_the_sync_before_it() -> None:
    stage = Script()
    assert control_of(stage, steps=2, validate_first=True, save_every=1).run()
    assert stage.log == [
        *["validate", "begin 1 with 0", "collect 1", "judge", "learn", "sync 1", "report", "save"],
        *["begin 2 with 1", "collect 2", "judge", "learn", "sync 2", "report", "validate", "save"],
    ]
    assert stage.lags == [0, 0]


@pytest.mark.parametrize(("saves", "validates"), [(True, True), (False, True), (True, False), (False, False)])
def test_the_last_step_is_saved_and_validated_only_where_that_is_wanted(saves: bool, validates: bool) -> None:
    stage = Script()
    assert control_of(stage, steps=3, save_last=saves, validate_last=validates).run()
    assert (stage.log.count("save"), stage.log.count("validate")) == (int(saves), int(validates))
    due = Script()
    control_of(due, steps=4, save_every=2, validate_every=4, save_last=saves, validate_last=validates).run()
    assert (due.log.count("save"), due.log.count("validate")) == (2, 1)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_with_a_lag_rollouts_begin_so_many_versions_ahead_and_none_is_staler(lag: int) -> None:
    stage = Script()
    control = control_of(stage, steps=8, lag=lag)
    assert control.run()
    begun = [line for line in stage.log if line.startswith("begin")]
    assert begun == [f"begin {job} with {max(0, job - 1 - lag)}" for job in range(1, 9)]
    assert stage.lags == [min(step, lag) for step in range(8)]
    assert [number for batch in stage.trained for number in batch] == list(range(32))
    # The rollouts of later steps are begun before the one of this step is waited for.
    assert stage.log.index(f"begin {1 + lag} with 0") < stage.log.index("collect 1")
    assert control.buffer.dropped_stale == 0


@pytest.mark.parametrize(("updates", "lag", "ahead"), [(2, 1, 0), (2, 2, 1), (2, 5, 2), (4, 3, 0)])
def test_a_lag_counts_versions_of_which_a_step_makes_several(updates: int, lag: int, ahead: int) -> None:
    stage = Script(updates=updates)
    control = control_of(stage, steps=6, lag=lag)
    assert control.schedule.steps_ahead == ahead
    control.run()
    assert max(stage.lags) == ahead * updates <= lag


def test_unfinished_draws_are_tried_once_more_and_then_dropped_in_the_order_of_prompts() -> None:
    stage = Script(late={1: 1, 5: 2, 6: 1})
    control_of(stage, steps=2).run()
    assert stage.trained == [[0, 1, 2, 3], [4, 6, 7]]
    assert [(done.retried, done.dropped) for done in stage.reports] == [(1, 0), (2, 1)]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_without_a_group_ends_the_run(lag: int) -> None:
    stage = Script(late=dict.fromkeys(range(4, 8), 2))
    with pytest.raises(RunFault, match="no group of this step was finished"):
        control_of(stage, lag=lag, deadline_s=5.0).run()
    assert len(stage.trained) == 1


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_stopped_run_goes_on_as_if_it_had_not(lag: int, stop: int) -> None:
    """What was in flight is finished and saved, with the versions that made it."""
    whole = Script()
    undisturbed = control_of(whole, steps=6, lag=lag)
    undisturbed.run()
    first = Script(stop_after=stop)
    assert not control_of(first, steps=6, lag=lag).run()
    assert first.log[-1] == "save"
    assert first.begun == sum(line.startswith("collect") for line in first.log) == stop + lag
    values, waiting = first.saved[-1]
    second = Script()
    control = control_of(second, steps=6, lag=lag)
    control.load(Progress.of(values), waiting)
    assert control.run()
    assert first.trained + second.trained == whole.trained
    assert first.lags + second.lags == whole.lags
    assert control.progress() == undisturbed.progress()


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    steps=st.integers(1, 9),
    prompts=st.integers(1, 5),
    updates=st.integers(1, 3),
    lag=st.integers(0, 7),
    late=st.dictionaries(st.integers(0, 45), st.integers(1, 2), max_size=8),
    stops=st.lists(st.integers(1, 9), max_size=3),
)
def test_every_draw_is_trained_on_once_or_dropped_and_none_is_too_old(
    steps: int, prompts: int, updates: int, lag: int, late: dict[int, int], stops: list[int]
) -> None:
    """Stopped and resumed anywhere, with any draws late."""
    trained: list[int] = []
    left, waiting = None, ()
    late, given_late = dict(late), late
    for stop in [*stops, 10**9]:
        stage = Script(updates=updates, late=late, stop_after=stop)
        control = control_of(stage, steps=steps, prompts=prompts, lag=lag)
        if left is not None:
            control.load(Progress.of(left), waiting)
        try:
            done = control.run()
        except RunFault:
            assert 2 in given_late.values()
            return
        assert max(stage.lags, default=0) <= lag
        assert all(len(batch) <= prompts for batch in stage.trained)
        trained += [number for batch in stage.trained for number in batch]
        progress = control.progress()
        assert done == (control.step == steps)
        if done:
            break
        left, waiting = progress.values(), control.buffer.groups
    assert done
    assert trained == sorted(set(trained))
    assert not control.buffer.groups
    dropped = set(range(control.draws)) - set(trained)
    assert control.draws == steps * prompts
    assert dropped == {number for number, tries in given_late.items() if tries == 2 and number < control.draws}
    assert control.step == steps


def test_tries_of_rollouts_that_were_saved_are_reported_by_the_step_that_trains_on_them() -> None:
    first = Script(stop_after=1, late={5: 1, 6: 2})
    control_of(first, steps=3, lag=1).run()
    values, waiting = first.saved[-1]
    assert (first.reports[0].retried, first.reports[0].dropped) == (0, 0)
    second = Script()
    control = control_of(second, steps=3, lag=1)
    control.load(Progress.of(json.loads(json.dumps(values))), waiting)
    control.run()
    assert [(done.retried, done.dropped) for done in second.reports] == [(2, 1), (0, 0)]


def test_groups_that_are_too_old_on_resume_are_counted_and_replaced() -> None:
    stage = Script()
    control = control_of(stage, steps=5, lag=1)
    order = PromptOrder(10, seed=1, shuffle=True)
    order.take(20)
    waiting = [Group(number, version, number) for number, version in enumerate([1, 3, 1, 2])]
    control.load(Progress(step=3, version=3, draws=20, order=order.state(), waiting=(4,)), waiting)
    control.run()
    assert control.buffer.dropped_stale == 2
    assert stage.trained[0] == [1, 3, 20, 21]
    assert max(stage.lags) == 1


def test_the_control_imports_without_torch() -> None:
    code = "import sys, meshloom.loop.control; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
