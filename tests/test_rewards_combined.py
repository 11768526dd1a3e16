"""Several rewards as one: what a sample is worth, what makes it invalid, what is logged and told."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from meshloom.config.errors import RunFault, UserError
from meshloom.config.load import dump_yaml, explain, load_settings
from meshloom.config.resume import contradictions
from meshloom.config.settings import TrainSettings
from meshloom.data.rows import RowNames
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.component_watch import ComponentWatch, by_component, component_metrics
from meshloom.loop.rewarding import open_rewards
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.plan.build import build_plan
from meshloom.rewards.combined import Combination, Component, combine
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest
from meshloom.samples import Samples
from tests.lesson_runs import train_settings, write_inputs

HARSH = """\
import os, time
def harsh(request, odd="raise"):
    if len(request.response_ids) % 2 or odd == "always":
        if odd == "kill":
            os.kill(os.getpid(), 9)
        raise RuntimeError("no")
    return 1.0
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "harsh.py").write_text(HARSH)
    return folder


def ask(response: str, tokens: int = 2) -> RewardRequest:
    ids = tuple(range(tokens))
    return RewardRequest(
        response=response, answer="7", data_source="", extra={}, prompt="", finish="stop", response_ids=ids
    )


class Fixed:
    """Scores by a table; counts what it is asked."""

    def __init__(self, reward: Reward) -> None:
        self.reward, self.begun = reward, 0

    def submit(self, request: RewardRequest) -> "Future[Reward]":
        done: Future[Reward] = Future()
        done.set_result(self.reward)
        return done

    def begin(self, scorings: object) -> None:
        self.begun += 1

    def take_counts(self) -> dict[str, float]:
        return {"asked": 1.0}


def named(name: str, reward: Reward, **fields: float | None) -> tuple[Component, Reward]:
    return Component(name=name, scorer=Fixed(reward), **fields), reward


GOOD = Reward(value=2.0, parts={"digits": 3.0})
BAD = Reward(value=None, reason=InvalidReason.RAISED, detail="KeyError")


def test_the_reward_is_the_weighted_sum_and_parts_are_named() -> None:
    found = combine([named("task", GOOD), named("form", Reward(value=0.5), weight=-2.0)])
    assert found.value == 1.0
    assert found.parts == {"task": 2.0, "task/digits": 3.0, "form": 0.5}
    assert not found.failed


def test_an_invalid_component_makes_the_sample_invalid_and_is_named() -> None:
    found = combine([named("task", GOOD), named("form", BAD)])
    assert (found.value, found.reason, found.why) == (None, InvalidReason.RAISED, "raised: form: KeyError")
    assert found.failed == {"form": "raised: KeyError"}
    assert found.parts["task"] == 2.0 and "form" not in found.parts


def test_a_fallback_stands_in_and_is_still_counted_as_a_failure() -> None:
    found = combine([named("task", GOOD), named("form", BAD, weight=3.0, fallback=-1.0)])
    assert (found.value, found.failed) == (-1.0, {"form": "raised: KeyError"})
    assert "form" not in found.parts


def test_a_component_of_no_weight_makes_no_sample_invalid() -> None:
    assert combine([named("task", GOOD), named("seen", BAD, weight=0.0)]).value == 2.0


def test_a_sum_that_is_no_number_is_invalid() -> None:
    huge = Reward(value=1.7e308)
    found = combine([named("a", huge), named("b", huge)])
    assert found.reason is InvalidReason.NOT_A_NUMBER


def test_every_component_is_told_of_groups_and_asked_for_counts() -> None:
    scorers = [Fixed(GOOD), Fixed(GOOD)]
    both = Combination(tuple(Component(name=n, scorer=s) for n, s in zip("ab", scorers, strict=True)))
    scoring = both.submit(ask("x"))
    both.begin([scoring])
    assert scoring.result() is scoring.result()
    assert [scorer.begun for scorer in scorers] == [1, 1]
    assert both.take_counts() == {"reward/a/asked": 1.0, "reward/b/asked": 1.0}


def batch_of(rows: list[tuple[int, dict[str, float], dict[str, str]]]) -> Samples:
    return Samples(
        torch.ones(len(rows), dtype=torch.int64),
        {"ids": torch.zeros(len(rows), dtype=torch.int64)},
        {"group": torch.tensor([group for group, _, _ in rows])},
        {"parts": [parts for _, parts, _ in rows], "failed": [failed for _, _, failed in rows]},
    )


