"""The same command again, after a run that ended in its first step and saved nothing."""

from pathlib import Path

import pytest

from meshloom.cli import main
from meshloom.config.errors import UserError
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.loop.begun import BEGINS_ANEW, takes_up
from meshloom.loop.build import find_checkpoint, open_run
from meshloom.observe.lock import FolderLock
from meshloom.observe.records import read_metrics, read_samples
from meshloom.observe.run_folder import RunFolder, RunState, read_settings
from meshloom.plan.build import build_plan
from tests.lesson_runs import command, sft_settings, train_settings, write_inputs


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path, layers=1)


def left(settings: TrainSettings | SftSettings, *steps: int) -> Path:
    """A folder as a run leaves it that recorded these steps and ended."""
    with RunFolder.create(settings.run_dir, settings=settings, plan_text="the plan\n") as folder:
        for step in steps:
            folder.log_metrics({"step": step, "kind": "validation", "metrics": {"accuracy": 0.5}, "time": 0.0})
    return Path(settings.run_dir)


def test_a_run_whose_first_step_failed_begins_anew(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was refused as a folder that is not empty: there was nothing to go on from, and only ``--resume`` began it."""
    reward, mended = inputs / "reward.py", (inputs / "reward.py").read_text()
    reward.write_text("def score(request):\n    return 1 / 0\n")
    args = command(train_settings(inputs, inputs / "run", "batch.steps=1"))
    assert main(args) == 3
    assert [record["step"] for record in read_metrics(inputs / "run")] == [0]
    reward.write_text(mended)
    capsys.readouterr()
    assert main(args) == 0
    assert BEGINS_ANEW in capsys.readouterr().out
    assert [(r["step"], r["kind"]) for r in read_metrics(inputs / "run")] == [
        (0, "validation"),
        (1, "train"),
        (1, "validation"),
    ]
    assert sum(record["step"] == 0 for record in read_samples(inputs / "run")) == 5
    assert main(args) == 2, "a run that is there is not begun anew"
    assert "add --resume to go on with that run" in capsys.readouterr().err


@pytest.mark.parametrize("make", [train_settings, sft_settings])
def test_what_is_made_again_is_dropped_and_nothing_else(inputs: Path, make) -> None:
    run = inputs / "run"
    assert not takes_up(make(inputs, run), resume=False), "there is none"
    left(make(inputs, run))
    assert takes_up(make(inputs, run, "seed=9"), resume=False), "it has measured nothing"
    other = left(make(inputs, inputs / "other"), 0)
    assert takes_up(make(inputs, other, "validation.every_steps=9", "batch.steps=7"), resume=False)
    assert not takes_up(make(inputs, other, "seed=9"), resume=False), "another run measured that"
    lock = FolderLock(other)
    assert not takes_up(make(inputs, other), resume=False), "it is in use"
    lock.release()
    assert not takes_up(make(inputs, left(make(inputs, inputs / "long"), 0, 1)), resume=False)
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    assert not takes_up(make(inputs, run), resume=False)


def test_what_would_be_lost_is_said(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = left(train_settings(inputs, inputs / "measured"), 0)
    assert main(command(train_settings(inputs, measured, "seed=9"))) == 2
    assert "add --resume to begin that run anew" in (said := capsys.readouterr().err)
    assert "dropping its validation before training" in said and "another run_dir" in said
    long = left(train_settings(inputs, inputs / "long"), 0, 1, 2)
    assert main(command(train_settings(inputs, long))) == 2
    assert "dropping its records of 2 steps" in capsys.readouterr().err
    assert read_settings(measured)["seed"] == 3 and len(read_metrics(long)) == 3


def test_a_finished_run_that_kept_no_checkpoint_is_never_dropped(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--resume``, which is verl's default, its records were dropped and all of it was trained again."""
    run = inputs / "run"
    args = command(sft_settings(inputs, run, "batch.steps=1", "checkpoint.at_end=false", "checkpoint.every_steps=0"))
    assert main(args) == 0
    kept = (run / "metrics.jsonl").read_bytes()
    for more in ([], ["--resume"]):
        capsys.readouterr()
        assert main([*args, *more]) == 2
        told = capsys.readouterr().err
        assert "change: use another run_dir" in told and ("has finished, and kept no checkpoint" in told) is bool(more)
    assert (run / "metrics.jsonl").read_bytes() == kept


@pytest.mark.parametrize("make", [train_settings, sft_settings])
def test_what_has_finished_is_not_taken_up(inputs: Path, make) -> None:
    """The folder of an evaluation with the same settings read as that of a run that ended in its first step."""
    settings = make(inputs, inputs / "run")
    run = left(settings, 0)
    assert takes_up(settings, resume=False)
    with RunFolder.resume(run) as folder:
        folder.set_status(RunState.FINISHED, step=0, steps=0)
    assert not takes_up(settings, resume=False)


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_another_process_has_done_meanwhile_is_not_dropped(inputs: Path, saved: bool) -> None:
    """Two processes could find the same folder without a step; the later one dropped what the other had done until it took
    the folder."""
    settings = sft_settings(inputs, inputs / "run", "batch.steps=1", f"checkpoint.at_end={str(saved).lower()}")
    run = left(settings)
    assert find_checkpoint(settings)[0] is None
    assert main(command(settings)) == 0
    records = read_metrics(run)
    with pytest.raises(UserError, match="saved step 1" if saved else "has finished"):
        open_run(settings, build_plan(settings, 14), 0, {}, resume=True, cut=None)
    assert read_metrics(run) == records and [record["step"] for record in records if record["kind"] == "sft"] == [1]


@pytest.mark.slow
def test_over_devices_too(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = left(sft_settings(inputs, inputs / "run"))
    args = command(sft_settings(inputs, run, "batch.steps=1", "cluster.devices_per_node=2"))
    assert main(args) == 0
    assert BEGINS_ANEW in capsys.readouterr().out
