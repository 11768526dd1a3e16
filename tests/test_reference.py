"""The reference policy: its own folder, the actor's weights now and then, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.plan import build_plan
from tests.lesson_runs import assert_same_run, train_settings, write_inputs, write_model
from tests.test_many_devices import assert_like

BRIEF = ("data.validation=null", "optimizer.schedule=constant", "checkpoint.keep_last=9", "batch.steps=5")
EVERY = "reference.refresh_every_steps=2"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def train(inputs: Path, run_dir: Path, *changes: str, resume: bool = False) -> Path:
    assert run_training(train_settings(inputs, run_dir, *BRIEF, *changes), resume=resume) == 0
    return run_dir


def metric(run_dir: Path, name: str) -> list[float]:
    return [record["metrics"][name] for record in read_metrics(run_dir)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def refreshed(inputs: Path) -> Path:
    """Two updates a step, a refresh after each second step."""
    return train(inputs, inputs / "refreshed", EVERY)


def test_the_reference_takes_the_actors_weights_every_so_many_steps(inputs: Path, refreshed: Path) -> None:
    frozen = train(inputs, inputs / "frozen")
    assert metric(refreshed, "reference_version") == [0, 0, 4, 4, 8]
    assert metric(refreshed, "kl_reference")[:2] == metric(frozen, "kl_reference")[:2]
    # At the third step the first update measures from its own weights.
    assert metric(refreshed, "kl_reference")[2] < metric(frozen, "kl_reference")[2] / 2
    checkpoints = {int(path.name[-1]): path for path in (refreshed / "checkpoints").glob("step-*")}
    assert [(checkpoints[step] / "reference").is_dir() for step in (1, 2, 3, 4, 5)] == [False, False, True, True, True]
    for step, of in ((3, 2), (4, 2), (5, 4)):
        held, then = weights(checkpoints[step] / "reference"), weights(checkpoints[of])
        assert all(torch.equal(held[name], then[name]) for name in then)


@pytest.mark.parametrize("stop", [2, 3])
def test_a_refreshed_run_that_is_resumed_repeats_itself(
    inputs: Path, refreshed: Path, tmp_path: Path, stop: int
) -> None:
    """Before a refresh that is due, and after one, whose weights are in the checkpoint."""
    train(inputs, tmp_path / "run", EVERY, f"batch.steps={stop}")
    train(inputs, tmp_path / "run", EVERY, resume=True)
    assert_same_run(refreshed, tmp_path / "run")


def test_a_reference_that_is_moved_away_is_the_same(inputs: Path, refreshed: Path, tmp_path: Path) -> None:
    """What came with a refresh is not dropped as unchanged when it leaves the device."""
    away = ("offload.reference.parameters=host", "offload.actor.parameters=host", "offload.actor.optimizer=host")
    train(inputs, tmp_path / "run", EVERY, *away)
    for name in ("kl_reference", "loss", "grad_norm", "reference_version"):
        assert metric(tmp_path / "run", name) == metric(refreshed, name)
    last = "checkpoints/step-000005"
    held, there = weights(tmp_path / "run" / last / "reference"), weights(refreshed / last / "reference")
    assert all(torch.equal(held[name], there[name]) for name in there)


def test_a_reference_of_its_own_folder_is_what_is_measured_from(inputs: Path, tmp_path: Path) -> None:
    """With adapters too, whose base it then is not."""
    other = write_model(tmp_path / "other", seed=5)
    one_step = ("batch.steps=1", "batch.prompts_per_update=4", f"reference.model={other}")
    whole = train(inputs, tmp_path / "whole", *one_step)
    assert metric(whole, "kl_reference")[0] > 0.1
    adapters = train(inputs, tmp_path / "adapters", *one_step, "model.lora={rank: 2}")
    assert metric(adapters, "kl_reference")[0] == pytest.approx(metric(whole, "kl_reference")[0], rel=1e-4)


def plan_of(inputs: Path, tmp_path: Path, *changes: str) -> Any:
    return build_plan(train_settings(inputs, tmp_path / "run", *changes), 14)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("A035", [EVERY, "model.lora={rank: 2}"]),
        ("A036", ["reference.model=nowhere"]),
        ("A037", [EVERY, "cluster.devices_per_node=2", "parallel.actor.pipeline=2"]),
    ],
)
def test_what_a_reference_cannot_be_is_refused(inputs: Path, tmp_path: Path, code: str, changes: list[str]) -> None:
    assert code in [problem.code for problem in plan_of(inputs, tmp_path, *changes).problems]


def test_a_reference_of_another_architecture_is_refused_by_what_differs(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "model", tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    found = plan_of(inputs, tmp_path, f"reference.model={tmp_path / 'wide'}").problems
    assert [problem.code for problem in found] == ["A036"]
    assert "hidden_size 64, not 32" in found[0].why


def test_settings_of_a_reference_that_nothing_uses_are_told(inputs: Path, tmp_path: Path) -> None:
    found = plan_of(inputs, tmp_path, EVERY, "algorithm.kl=none").warnings
    assert "A034" in [warning.code for warning in found]


def test_the_plan_says_what_the_reference_is(inputs: Path, tmp_path: Path) -> None:
    lines = {line.name: line for line in plan_of(inputs, tmp_path, EVERY).lines}
    assert lines["reference"].formula == "takes the actor's weights every 2 steps"
    base = {line.name: line for line in plan_of(inputs, tmp_path, "model.lora={rank: 2}").lines}
    assert base["reference"].value == "base under the adapters"


LAYOUTS = {
    "shared": ("cluster.devices_per_node=2",),
    "of its own": ("cluster.devices_per_node=2", "placement.actor=[0]", "placement.reference=[1]"),
    "cut otherwise": ("cluster.devices_per_node=2", "parallel.actor.tensor=2"),
    "moved away": ("cluster.devices_per_node=2", "offload.reference.parameters=host", "offload.actor.parameters=host"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_over_devices_the_reference_is_refreshed_and_resumed_as_on_one(
    inputs: Path, refreshed: Path, tmp_path: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    train(inputs, tmp_path / "run", EVERY, *layout, "batch.steps=3")
    train(inputs, tmp_path / "run", EVERY, *layout, resume=True)
    assert_like(refreshed, tmp_path / "run", atol=1e-4)
    assert metric(tmp_path / "run", "reference_version") == [0, 0, 4, 4, 8]


@pytest.mark.parametrize("place", ["model.path", "reference.model"])
def test_weights_that_have_changed_below_a_checkpoint_are_told_on_resume(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """The divergence was measured from other weights, and nothing was said."""
    folder = tmp_path / "model"
    shutil.copytree(inputs / "model", folder)
    brief = (f"{place}={folder}", "batch.steps=1")
    train(inputs, tmp_path / "run", *brief)
    capsys.readouterr()
    train(inputs, tmp_path / "run", f"{place}={folder}", "batch.steps=2", resume=True)
    assert "changed since" not in capsys.readouterr().out
    write_model(folder, seed=5)
    train(inputs, tmp_path / "run", f"{place}={folder}", "batch.steps=3", resume=True)
    assert f"the weights of {place} changed since the checkpoint" in capsys.readouterr().out
