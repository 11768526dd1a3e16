"""Runs that are killed at random moments or stopped, and resumed: they end as if nothing had happened, bit for bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from meshloom.config.errors import UserError
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.loop.build import find_checkpoint
from meshloom.loop.train import run_training
from meshloom.observe.run_folder import read_status
from tests.lesson_runs import (
    assert_same_run,
    command,
    finish,
    go_on,
    kill,
    sft_settings,
    start,
    steps_logged,
    train_settings,
    wait_until,
    whole_checkpoints,
    write_inputs,
)

LORA = ("model.lora={rank: 2, dropout: 0.3}", "rollout.sampling.temperature=0.8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path) -> tuple[Path, float]:
    """A finished run and the seconds it took, once everything is imported."""
    finish(command(train_settings(inputs, inputs / "first")), inputs / "out")
    began = time.monotonic()
    assert finish(command(train_settings(inputs, inputs / "whole")), inputs / "out") == 0
    seconds = time.monotonic() - began
    assert_same_run(inputs / "whole", inputs / "first")
    return inputs / "whole", seconds


def kill_while_running(settings: TrainSettings | SftSettings, after_s: float, output: Path) -> bool:
    """Start or resume, and kill after some seconds; whether the run was still on. Nothing saved may be lost or half."""
    run_dir = Path(settings.run_dir)
    before = max(whole_checkpoints(run_dir), default=0)
    process = start(go_on(settings), output)
    process.join(after_s)
    on = kill(process)
    if not on and process.exitcode != 0:
        pytest.fail(f"the run failed:\n{output.read_text()}")
    newest = max(whole_checkpoints(run_dir), default=0)
    # A save waits for the one before it, so only the newest can be missing.
    every = settings.checkpoint.every_steps
    logged = max(steps_logged(run_dir), default=0)
    assert newest >= max(before, (logged // every - 2) * every)
    return on


def kill_many(make_settings, whole: Path, seconds: float, kills: int, seed: int) -> None:
    """Kill runs at moments drawn over the duration of one, until there were so many kills; each run ends like the whole one."""
    moments = random.Random(seed)
    number = 0
    while kills > 0:
        number += 1
        settings = make_settings(whole.with_name(f"{whole.name}-killed-{number}"))
        output = Path(f"{settings.run_dir}.out")
        for _ in range(min(kills, 4)):
            if not kill_while_running(settings, moments.uniform(0, seconds), output):
                break
            kills -= 1
        assert finish(go_on(settings), output) == 0, output.read_text()
        assert_same_run(whole, Path(settings.run_dir))
        assert not list(Path(settings.run_dir).glob("checkpoints/.*"))


def test_killed_at_twenty_random_moments(inputs: Path, uninterrupted: tuple[Path, float]) -> None:
    whole, seconds = uninterrupted
    kill_many(lambda run_dir: train_settings(inputs, run_dir), whole, seconds, kills=20, seed=1)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_killed_while_a_checkpoint_is_written(inputs: Path, uninterrupted: tuple[Path, float], step: int) -> None:
    settings = train_settings(inputs, inputs / f"writing-{step}")
    output = inputs / f"writing-{step}.out"
    process = start(command(settings), output)
    checkpoints = inputs / f"writing-{step}" / "checkpoints"
    assert wait_until(lambda: list(checkpoints.glob(f".writing-step-00000{step}-*")), process), output.read_text()
    assert kill(process)
    assert step - 1 in [0, *whole_checkpoints(checkpoints.parent)]
    assert finish(go_on(settings), output) == 0, output.read_text()
    assert_same_run(uninterrupted[0], checkpoints.parent)


def test_killed_before_the_first_checkpoint_it_starts_anew(inputs: Path) -> None:
    """Records of the first attempt are dropped, and the run is that of an undisturbed one."""
    late = ("checkpoint.every_steps=6",)
    assert finish(command(train_settings(inputs, inputs / "late", *late)), inputs / "late.out") == 0
    settings = train_settings(inputs, inputs / "late-killed", *late)
    process = start(command(settings), inputs / "late.out")
    assert wait_until(lambda: 3 in steps_logged(inputs / "late-killed"), process)
    assert kill(process)
    assert whole_checkpoints(inputs / "late-killed") == []
    assert finish(command(settings, "--resume"), inputs / "late.out") == 0
    assert_same_run(inputs / "late", inputs / "late-killed")


@pytest.mark.parametrize("left", [["run.lock"], ["run.lock", ".settings.yaml.new"]])
def test_killed_while_the_folder_is_made_the_first_command_works_again(inputs: Path, left: list[str]) -> None:
    """A kill before the settings were written left a folder that could neither be started nor resumed."""
    run_dir = inputs / f"made-{len(left)}"
    run_dir.mkdir()
    for name in left:
        (run_dir / name).write_text("")
    settings = sft_settings(inputs, run_dir, "batch.steps=1")
    assert finish(command(settings, "--resume"), inputs / "made.out") == 2
    assert finish(command(settings), inputs / "made.out") == 0


def test_supervised_run_killed(inputs: Path) -> None:
    whole = inputs / "sft"
    began = time.monotonic()
    assert finish(command(sft_settings(inputs, whole)), inputs / "sft.out") == 0
    seconds = time.monotonic() - began
    kill_many(lambda run_dir: sft_settings(inputs, run_dir), whole, seconds, kills=4, seed=2)


def test_adapters_with_dropout_killed(inputs: Path) -> None:
    """Dropout draws from torch's own generator, whose state is part of the cut."""
    whole = inputs / "lora"
    began = time.monotonic()
    assert finish(command(train_settings(inputs, whole, *LORA)), inputs / "lora.out") == 0
    seconds = time.monotonic() - began
    kill_many(lambda run_dir: train_settings(inputs, run_dir, *LORA), whole, seconds, kills=4, seed=3)


