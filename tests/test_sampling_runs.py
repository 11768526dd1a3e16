"""Whole runs on a tiny model: groups that are replaced, greedy baselines, and what a resumed run does again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshloom.config.errors import RunFault
from meshloom.loop.baseline import GreedySample, baseline_metrics, greedy_record, with_baseline
from meshloom.loop.groups import cut_of, group_of, standing
from meshloom.loop.spread import spread_of
from meshloom.loop.stage import Progress, Spread
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics, read_samples
from meshloom.plan.generated import generation_lines
from meshloom.samples import Samples, concat
from tests.lesson_runs import assert_same_run, train_settings, write_inputs
from tests.test_many_devices import assert_like, newest

BRIEF = ("algorithm.kl=none", "optimizer.schedule=constant", "checkpoint.keep_last=9", "validation.every_steps=0")
COARSE = """\
def score(request):
    text = request.response
    return {"score": float(text[:1] in "02468abcdef"), "length": len(text)}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "coarse.py").write_text(COARSE)
    return folder


def train(inputs: Path, run_dir: Path, *changes: str, resume: bool = False) -> Path:
    assert run_training(train_settings(inputs, run_dir, *BRIEF, *changes), resume=resume) == 0
    return run_dir


def metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record["metrics"] for record in read_metrics(run_dir) if record["kind"] == kind]


def sifted(inputs: Path) -> tuple[str, ...]:
    return (
        f"reward.function={inputs / 'coarse.py'}:score",
        "algorithm.filter_groups.enabled=true",
        "algorithm.filter_groups.prompts_per_round=7",
        "data.validation=null",
    )


@pytest.fixture(scope="module")
def filtered(inputs: Path) -> Path:
    return train(inputs, inputs / "filtered", *sifted(inputs), "batch.steps=4", "checkpoint.every_steps=2")


def test_every_group_of_a_filtered_run_has_spread_and_what_was_replaced_is_counted(filtered: Path) -> None:
    samples = [record for record in read_samples(filtered) if record["kind"] == "train"]
    groups: dict[tuple[int, int], set[float]] = {}
    for record in samples:
        groups.setdefault((record["step"], record["group"]), set()).add(record["reward"])
    assert all(len(rewards) == 2 for rewards in groups.values())
    assert [sum(step == at for step, _ in groups) for at in (1, 2, 3, 4)] == [4] * 4
    found = metrics(filtered)
    assert sum(each["groups_filtered"] for each in found) > 0
    assert all(each["rollout_rounds"] >= (0 if i else 1) for i, each in enumerate(found))
    assert max(each["groups_surplus"] for each in found) > 0
    # A surplus of the step before is one step, which is two versions, older than the weights it trains.
    assert {each["lag_versions"] for each in found} == {0, 2}
    for each in found:
        assert each["groups_filtered"] == sum(
            each[f"groups_filtered/{why}"] for why in ("all_right", "all_wrong", "too_few")
        )


def test_a_filtered_run_that_is_resumed_repeats_itself_with_the_groups_that_waited(
    inputs: Path, filtered: Path, tmp_path: Path
) -> None:
    every = (*sifted(inputs), "checkpoint.every_steps=2")
    train(inputs, tmp_path / "run", *every, "batch.steps=2")
    assert metrics(tmp_path / "run")[-1]["groups_surplus"] > 0
    train(inputs, tmp_path / "run", *every, "batch.steps=4", resume=True)
    assert_same_run(filtered, tmp_path / "run")


def test_invalid_rewards_of_groups_that_are_left_out_count_too(inputs: Path, tmp_path: Path) -> None:
    """Groups that are kept have valid rewards: a reward that mostly failed used to stop no run that filters."""
    (tmp_path / "failing.py").write_text(
        "def score(request):\n    return float(request.response[:1] in '02468abcdef') if len(request.response) % 4 else 1 / 0\n"
    )
    changes = (*sifted(inputs), f"reward.function={tmp_path / 'failing.py'}:score", "batch.steps=1")
    with pytest.raises(RunFault, match="of this step's rewards are invalid"):
        train(inputs, tmp_path / "run", *changes, "reward.max_invalid_share=0.02")


