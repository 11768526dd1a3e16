"""Runs over several devices, each a process: the same samples and weights as on one, whatever the layout."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.observe.run_folder import read_status
from tests.lesson_runs import (
    MEASURED,
    command,
    finish,
    go_on,
    lives,
    start,
    steps_logged,
    train_settings,
    wait_until,
    whole_checkpoints,
    write_inputs,
)

BRIEF = ("batch.steps=2", "checkpoint.every_steps=0", "validation.every_steps=0")
TWO = ("cluster.devices_per_node=2",)
SPLIT = ("placement.actor=[0]", "placement.reference=[0]", "placement.rollout=[1]")
LAYOUTS = {
    "split": ("cluster.devices_per_node=2", *SPLIT),
    "hybrid": ("cluster.devices_per_node=4", "parallel.actor.fsdp_size=2", "parallel.reference.fsdp_size=2"),
    "reference of its own": ("cluster.devices_per_node=2", "placement.actor=[0]", "placement.reference=[1]"),
    "tensor": ("cluster.devices_per_node=2", "parallel.actor.tensor=2", "parallel.reference.tensor=2"),
    "engine over four": ("cluster.devices_per_node=4", "parallel.rollout.tensor=2"),
    "engine over two, trainer beside": ("cluster.devices_per_node=3", "placement.actor=[0]", "placement.reference=[0]")
    + ("placement.rollout=[1,2]", "parallel.rollout.tensor=2"),
    "sequence": ("cluster.devices_per_node=2", "parallel.actor.sequence=2", "parallel.reference.sequence=2"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Path:
    """A finished run on one device."""
    assert run_training(train_settings(inputs, inputs / "alone", *BRIEF), resume=False) == 0
    return inputs / "alone"


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def newest(run_dir: Path) -> Path:
    return sorted((run_dir / "checkpoints").glob("step-*"))[-1]


def assert_like(one: Path, other: Path, *, atol: float = 1e-5, only_last: bool = False) -> None:
    """The same samples; rewards, metrics and all tensors of the last checkpoints but for rounding.

    Args:
        one: a run folder.
        other: another.
        atol: tolerance of all numbers.
        only_last: leave out metrics of validations, which one of the runs had at other steps.
    """
    drawn = [[s for s in samples(run) if s["kind"] == "train"] for run in (one, other)]
    ids = [[(s["step"], s["group"], s["response_ids"]) for s in found] for found in drawn]
    assert ids[0] == ids[1]
    rewards = [[s["reward"] for s in found] for found in drawn]
    assert rewards[0] == pytest.approx(rewards[1], abs=atol)
    records = [[r for r in read_metrics(run) if r["kind"] == "train" or not only_last] for run in (one, other)]
    for first, second in zip(*records, strict=True):
        assert (first["step"], first["kind"]) == (second["step"], second["kind"])
        for name, value in first["metrics"].items():
            if name not in MEASURED | {"sampler_gap", "sampler_gap_k3"}:
                assert second["metrics"][name] == pytest.approx(value, rel=1e-3, abs=atol), name
    files = [
        path.relative_to(newest(one)) for path in newest(one).rglob("*.safetensors") if path.name != "state.safetensors"
    ]
    assert files
    for file in files:
        tensors, others = load_file(newest(one) / file), load_file(newest(other) / file)
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == others[name].dtype
            torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=atol)


def test_two_devices_that_share_everything_do_what_one_does(
    inputs: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights sharded, an engine on each device; the checkpoint is of the same form, and each rank's memory is known."""
    settings = train_settings(inputs, tmp_path / "two", *BRIEF, "cluster.devices_per_node=2")
    assert run_training(settings, resume=False) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"starting 2 workers; what they print: {tmp_path / 'two' / 'logs'}"
    assert_like(alone, tmp_path / "two")
    metrics = read_metrics(tmp_path / "two")[-1]["metrics"]
    assert metrics["peak_memory_bytes"] == max(metrics[f"peak_memory_bytes/rank{rank}"] for rank in (0, 1)) > 2**20
    phases = {json.loads(line)["phase"] for line in (tmp_path / "two" / "memory.jsonl").read_text().splitlines()}
    assert {"generate", "update", "sync"} <= phases
    assert not list(tmp_path.glob("two/checkpoints/.*"))
    assert not list_of_workers()


def test_an_engine_over_two_devices_samples_what_one_does(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """Its model is split, on the devices that train; the first of them tells the samples."""
    more = ("cluster.devices_per_node=2", "parallel.rollout.tensor=2")
    assert run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *more), resume=False) == 0
    assert_like(alone, tmp_path / "run")


def list_of_workers() -> list[psutil.Process]:
    """Processes that this one has started and that live."""
    return [child for child in psutil.Process().children(recursive=True) if is_worker(child) and lives(child)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return "meshloom.fabric.worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_killed_worker_ends_the_run_by_name_and_the_run_goes_on_on_one_device(inputs: Path, tmp_path: Path) -> None:
    """Training and generation are on devices of their own; then one device finishes the run, as if nothing had happened."""
    changes = ("optimizer.schedule=constant", "batch.steps=400", "checkpoint.keep_last=500")
    settings, output = train_settings(inputs, tmp_path / "run", *changes, *LAYOUTS["split"]), tmp_path / "out"
    process = start(command(settings), output)
    assert wait_until(lambda: len(steps_logged(tmp_path / "run")) > 3, process, timeout=120), output.read_text()
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if is_worker(child)]
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGKILL)
    process.join(60)
    assert process.exitcode == 3, output.read_text()
    said = output.read_text()
    assert "was killed by SIGKILL" in said and "--resume" in said and "error: rank " in said
    assert read_status(tmp_path / "run")["state"] == "failed"
    assert not any(map(lives, workers))
    last = max(whole_checkpoints(tmp_path / "run")) + 2
    alone = [*changes[::2], f"batch.steps={last}", "checkpoint.every_steps=0"]
    assert finish(go_on(train_settings(inputs, tmp_path / "run", *alone)), output) == 0, output.read_text()
    assert run_training(train_settings(inputs, tmp_path / "whole", *alone), resume=False) == 0
    assert_like(tmp_path / "whole", tmp_path / "run", only_last=True)


