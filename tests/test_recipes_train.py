"""Every recipe, from its name to a few steps of a small model on the processor."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from meshloom.config.names import Advantage, Recipe
from meshloom.config.recipes import RECIPES
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from tests.lesson_runs import train_settings, write_inputs

BRIEF = ("batch.steps=2", "data.validation=null", "checkpoint.every_steps=0")
KL_DEFAULTS = {"kl": "none", "kl_coefficient": 0.001}
"""What the shared settings give, and a recipe that says nothing of it leaves to its default."""
READY = [name for name in Recipe if RECIPES[name]["algorithm.advantage"] in list(Advantage)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def steps_of(inputs: Path, run_dir: Path, *changes: str) -> list[dict[str, Any]]:
    """The metrics of the steps of a run that changed every weight."""
    settings = train_settings(inputs, run_dir, *BRIEF, *changes)
    assert run_training(settings, resume=False) == 0
    before = load_file(inputs / "model" / "model.safetensors")
    after = load_file(sorted((run_dir / "checkpoints").glob("step-*"))[-1] / "model" / "model.safetensors")
    assert all(not after[name].equal(before[name]) for name in before)
    return [record["metrics"] for record in read_metrics(run_dir) if record["kind"] == "train"]


@pytest.mark.parametrize("name", READY)
def test_a_recipe_trains(inputs: Path, tmp_path: Path, name: Recipe) -> None:
    chosen = RECIPES[name]
    kl = [f"algorithm.{key}={chosen.get(f'algorithm.{key}', default)}" for key, default in KL_DEFAULTS.items()]
    steps = steps_of(inputs, tmp_path / "run", f"algorithm={name}", *kl)
    assert len(steps) == 2
    assert all(0 < step["grad_norm"] < 1e3 and step["sampler_gap"] < 0.1 for step in steps)
    place = chosen.get("algorithm.kl", "none")
    assert all(("kl_reward" in step) == (place == "reward") for step in steps)
    assert all(("kl_reference" in step) == (place != "none") for step in steps)
    if name is Recipe.DAPO:
        assert all("reward/overlong" in step and step["rollout_rounds"] >= 1 for step in steps)