def test_a_task_that_is_solved_trains_on_and_says_that_no_group_has_spread(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "same.py").write_text("def score(request):\n    return 1.0\n")
    changes = (*sifted(inputs), f"reward.function={tmp_path / 'same.py'}:score", "batch.steps=1")
    train(inputs, tmp_path / "run", *changes, "algorithm.filter_groups.max_rounds=2")
    said = " ".join(capsys.readouterr().out.split())
    assert "step 1 has no group with any spread of rewards: 2 rounds of generation gave no more" in said
    found = metrics(tmp_path / "run")[0]
    assert (found["groups_filtered/all_right"], found["groups_missing"], found["rollout_rounds"]) == (14, 4, 2)


def group(rewards: list[float], valid: list[bool], lengths: list[float]) -> Samples:
    count = len(rewards)
    return Samples(
        torch.full((count,), 2),
        {"ids": torch.zeros(2 * count, dtype=torch.int64), "mask": torch.ones(2 * count, dtype=torch.bool)},
        {"reward": torch.tensor(rewards, dtype=torch.float64), "valid": torch.tensor(valid)},
        {"parts": [{"length": length} for length in lengths], "invalid": [None if ok else "raised" for ok in valid]},
    )


@pytest.mark.parametrize(
    ("rewards", "valid", "spread"),
    [
        ([1.0, 1.0], [True, True], Spread.ALL_RIGHT),
        ([0.0, 0.0], [True, True], Spread.ALL_WRONG),
        ([0.0, 1.0], [True, True], Spread.SOME),
        ([0.0, 1.0], [True, False], Spread.TOO_FEW),
        ([1.0, 1.0, 0.0], [True, True, False], Spread.ALL_RIGHT),
    ],
)
def test_spread_is_that_of_valid_rewards(inputs: Path, rewards: list[float], valid: list[bool], spread: Spread) -> None:
    settings = train_settings(inputs, inputs / "none", "validation.success_threshold=1")
    assert spread_of(group(rewards, valid, [0.0] * len(rewards)), settings) is spread


def test_spread_may_be_that_of_another_number_of_the_reward_function(inputs: Path) -> None:
    settings = train_settings(inputs, inputs / "none", "algorithm.filter_groups.metric=length")
    assert spread_of(group([1.0, 1.0], [True, True], [3.0, 4.0]), settings) is Spread.SOME
    assert spread_of(group([0.0, 1.0], [True, True], [3.0, 3.0]), settings) is Spread.ALL_RIGHT


def test_the_penalty_of_overlong_responses_is_no_spread(inputs: Path) -> None:
    """Samples that are all wrong used to differ by it."""
    penalised = train_settings(inputs, inputs / "none", "reward.overlong.buffer_tokens=4")
    wrong = group([0.0, -0.5], [True, True], [0.0, 0.0])
    wrong.meta["parts"] = [{"function": 0.0, "overlong": 0.0}, {"function": 0.0, "overlong": -0.5}]
    assert spread_of(wrong, penalised) is Spread.ALL_WRONG
    right = group([1.0, 0.5], [True, True], [0.0, 0.0])
    right.meta["parts"] = [
        {"function": 1.0, "function/acc": 1.0, "overlong": 0.0},
        {"function": 1.0, "function/acc": 1.0, "overlong": -0.5},
    ]
    assert spread_of(right, penalised) is Spread.ALL_RIGHT
    by_number = train_settings(
        inputs, inputs / "none", "reward.overlong.buffer_tokens=4", "algorithm.filter_groups.metric=acc"
    )
    assert spread_of(right, by_number) is Spread.ALL_RIGHT


@pytest.mark.parametrize("reward", [-1.0, 0.3])
def test_rounding_is_no_spread(inputs: Path, reward: float) -> None:
    """(-1 - 0.13) + 0.13 is not -1: groups that are all wrong were trained on, groups that are all right were called wrong."""
    settings = train_settings(
        inputs, inputs / "none", "reward.overlong.buffer_tokens=100", "validation.success_threshold=0.3"
    )
    penalties = [-0.01 * tokens for tokens in range(100)]
    same = group([reward + penalty for penalty in penalties], [True] * 100, [0.0] * 100)
    same.meta["parts"] = [{"function": reward, "overlong": penalty} for penalty in penalties]
    assert len({float(total) - penalty for total, penalty in zip(same["reward"], penalties, strict=True)}) > 1
    assert spread_of(same, settings) is (Spread.ALL_RIGHT if reward == 0.3 else Spread.ALL_WRONG)
    near = group([1e-9, 1.1e-9], [True, True], [0.0, 0.0])
    assert spread_of(near, train_settings(inputs, inputs / "none")) is Spread.SOME