def test_ctrl_c_as_workers_start_leaves_nothing(inputs: Path, tmp_path: Path) -> None:
    settings, output = train_settings(inputs, tmp_path / "run", "cluster.devices_per_node=2"), tmp_path / "out"
    process = start(command(settings), output)
    assert wait_until(lambda: (tmp_path / "run" / "logs").exists(), process), output.read_text()
    children = psutil.Process(process.pid).children(recursive=True)
    psutil.Process(process.pid).send_signal(signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, output.read_text()
    assert not (tmp_path / "run").exists()
    assert not any(map(lives, children))


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_saves(inputs: Path, tmp_path: Path) -> None:
    settings, output = train_settings(inputs, tmp_path / "run", "batch.steps=400", *LAYOUTS["split"]), tmp_path / "out"
    process = start(command(settings), output)
    assert wait_until(lambda: steps_logged(tmp_path / "run"), process, timeout=120), output.read_text()
    psutil.Process(process.pid).send_signal(signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, output.read_text()
    assert whole_checkpoints(tmp_path / "run")[-1] == max(steps_logged(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_do_what_one_device_does(inputs: Path, alone: Path, tmp_path: Path, layout: str) -> None:
    assert run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *LAYOUTS[layout]), resume=False) == 0
    assert_like(alone, tmp_path / "run")


@pytest.mark.slow
def test_adapters_over_two_devices(inputs: Path, tmp_path: Path) -> None:
    """Sharded; and on layers that are cut, of which an engine that is cut too gets them merged."""
    cut = ("parallel.actor.tensor=2", "parallel.rollout.tensor=2")
    for name, more in (("alone", ()), ("two", TWO), ("cut", (*TWO, *cut))):
        settings = train_settings(inputs, tmp_path / name, *BRIEF, "model.lora={rank: 2}", *more)
        assert run_training(settings, resume=False) == 0
    assert_like(tmp_path / "alone", tmp_path / "two")
    assert_like(tmp_path / "alone", tmp_path / "cut")


@pytest.mark.slow
def test_checkpoints_go_from_four_devices_to_two_to_three(inputs: Path, tmp_path: Path) -> None:
    """Each continues where the one before was, as one device does that was never interrupted."""
    steps = ("optimizer.schedule=constant", "checkpoint.every_steps=0", "validation.every_steps=0")
    whole = train_settings(inputs, tmp_path / "whole", *steps, "batch.steps=6")
    assert run_training(whole, resume=False) == 0
    for count, last in ((4, 2), (2, 4), (3, 6)):
        changes = (*steps, f"batch.steps={last}", f"cluster.devices_per_node={count}")
        settings = train_settings(inputs, tmp_path / "run", *changes)
        assert run_training(settings, resume=count != 4) == 0
    assert_like(tmp_path / "whole", tmp_path / "run", only_last=True)


@pytest.mark.slow
def test_with_a_lag_generation_is_ahead_of_training_and_never_too_far(inputs: Path, tmp_path: Path) -> None:
    """Two updates a step and a lag of two versions: the samples of each step but the first are of the weights before, which
    is no disagreement of sampler and trainer."""
    lag = ("algorithm.max_lag_versions=2", "algorithm.max_sampler_gap=1.0e-3")
    settings = train_settings(inputs, tmp_path / "run", "batch.steps=6", *LAYOUTS["split"], *lag)
    assert run_training(settings, resume=False) == 0
    trained = [sample for sample in samples(tmp_path / "run") if sample["kind"] == "train"]
    for step in range(1, 7):
        versions = {version for sample in trained if sample["step"] == step for version in sample["versions"]}
        assert versions == {max(0, 2 * (step - 2))}
    settings = train_settings(inputs, tmp_path / "run", "batch.steps=8", *LAYOUTS["split"], *lag)
    assert run_training(settings, resume=True) == 0
    assert max(steps_logged(tmp_path / "run")) == 8
    gaps = [record["metrics"]["sampler_gap"] for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    assert gaps[0] < 1e-3 < min(gaps[1:5])


@pytest.mark.slow
def test_with_a_lag_a_run_that_is_resumed_repeats_itself(inputs: Path, tmp_path: Path) -> None:
    """What was in flight at a checkpoint is in it, with the versions that made it."""
    lag = (
        "algorithm.max_lag_versions=2",
        "algorithm.max_sampler_gap=null",
        "checkpoint.keep_last=9",
        *LAYOUTS["split"],
    )
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert run_training(train_settings(inputs, whole, "batch.steps=5", *lag), resume=False) == 0
    shutil.copytree(whole, again)
    for step in (3, 4, 5):
        shutil.rmtree(again / "checkpoints" / f"step-{step:06d}")
    assert run_training(train_settings(inputs, again, "batch.steps=5", *lag), resume=True) == 0
    assert samples(whole) == samples(again)
    for file in newest(whole).rglob("*.safetensors"):
        assert file.read_bytes() == (newest(again) / file.relative_to(newest(whole))).read_bytes()
    lags = [record["metrics"]["lag_versions"] for record in read_metrics(again) if record["kind"] == "train"]
    assert lags == [0, 2, 2, 2, 2]