def test_metrics_of_a_component_leave_out_where_it_is_invalid() -> None:
    batch = batch_of(
        [
            (0, {"a": 1.0}, {}),
            (0, {"a": 1.0}, {}),
            (1, {"a": 4.0}, {}),
            (1, {}, {"a": "died: the process was killed by SIGKILL"}),
            (2, {"a": 0.0}, {}),
            (2, {"a": 2.0}, {}),
        ]
    )
    assert component_metrics(batch, ("a",)) == {
        "reward/a": 8 / 5,
        "reward/a/invalid_share": 1 / 6,
        "reward/a/equal_share": 1 / 2,
        "reward/a/killed": 1.0,
    }
    assert by_component(batch, None) is by_component(batch, "b") is batch
    chosen = by_component(batch, "a")
    assert chosen["valid"].tolist() == [True, True, True, False, True, True]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (({"a": 3.0}, {}), "is the same, 3, for all 4 samples"),
        (({}, {"a": "raised: KeyError"}), "is invalid for all 4 samples of the step, most often: raised: KeyError"),
        (({}, {"a": "deadline: no result"}), "lost its process at 4 samples"),
    ],
)
def test_a_component_that_says_nothing_is_told_once_then_at_the_fifth_step(row: tuple, said: str) -> None:
    told: list[str] = []
    watch = ComponentWatch(("a",), told.append)
    for _ in range(6):
        watch.look(batch_of([(0, *row)] * 4))
    about = [text for text in told if said in text]
    assert len(about) == 2 and about[1].endswith("for 5 steps now")
    assert all(text.startswith("warning: the reward a ") for text in told)


def test_a_component_with_spread_is_not_told() -> None:
    told: list[str] = []
    ComponentWatch(("a",), told.append).look(batch_of([(0, {"a": 1.0}, {}), (0, {"a": 2.0}, {})]))
    assert told == []


