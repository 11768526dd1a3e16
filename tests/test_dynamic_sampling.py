"""Dynamic sampling in the control of a run: rounds, surplus, staleness, bounds, and what a resumed run does again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from meshloom.config.errors import RunFault
from meshloom.data.order import PromptOrder
from meshloom.loop.control import ControlLoop, Schedule
from meshloom.loop.sieve import SieveRule
from meshloom.loop.stage import Attempt, Draw, Group, Progress, Spread
from tests.test_control import Script, ScriptedJob


@dataclass
class SiftedScript(Script):
    """A stage whose draws have spread, or have none, by their numbers: one letter a draw, repeated for ever.

    ``s``: some, ``r``: all right, ``w``: all wrong, ``f``: too few valid rewards.
    """

    letters: str = "s"

    def begin_rollout(self, draws: Sequence[Draw], version: int) -> "SiftedJob":
        self.begun += 1
        self.log.append(f"begin {self.begun} with {version}")
        return SiftedJob(self, self.begun, draws, version)


SPREADS = {"s": Spread.SOME, "r": Spread.ALL_RIGHT, "w": Spread.ALL_WRONG, "f": Spread.TOO_FEW}


class SiftedJob(ScriptedJob):
    def collect(self) -> Attempt[Group[int]]:
        found = super().collect()
        letters = self.stage.letters
        groups = {
            number: Group(number, group.oldest_version, number, SPREADS[letters[number % len(letters)]])
            for number, group in found.groups.items()
        }
        return Attempt(groups, found.unfinished)


def control_of(
    stage: SiftedScript,
    *,
    steps: int = 3,
    prompts: int = 4,
    lag: int = 0,
    each: int = 4,
    rounds: int = 5,
    wait: int = 1,
) -> ControlLoop:
    rule = SieveRule(
        prompts_per_step=prompts,
        prompts_per_round=each,
        max_rounds=rounds,
        max_age_versions=lag + wait * stage.updates,
    )
    schedule = Schedule(
        steps=steps, prompts_per_step=prompts, updates_per_step=stage.updates, max_lag_versions=lag, sieve=rule
    )
    return ControlLoop(schedule, stage, PromptOrder(10, seed=1, shuffle=True))


def test_groups_without_spread_are_replaced_and_the_surplus_is_trained_on_first_in_the_next_step() -> None:
    stage = SiftedScript(letters="srsswsss")
    control_of(stage, steps=2).run()
    # Draws 1 and 4 of every eight have no spread.
    assert stage.trained == [[0, 2, 3, 5], [6, 7, 8, 10]]
    first, second = (done.sifted for done in stage.reports)
    assert (first.rounds, first.filtered, first.surplus) == (2, {Spread.ALL_RIGHT: 1, Spread.ALL_WRONG: 1}, 2)
    assert (second.rounds, second.surplus, second.missing) == (1, 1, 0)
    assert stage.lags == [0, 1]


def test_a_step_whose_surplus_is_enough_generates_nothing() -> None:
    stage = SiftedScript()
    control_of(stage, steps=2, each=8).run()
    assert stage.begun == 1
    assert stage.trained == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [done.sifted.rounds for done in stage.reports] == [1, 0]


def test_rounds_are_bounded_and_the_step_trains_on_what_there_is() -> None:
    stage = SiftedScript(letters="srrrrfww")
    control_of(stage, steps=1, rounds=3).run()
    assert stage.trained == [[0, 8]]
    sifted = stage.reports[0].sifted
    assert (sifted.rounds, sifted.missing, sifted.is_flat) == (3, 2, False)
    assert sifted.filtered == {Spread.ALL_RIGHT: 7, Spread.TOO_FEW: 1, Spread.ALL_WRONG: 2}


def test_a_step_without_any_spread_trains_on_its_last_round_and_says_so() -> None:
    stage = SiftedScript(letters="r")
    control_of(stage, steps=2, rounds=2).run()
    assert stage.trained == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert all(done.sifted.is_flat and done.sifted.missing == 4 for done in stage.reports)


def test_a_surplus_that_no_step_could_use_in_time_is_dropped_and_counted() -> None:
    stage = SiftedScript()
    control = control_of(stage, steps=4, each=16)
    control.run()
    # Of sixteen groups, the first step takes four and the second four that are one version behind; eight are then too old.
    assert stage.trained == [[0, 1, 2, 3], [4, 5, 6, 7], [16, 17, 18, 19], [20, 21, 22, 23]]
    assert [done.stale for done in stage.reports] == [0, 0, 8, 8]
    assert stage.lags == [0, 1, 0, 1]


def test_without_surplus_steps_every_group_is_of_the_present_weights() -> None:
    stage = SiftedScript(letters="sssr")
    control = control_of(stage, steps=3, wait=0)
    control.run()
    assert stage.lags == [0, 0, 0]
    assert stage.reports[-1].stale == 4


@pytest.mark.parametrize("lag", [1, 2])
def test_with_a_lag_rounds_of_later_steps_are_in_flight_while_a_step_trains(lag: int) -> None:
    stage = SiftedScript(letters="ssrr")
    control_of(stage, steps=6, lag=lag).run()
    begun = [i for i, line in enumerate(stage.log) if line.startswith("begin")]
    learnt = [i for i, line in enumerate(stage.log) if line == "learn"]
    before_first = sum(at < learnt[0] for at in begun)
    # Two rounds are needed for a step; as many more as the lag allows have begun.
    assert before_first == 2 + lag
    assert max(stage.lags) <= lag + 1
    assert [len(batch) for batch in stage.trained] == [4] * 6


def test_a_round_in_which_nothing_was_finished_is_one_of_the_steps_rounds() -> None:
    """With few prompts a round, one that missed its deadline twice used to end the run, whatever else there was."""
    stage = SiftedScript(late={5: 2})
    control_of(stage, each=1).run()
    assert [done.dropped for done in stage.reports] == [0, 1, 0]
    assert stage.trained[1] == [4, 6, 7, 8]


def test_a_step_of_which_nothing_was_finished_ends_the_run() -> None:
    stage = SiftedScript(letters="r", late=dict.fromkeys(range(20), 2))
    with pytest.raises(RunFault, match="no group of this step was finished"):
        control_of(stage).run()


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    letters=st.text("srwf", min_size=1, max_size=9),
    steps=st.integers(1, 6),
    prompts=st.integers(1, 4),
    each=st.integers(1, 9),
    rounds=st.integers(1, 3),
    updates=st.integers(1, 2),
    lag=st.integers(0, 4),
    wait=st.integers(0, 2),
    late=st.dictionaries(st.integers(0, 30), st.just(1), max_size=4),
    stops=st.lists(st.integers(1, 5), max_size=3),
)
def test_a_stopped_run_trains_on_the_same_groups_and_every_group_with_spread_is_accounted_for(
    letters: str,
    steps: int,
    prompts: int,
    each: int,
    rounds: int,
    updates: int,
    lag: int,
    wait: int,
    late: dict[int, int],
    stops: list[int],
) -> None:
    numbers: dict[str, Any] = {"steps": steps, "prompts": prompts, "each": each, "rounds": rounds, "lag": lag}
    whole = SiftedScript(updates=updates, letters=letters, late=dict(late))
    undisturbed = control_of(whole, **numbers, wait=wait)
    assert undisturbed.run()
    assert max(whole.lags) <= lag + wait * updates
    trained = [number for batch in whole.trained for number in batch]
    assert trained == sorted(set(trained))
    assert all(len(batch) <= prompts for batch in whole.trained)
    with_spread = {number for number in range(undisturbed.draws) if letters[number % len(letters)] == "s"}
    waiting = {group.number for group in (*undisturbed.sieve.kept, *undisturbed.buffer.groups)}
    lost = with_spread - set(trained) - waiting
    assert len(lost) <= undisturbed.progress().stale
    parts: list[list[int]] = []
    left: dict[str, Any] | None = None
    groups: Sequence[Group[int]] = ()
    late = dict(late)
    for stop in [*stops, 10**9]:
        stage = SiftedScript(updates=updates, letters=letters, late=late, stop_after=stop)
        control = control_of(stage, **numbers, wait=wait)
        if left is not None:
            control.load(Progress.of(json.loads(json.dumps(left))), groups)
        control.run()
        parts += stage.trained
        left, groups = control.progress().values(), [*control.sieve.kept, *control.buffer.groups]
    if not late or lag == 0:
        assert parts == whole.trained
        assert control.progress() == undisturbed.progress()
