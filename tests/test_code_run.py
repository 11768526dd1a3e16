"""Runs whose reward runs programs: what is said at the start, what each sample gets, what is counted."""

import json
from pathlib import Path

import pytest

from meshloom.cli import main
from meshloom.observe.records import read_metrics
from tests.lesson_runs import command, train_settings, write_inputs

CODE = ("reward.function=code", "reward.code.enabled=true", "reward.deadline_s=100")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lesson's model, and rows with tests: answers of such a model are no programs."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    tests = {"inputs": ["1"], "outputs": ["1"]}
    rows = [{"prompt": f"{i}+1=", "answer": tests} for i in range(8)]
    for name in ("rows.jsonl", "held_out.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_says_what_separates_programs_and_counts_verdicts(
    inputs: Path, tmp_path: Path, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    more = () if devices == 1 else (f"cluster.devices_per_node={devices}",)
    rows = f"data.train.files={inputs / 'rows.jsonl'}"
    assert main(command(train_settings(inputs, run_dir, *CODE, rows, "batch.steps=1", *more))) == 0
    assert "programs of the model run behind: no network" in capsys.readouterr().out
    assert "network" in json.loads((run_dir / "isolation.json").read_text())["achieved"]
    (record,) = (record for record in read_metrics(run_dir) if record["kind"] == "train")
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    of_training = [sample for sample in samples if sample["kind"] == "train"]
    verdicts = {name: value for name, value in record["metrics"].items() if name.startswith("code/")}
    assert sum(verdicts.values()) == len(of_training) == record["metrics"]["samples"]
    assert record["metrics"]["reward_invalid"] == 0
    assert all(sample["reward"] == 0 for sample in of_training)
    assert {f"code/{sample['remark'].partition(':')[0]}" for sample in of_training} == set(verdicts)
    assert "code/passed" not in verdicts
    held_out = [record["metrics"] for record in read_metrics(run_dir) if record["kind"] == "validation"]
    assert all(any(name.startswith("code/") for name in metrics) for metrics in held_out)


def test_a_plan_refuses_programs_that_were_not_asked_for(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["plan", f"model.path={inputs / 'model'}", f"data.train.files={inputs / 'rows.jsonl'}", "run_dir=runs/x"]
    assert main([*shared, "reward.function=code"]) == 2
    told = capsys.readouterr()
    assert "K001" in told.out + told.err
    assert "reward.code.enabled=true" in told.out + told.err
    assert main([*shared, "reward.function=code", "reward.code.enabled=true", "reward.code.wall_s=9"]) == 2
    told = capsys.readouterr()
    assert "K003" in told.out + told.err
    assert "at most 8" in told.out + told.err