def test_a_penalty_for_length_beside_a_function_makes_no_answer_wrong(inputs: Path, tmp_path: Path) -> None:
    given = ("reward.overlong.buffer_tokens=4", "batch.steps=1", "validation.every_steps=1")
    assert run_training(train_settings(inputs, tmp_path / "run", *given), resume=False) == 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    solved = [s["parts"]["function"] >= 0.3 for s in samples if s["kind"] == "train"]
    assert any(solved) and all(
        s["reward"] < 0.3 for s in samples if s["kind"] == "train" and len(s["response_ids"]) == 8
    )
    metrics = next(r["metrics"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train")
    assert metrics["solved_share"] == pytest.approx(sum(solved) / len(solved))


def components(inputs: Path, *changes: str) -> Callable[[Path], TrainSettings]:
    given = [
        "reward.function=null",
        f"reward.components.task.function={inputs / 'reward.py'}:score",
        "reward.components.form.function=regex_format",
        "reward.components.form.kwargs.pattern='[0-9]'",
        "reward.components.form.weight=0.5",
        "batch.steps=2",
        *changes,
    ]
    return lambda run_dir: train_settings(inputs, run_dir, *given)


def test_a_run_logs_each_component_and_keeps_it_with_its_samples(inputs: Path, tmp_path: Path) -> None:
    settings = components(
        inputs, "reward.overlong.buffer_tokens=4", "validation.success_component=task", "validation.every_steps=1"
    )(tmp_path / "run")
    assert run_training(settings, resume=False) == 0
    records = read_metrics(tmp_path / "run")
    step = next(record["metrics"] for record in records if record["kind"] == "train")
    last = [record["metrics"] for record in records if record["kind"] == "validation"][-1]
    for name in ("task", "form", "overlong"):
        assert {f"reward/{name}", f"reward/{name}/invalid_share"} <= set(last)
        assert {f"reward/{name}", f"reward/{name}/invalid_share", f"reward/{name}/equal_share"} <= set(step)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        parts = sample["parts"]
        assert sample["reward"] == pytest.approx(parts["task"] + 0.5 * parts["form"] + parts["overlong"])
        assert parts["overlong"] == min(-(len(sample["response_ids"]) - 4) / 4, 0)
    solved = [
        sum(s["parts"]["task"] >= 0.3 for s in samples if s["kind"] == "validation" and s["step"] == step) / 5
        for step in (0, 1, 2)
    ]
    assert [r["metrics"]["accuracy"] for r in records if r["kind"] == "validation"] == pytest.approx(solved)


@pytest.mark.parametrize("odd", ["raise", "kill"])
def test_an_invalid_component_never_becomes_a_number(
    inputs: Path, tmp_path: Path, odd: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = components(
        inputs,
        f"reward.components.harsh.function={inputs / 'harsh.py'}:harsh",
        f"reward.components.harsh.kwargs.odd={odd}",
        "reward.max_invalid_share=1.0",
        "batch.steps=1",
        "data.validation=null",
        "rollout.stop=[a,b,c,d,e]",
    )(tmp_path / "run")
    assert run_training(settings, resume=False) == 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    odd_ones = [sample for sample in samples if len(sample["response_ids"]) % 2]
    assert odd_ones and len(odd_ones) < len(samples)
    reason = "raised" if odd == "raise" else "died"
    for sample in samples:
        is_odd = len(sample["response_ids"]) % 2 == 1
        assert (sample["reward"] is None) is is_odd
        assert ("task" in sample["parts"], "harsh" in sample["parts"]) == (True, not is_odd)
        if is_odd:
            assert sample["invalid"].startswith(f"{reason}: harsh: ")
            assert list(sample["failed"]) == ["harsh"]
    metrics = read_metrics(tmp_path / "run")[0]["metrics"]
    assert metrics["reward_invalid"] == len(odd_ones)
    assert metrics["reward/harsh/invalid_share"] == pytest.approx(len(odd_ones) / len(samples))
    valid = [sample["reward"] for sample in samples if sample["reward"] is not None]
    assert metrics["reward_mean"] == pytest.approx(sum(valid) / len(valid))
    assert ("lost its process" in "".join(capfd.readouterr())) is (odd == "kill")


def test_a_component_that_always_fails_stops_the_run_and_is_named(inputs: Path, tmp_path: Path) -> None:
    settings = components(
        inputs,
        f"reward.components.harsh.function={inputs / 'harsh.py'}:harsh",
        "reward.components.harsh.kwargs.odd=always",
    )(tmp_path / "run")
    with pytest.raises(RunFault, match="100% of the first validation's rewards are invalid") as fault:
        run_training(settings, resume=False)
    assert "raised: harsh:" in fault.value.why


def test_a_file_that_cannot_be_loaded_is_told_by_its_component(inputs: Path, tmp_path: Path) -> None:
    (inputs / "broken.py").write_text("def score(a, b):\n    return 1\n")
    settings = components(inputs, f"reward.components.worse.function={inputs / 'broken.py'}:score")(tmp_path)
    tokenizer = load_tokenizer(inputs / "model")
    with pytest.raises(UserError) as error, open_rewards(settings, RowNames(), tokenizer, None):
        pass
    assert error.value.where.startswith("reward.components.worse.function")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["reward.function=exact_match"], "W006", "both given"),
        (["reward.components.form.weight=0", "reward.components.task.weight=0"], "W008", "weight 0"),
        (["reward.components.form.function=regex_formt"], "S007", "regex_formt"),
        (["reward.components.form.function=missing.py:score"], "S006", "missing.py"),
        (["reward.components.form.function=null"], "W009", "none is given"),
        (["reward.components.task.model.path=nowhere"], "W009", "both function and model"),
        (["reward.components.form.function=null", "reward.components.form.model.path=nowhere"], "W013", "nowhere"),
        (["reward.overlong.buffer_tokens=9"], "W011", "more than the longest response"),
        (["reward.components.overlong.function=exact_match"], "W005", "'overlong'"),
        (["validation.success_component=tusk"], "W020", "tusk"),
    ],
)
def test_the_plan_refuses_components_that_cannot_work(
    inputs: Path, tmp_path: Path, changes: list[str], code: str, said: str
) -> None:
    plan = build_plan(components(inputs, *changes)(tmp_path / "run"), 14)
    about = [problem for problem in plan.problems if problem.code == code]
    assert about and said in about[0].what
    assert not any(str(line.value).startswith("-") for line in plan.lines if line.name.startswith("overlong"))
    for suggestion in about[0].suggestions:
        again = build_plan(components(inputs, *changes, *suggestion)(tmp_path / "run"), 14)
        assert code not in [problem.code for problem in again.problems]


def test_a_key_of_a_component_that_does_not_exist_is_told_with_the_one_that_is_meant(tmp_path: Path) -> None:
    overrides = ["run_dir=x", "model.path=y", "data.train.files=[z.jsonl]", "reward.components.task.functoin=f"]
    with pytest.raises(UserError) as error:
        load_settings(TrainSettings, None, overrides)
    assert "reward.components.task.function?" in error.value.fix


def test_components_are_written_and_read_back_and_explained_by_key(inputs: Path, tmp_path: Path) -> None:
    settings = components(inputs)(tmp_path / "run")
    file = tmp_path / "settings.yaml"
    file.write_text(dump_yaml(settings))
    assert load_settings(TrainSettings, file) == settings
    origins = {each.path: each.origin for each in explain(settings)}
    assert origins["reward.components.form.weight"] == "override reward.components.form.weight=0.5"
    assert origins["reward.components.task.weight"] == "default"


def test_what_decides_a_component_may_not_change_on_resume(inputs: Path, tmp_path: Path) -> None:
    begun = components(inputs)(tmp_path / "run")
    changed = components(inputs, "reward.components.form.weight=0.25", "reward.components.task.deadline_s=3")(
        tmp_path / "run"
    )
    assert [path for path, _, _ in contradictions(begun, changed)] == ["reward.components.form.weight"]