REMAX = ("algorithm.advantage=remax", "batch.steps=2", "checkpoint.every_steps=0")


@pytest.fixture(scope="module")
def remax(inputs: Path) -> Path:
    return train(inputs, inputs / "remax", *REMAX)


def test_each_prompt_of_remax_has_one_greedy_sample_that_is_its_baseline(remax: Path) -> None:
    records = read_samples(remax)
    greedy = {(r["step"], r["group"]): r for r in records if r["kind"] == "greedy"}
    trained = [r for r in records if r["kind"] == "train"]
    assert len(greedy) == 8
    assert len(trained) == 24
    for record in trained:
        baseline = greedy[record["step"], record["group"]]
        assert record["prompt_ids"] == baseline["prompt_ids"]
        assert record["advantage"] == pytest.approx(record["reward"] - baseline["reward"])
    found = metrics(remax)
    assert all(each["samples"] == 12 for each in found)
    first = [record["reward"] for (step, _), record in greedy.items() if step == 1]
    assert found[0]["greedy_reward_mean"] == pytest.approx(sum(first) / len(first))


def test_tokens_of_greedy_samples_count_and_their_prompts_do_not(inputs: Path, remax: Path) -> None:
    """Prompts of groups used to be computed twice, and no number had the baselines' responses."""
    for step, found in enumerate(metrics(remax), 1):
        records = [r for r in read_samples(remax) if r["step"] == step and r["kind"] != "validation"]
        greedy = sum(len(record["response_ids"]) for record in records if record["kind"] == "greedy")
        prompts = {record["group"]: len(record["prompt_ids"]) for record in records}
        made = found["samples"] * found["response_tokens_mean"] + greedy
        assert found["greedy_tokens"] == greedy
        assert step == 1 or found["prompt_tokens_computed"] == sum(prompts.values())  # the first has validation's too
        ratio = found["tokens_per_second"] / found["response_tokens_per_second"]
        assert ratio == pytest.approx(1 + 3 * sum(prompts.values()) / made)
    settings = train_settings(inputs, inputs / "none", *REMAX)
    longest = 4 * settings.rollout.max_response_tokens
    assert {line.name: line.value for line in generation_lines(settings)}["most greedy tokens per step"] == longest


def test_greedy_samples_are_the_most_likely_ones_and_change_nothing_else(
    inputs: Path, remax: Path, tmp_path: Path
) -> None:
    """Of the first step: validation of the same prompts is greedy too, and a run without baselines samples the same."""
    changes = (f"data.validation.files=[{inputs / 'train.jsonl'}]", "algorithm.advantage=grpo", "batch.steps=1")
    train(inputs, tmp_path / "grpo", *changes)
    records = read_samples(tmp_path / "grpo")
    expected = {r["row"]: r["response_ids"] for r in records if (r["kind"], r["step"]) == ("validation", 0)}
    first = [record for record in read_samples(remax) if record["step"] == 1]
    greedy = [record for record in first if record["kind"] == "greedy"]
    assert [record["response_ids"] for record in greedy] == [expected[record["row"]] for record in greedy]
    sampled = [[r["response_ids"] for r in of if (r["kind"], r["step"]) == ("train", 1)] for of in (records, first)]
    assert sampled[0] == sampled[1]


def test_a_group_whose_baseline_is_invalid_teaches_nothing_and_is_counted(
    inputs: Path, remax: Path, tmp_path: Path
) -> None:
    record = next(record for record in read_samples(remax) if record["kind"] == "greedy")
    (tmp_path / "picky.py").write_text(
        f"def score(request):\n"
        f"    if (request.prompt, request.response) == ({record['prompt']!r}, {record['response']!r}):\n"
        f"        raise ValueError('not this one')\n"
        f"    return len(request.response) / 10\n"
    )
    train(inputs, tmp_path / "run", *REMAX, "batch.steps=1", f"reward.function={tmp_path / 'picky.py'}:score")
    of_step = [r for r in read_samples(tmp_path / "run") if r["kind"] in ("greedy", "train")]
    records = [r for r in of_step if r["group"] == record["group"]]
    assert [r["reward"] for r in records] == [None] * 4
    assert records[0]["invalid"].startswith("raised: ")
    assert all(r["invalid"].startswith(("no_baseline: raised", "raised")) for r in records[1:])
    found = metrics(tmp_path / "run")[0]
    assert (found["greedy_invalid"], found["reward_invalid"]) == (1, 3)