def slow_run(inputs: Path, run_dir: Path, *changes: str) -> TrainSettings:
    """The same run, with a step long enough to be met by a signal."""
    return train_settings(inputs, run_dir, "reward.kwargs={slow: 0.02}", *changes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_boundary_saved(
    inputs: Path, uninterrupted: tuple[Path, float], number: signal.Signals
) -> None:
    run_dir, output = inputs / number.name, inputs / f"{number.name}.out"
    # Nothing is saved on the way but by the stop.
    settings = slow_run(inputs, run_dir, "checkpoint.every_steps=0")
    process = start(command(settings), output)
    assert wait_until(lambda: 1 in steps_logged(run_dir), process), output.read_text()
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 130
    assert "stopping after this step, then saving; Ctrl-C again stops at once without saving" in output.read_text()
    done = max(steps_logged(run_dir))
    told = f"stopped after step {done} of 6, saved; go on with: meshloom train {run_dir}/settings.yaml --resume"
    assert told in output.read_text().splitlines()
    assert 1 <= done < 6
    assert whole_checkpoints(run_dir) == [done]
    assert read_status(run_dir)["state"] == "stopped"
    assert finish(["train", str(run_dir / "settings.yaml"), "--resume"], output) == 0
    assert_same_run(uninterrupted[0], run_dir, only_last=True)


def test_a_second_signal_stops_now_and_the_run_resumes(inputs: Path, uninterrupted: tuple[Path, float]) -> None:
    run_dir, output = inputs / "twice", inputs / "twice.out"
    settings = slow_run(inputs, run_dir, "checkpoint.every_steps=2", "reward.kwargs={slow: 0.05}")
    process = start(command(settings), output)
    assert wait_until(lambda: 3 in steps_logged(run_dir), process), output.read_text()
    # The record is written just before the boundary at which the first signal would stop the run and save it.
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert wait_until(lambda: "stopping after this step" in output.read_text(), process)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    assert f"goes on from step 2 with: meshloom train {run_dir}/settings.yaml --resume\nstopped\n" in output.read_text()
    assert max(steps_logged(run_dir)) == 3
    assert whole_checkpoints(run_dir) == [2]
    assert read_status(run_dir)["state"] == "stopped"
    assert finish(command(settings, "--resume"), output) == 0
    assert_same_run(uninterrupted[0], run_dir, only_last=True)


def test_a_stop_asked_for_as_a_step_ends_is_saved(inputs: Path) -> None:
    """A signal that came between the last look at the wish and the end of the loop stopped the run without saving its step."""
    run_dir = inputs / "late-wish"
    settings = sft_settings(inputs, run_dir, "checkpoint.every_steps=0", "batch.steps=400")
    process = start(command(settings), inputs / "late-wish.out")
    assert wait_until(lambda: len(steps_logged(run_dir)) > 2, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    assert whole_checkpoints(run_dir) == [max(steps_logged(run_dir))]


def test_a_finished_run_resumes_to_nothing_or_to_more_steps(inputs: Path, uninterrupted: tuple[Path, float]) -> None:
    constant = ("optimizer.schedule=constant", "validation.every_steps=1")
    run_dir, longer = inputs / "short", inputs / "longer"
    assert finish(command(train_settings(inputs, run_dir, "batch.steps=2", *constant)), inputs / "longer.out") == 0
    assert finish(command(train_settings(inputs, run_dir, "batch.steps=2", *constant), "--resume"), inputs / "out") == 0
    assert steps_logged(run_dir) == [1, 2]
    with pytest.raises(
        UserError, match="has done 2 steps, more than batch.steps=1"
    ):  # it was "stopped after step 2 of 1"
        find_checkpoint(train_settings(inputs, run_dir, "batch.steps=1", *constant))
    assert finish(command(train_settings(inputs, run_dir, "batch.steps=4", *constant), "--resume"), inputs / "out") == 0
    assert finish(command(train_settings(inputs, longer, "batch.steps=4", *constant)), inputs / "longer.out") == 0
    assert_same_run(longer, run_dir)


def test_the_seed_decides_dropout_too(inputs: Path) -> None:
    """Torch's generator was never seeded, so what it drew depended on what the process had done before."""
    changes = (*LORA, "batch.steps=1", "data.validation=null", "optimizer.lr=0.1")
    settings = [train_settings(inputs, inputs / f"seeded-{i}", *changes) for i in (1, 2)]
    for noise, given in enumerate(settings):
        torch.manual_seed(noise)
        assert run_training(given, resume=False) == 0
    assert_same_run(*(Path(given.run_dir) for given in settings))
