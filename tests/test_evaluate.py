"""Evaluations of a model folder, as the command line runs them."""

import json
from pathlib import Path

import pytest

from meshloom.cli import main
from meshloom.loop.evaluate import result_text
from tests.lesson_runs import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def evaluation(inputs: Path, run_dir: Path, *data: str) -> list[str]:
    return [
        *("eval", f"run_dir={run_dir}", f"model.path={inputs / 'model'}", "device=cpu", "data.max_prompt_tokens=64"),
        *("reward.workers=1", f"reward.function={inputs / 'reward.py'}:score", "rollout.max_response_tokens=8", *data),
    ]


def test_held_out_prompts_alone_are_enough(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``data.train`` used to be required, the numbers used to be raw, and an empty folder of checkpoints was left."""
    command = evaluation(inputs, tmp_path / "eval", f"data.validation.files={inputs / 'held_out.jsonl'}")
    assert main(command) == 0
    line, where = capsys.readouterr().out.splitlines()
    assert line.startswith("accuracy 0.0 % (0.0 – 43.4 %), 5 prompts, reward 0, 8 tokens a response")
    assert where == f"samples and report: {tmp_path / 'eval'}"
    assert not (tmp_path / "eval" / "checkpoints").exists()
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "use another run_dir" in told and "--resume" not in told.partition("change:")[2]


def test_an_evaluation_whose_rewards_fail_says_why(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to end with 0, and to say no more than how many there were."""
    (tmp_path / "own.py").write_text("def score(request):\n    raise KeyError(request.row)\n")
    data = f"data.validation.files={inputs / 'held_out.jsonl'}"
    assert main([*evaluation(inputs, tmp_path / "eval", data), f"reward.function={tmp_path / 'own.py'}:score"]) == 3
    told = capsys.readouterr()
    assert "5 invalid rewards\nsamples and report" in told.out and (tmp_path / "eval" / "report.html").exists()
    assert told.err.startswith("error: 100% of the evaluation's rewards are invalid")
    assert "most often (5 of 5): raised: " in told.err


def test_an_evaluation_without_prompts_is_refused(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(evaluation(inputs, tmp_path / "eval", "data.chat_template=auto")) == 2
    assert "there are no prompts to evaluate" in capsys.readouterr().err
    assert not (tmp_path / "eval").exists()


def test_the_folder_of_an_evaluation_stands_for_its_settings(inputs: Path, tmp_path: Path) -> None:
    first = evaluation(inputs, tmp_path / "a", f"data.validation.files={inputs / 'held_out.jsonl'}")
    assert main(first) == 0
    assert main(["eval", str(tmp_path / "a"), f"run_dir={tmp_path / 'b'}"]) == 0
    one, other = (json.loads((tmp_path / name / "metrics.jsonl").read_text())["metrics"] for name in "ab")
    assert one["reward_mean"] == other["reward_mean"]


def test_a_result_names_only_what_there_is() -> None:
    metrics = {
        "accuracy": 0.0166667,
        "accuracy_low": 0.003,
        "accuracy_high": 0.0886,
        "reward_mean": 0.02,
        "prompts": 60,
        "response_tokens_mean": 12.0,
        "truncated_share": 0.25,
        "reward_invalid": 1.0,
        "prompts_dropped": 2.0,
        "k": 4,
        "mean_at_k": 0.0166667,
        "pass_at_k": 0.05,
    }
    assert result_text(metrics) == (
        "accuracy 1.7 % (0.3 – 8.9 %), 60 prompts, reward 0.02, mean@4 1.7 %, pass@4 5.0 %, 12 tokens a response, "
        "25.0 % truncated, 1 invalid reward, 2 prompts dropped"
    )
    assert result_text({"prompts": 1, "prompts_dropped": 1.0}) == "1 prompt, 1 prompt dropped"