def test_a_baseline_stands_once_in_a_group() -> None:
    greedy = GreedySample(response="a", ids=(1,), finish="stop", reward=0.25, invalid=None, parts={}, versions=(0, 0))
    found = with_baseline(group([1.0, 0.0], [True, True], [0.0, 0.0]), greedy)
    assert found["greedy_reward"].tolist() == [0.25, 0.25]
    assert found["valid"].tolist() == [True, True]
    assert baseline_metrics(found) == {"greedy_reward_mean": 0.25, "greedy_invalid": 0.0, "greedy_tokens": 1.0}


def test_groups_of_an_earlier_checkpoint_are_trained_on_with_those_made_now(inputs: Path) -> None:
    """They lack the column of what was printed: a run that was resumed with some ended with a fault of the program."""
    settings = train_settings(inputs, inputs / "none")
    greedy = GreedySample(response="a", ids=(1,), finish="stop", reward=0.25, invalid=None, parts={}, versions=(0, 0))
    made = with_baseline(group([1.0, 0.0], [True, True], [0.0, 0.0]), greedy)
    tokens, rows = {**made.tokens, "version": torch.zeros(4, dtype=torch.int32)}, {**made.rows, "group": torch.ones(2)}
    made = Samples(made.lengths, tokens, rows, {**made.meta, "printed": ["now", ""]})
    cut = cut_of(Progress(step=1, version=1, draws=2, order={}), [group_of(1, made, settings)], {})
    del cut.values["buffer"]["meta"]["printed"]
    del cut.values["buffer"]["meta"]["greedy"][0]["printed"]
    _, (waiting,) = standing(cut, settings)
    assert concat([waiting.content, made]).meta["printed"] == ["", "", "now", ""]
    assert "printed" not in greedy_record(waiting.content, 0)


@pytest.mark.slow
def test_over_devices_groups_are_replaced_baselines_made_and_samples_replayed_as_on_one(
    inputs: Path, filtered: Path, remax: Path, tmp_path: Path
) -> None:
    """Engines beside the trainer, and on devices of their own; a file's samples over devices; samples without training."""
    two = "cluster.devices_per_node=2"
    apart = (two, "placement.actor=[0]", "placement.rollout=[1]")
    given = (*sifted(inputs), "batch.steps=4", "checkpoint.every_steps=2")
    assert_like(filtered, train(inputs, tmp_path / "filtered", *given, *apart), atol=1e-4)
    assert_like(remax, train(inputs, tmp_path / "remax", *REMAX, two), atol=1e-4)
    greedy = [
        [r["response_ids"] for r in read_samples(run) if r["kind"] == "greedy"] for run in (remax, tmp_path / "remax")
    ]
    assert greedy[0] == greedy[1]
    exact = "logging.sampler_logprobs=true"
    first = train(inputs, tmp_path / "first", *REMAX, two, exact)
    again = train(inputs, tmp_path / "again", *REMAX, two, f"rollout.from_samples={first}")
    files = [newest(run) / "model" / "model.safetensors" for run in (first, again)]
    for name, tensor in load_file(files[0]).items():
        torch.testing.assert_close(load_file(files[1])[name], tensor, rtol=1e-4, atol=1e-5)
    settings = train_settings(inputs, tmp_path / "made", *BRIEF, *REMAX, *apart, "data.validation=null")
    assert run_training(settings, resume=False, only_rollout=True) == 0
    made = [(r["kind"], r["response_ids"]) for r in read_samples(tmp_path / "made") if r["step"] == 1]
    assert made == [
        (r["kind"], r["response_ids"])
        for r in read_samples(first)
        if (r["step"], r["kind"]) in ((1, "train"), (1, "greedy"))
    ]


@pytest.mark.slow
def test_a_filtered_run_with_a_lag_over_devices_keeps_its_bound_and_is_resumed(inputs: Path, tmp_path: Path) -> None:
    given = (*sifted(inputs), "checkpoint.every_steps=2", "algorithm.max_lag_versions=2", "cluster.devices_per_node=2")
    given = (*given, "placement.actor=[0]", "placement.rollout=[1]")
    train(inputs, tmp_path / "run", *given, "batch.steps=2")
    train(inputs, tmp_path / "run", *given, "batch.steps=4", resume=True)
    found = metrics(tmp_path / "run")
    assert len(found) == 4
    # Two versions a step: one step ahead, and one more for what a step did not need.
    assert max(each["lag_versions"] for each in found) <= 4
    assert all(each["samples"] == 12 for each in found)
