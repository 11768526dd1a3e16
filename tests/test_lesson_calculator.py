"""The calculator lesson: its problems, examples and settings; and, on request, that it learns."""

import json
import shutil
from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.data.files import read_file
from meshloom.lesson.calculator import CALLED_SHARE, GRPO_FILE, SFT_FILE, write_lesson
from meshloom.lesson.calculator_tool import calculator
from meshloom.loop.sft import run_sft
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics, read_samples
from meshloom.plan.build import build_plan
from meshloom.train.export import export_model


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lesson") / "calculator"
    write_lesson(root, seed=0)
    return root


def rows(file: Path) -> list[dict]:
    return [record for _, record in read_file(file)]


def test_the_tool_computes_and_evaluates_nothing_else() -> None:
    assert calculator("12*34") == "408"
    assert calculator("1 + 2*(3-4)") == "-1"
    for bad in ("9**9", "__import__('os')", "1/0", "a", "True*2", "1" * 200, "("):
        with pytest.raises((ValueError, SyntaxError)):
            calculator(bad)


def test_examples_show_both_ways_and_no_problem_is_in_two_sets(lesson: Path) -> None:
    sets = [
        {row["prompt"][0]["content"] for row in rows(lesson / f"{name}.jsonl")}
        for name in ("held_out", "train", "examples")
    ]
    assert len(set().union(*sets)) == sum(map(len, sets))
    examples = rows(lesson / "examples.jsonl")
    called = [row for row in examples if row["response"].startswith("<tool_call>")]
    told = [row for row in examples if len(row["prompt"]) == 3]
    assert len(called) == len(told)
    assert abs(len(called) / (len(examples) - len(told)) - CALLED_SHARE) < 0.03
    assert all(row["response"] == f"<answer>{row['answer']}</answer>" for row in told)
    for row in called[:20]:
        call = json.loads(row["response"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert calculator(**call["arguments"]) == row["answer"]


def test_the_lesson_s_settings_run(lesson: Path, tmp_path: Path) -> None:
    """A step of reinforcement learning on the model that was never warmed."""
    assert build_plan(load_settings(SftSettings, lesson / SFT_FILE), None).problems == ()
    shutil.copytree(lesson / "base", lesson / "warm")
    small = [
        "batch.prompts_per_step=2",
        "batch.steps=1",
        "validation.every_steps=0",
        "validation.before_training=false",
    ]
    bounds = ["data.validation=null", "environment.max_turn_tokens=8", "rollout.max_response_tokens=40"]
    settings = load_settings(TrainSettings, lesson / GRPO_FILE, [*small, *bounds, f"run_dir={tmp_path / 'run'}"])
    assert run_training(settings, resume=False) == 0
    assert len(read_samples(tmp_path / "run")) == 16
    shutil.rmtree(lesson / "warm")
    with pytest.raises(UserError, match="is not empty"):
        write_lesson(lesson, seed=0)


@pytest.mark.slow
def test_a_small_model_learns_to_ask_the_calculator(lesson: Path) -> None:
    assert run_sft(load_settings(SftSettings, lesson / SFT_FILE), resume=False) == 0
    export_model(lesson / "sft", lesson / "warm")
    assert run_training(load_settings(TrainSettings, lesson / GRPO_FILE), resume=False) == 0
    metrics = [record["metrics"] for record in read_metrics(lesson / "grpo")]
    accuracy = [each["accuracy"] for each in metrics if "accuracy" in each]
    assert accuracy[0] < 0.6 and accuracy[-1] > 0.9
    assert [each["tool_calls_mean"] for each in metrics if "tool_calls_mean" in each][-1] > 0.9
