"""PPO over several devices: wherever the critic is, a run is that of one device."""

from pathlib import Path

import pytest

from meshloom.loop.train import run_training
from tests.lesson_runs import train_settings, write_inputs
from tests.test_many_devices import assert_like

# The first gradients of a critic's layers are rounding, as its head is 0: a larger eps keeps AdamW from making them large.
PPO = (
    "algorithm.advantage=gae",
    "algorithm.kl=none",
    "algorithm.lam=0.95",
    "critic.warmup_steps=1",
    "critic.optimizer.lr=1e-2",
    "critic.optimizer.eps=1e-3",
    "batch.steps=3",
    "checkpoint.every_steps=0",
    "validation.every_steps=0",
    "validation.before_training=false",
)
TWO = "cluster.devices_per_node=2"
APART = ("placement.actor=[0]", "placement.rollout=[0]", "placement.critic=[1]")
LAYOUTS = {
    "shared": (TWO,),
    "tensor": (TWO, "parallel.critic.tensor=2"),
    "sequence": (TWO, "parallel.critic.sequence=2", "parallel.actor.sequence=2"),
    "pipeline": (TWO, "parallel.critic.pipeline=2"),
    "split rollout": (TWO, "placement.actor=[0]", "placement.rollout=[1]", "placement.critic=[1]"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Path:
    """A finished run on one device."""
    assert run_training(train_settings(inputs, inputs / "alone", *PPO), resume=False) == 0
    return inputs / "alone"


def test_a_critic_on_a_device_of_its_own_does_what_one_device_does(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """Its updates are made beside the actor's; a run goes on from its checkpoint on one device."""
    two = tmp_path / "two"
    assert run_training(train_settings(inputs, two, *PPO, TWO, *APART), resume=False) == 0
    assert_like(alone, two)
    newest = sorted((two / "checkpoints").glob("step-*"))[-1]
    single = sorted((alone / "checkpoints").glob("step-*"))[-1]
    files = [sorted(str(p.relative_to(at)) for p in at.rglob("*") if p.is_file()) for at in (newest, single)]
    assert files[0] == files[1]
    assert (newest / "critic" / "config.json").read_text() == (single / "critic" / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_does_what_one_device_does(inputs: Path, alone: Path, tmp_path: Path, layout: str) -> None:
    assert run_training(train_settings(inputs, tmp_path / "run", *PPO, *LAYOUTS[layout]), resume=False) == 0
    # AdamW makes steps of one size, also where a gradient is little more than rounding.
    assert_like(alone, tmp_path / "run", atol=1e-4)


@pytest.mark.slow
def test_interleaved_stages_of_every_role_do_what_one_device_does(tmp_path: Path) -> None:
    """An actor with a table at both ends of the pipeline, a reference, a critic; the run goes on without stages."""
    inputs = write_inputs(tmp_path / "inputs", layers=4)
    steps = ("algorithm.kl=loss", "optimizer.schedule=constant")
    assert run_training(train_settings(inputs, tmp_path / "alone", *PPO, *steps), resume=False) == 0
    roles, names = ("actor", "reference", "critic"), ("pipeline", "stages_per_device")
    cuts = [f"parallel.{role}.{name}=2" for role in roles for name in names]
    run = tmp_path / "run"
    assert run_training(train_settings(inputs, run, *PPO, *steps, "batch.steps=2", TWO, *cuts), resume=False) == 0
    assert run_training(train_settings(inputs, run, *PPO, *steps, TWO), resume=True) == 0
    assert_like(tmp_path / "alone", run, only_last=True)


@pytest.mark.slow
def test_a_run_goes_on_with_its_critic_elsewhere(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """Two steps with the critic apart, the third on one device."""
    run = tmp_path / "run"
    steps = ("batch.steps=3", "checkpoint.every_steps=2", "optimizer.schedule=constant")
    whole = tmp_path / "whole"
    assert run_training(train_settings(inputs, whole, *PPO, *steps), resume=False) == 0
    first = train_settings(inputs, run, *PPO, *steps, TWO, *APART)
    assert run_training(first, resume=False) == 0
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    for file in sorted(newest.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    newest.rmdir()
    assert run_training(train_settings(inputs, run, *PPO, *steps), resume=True) == 0
    assert_like(whole, run)
