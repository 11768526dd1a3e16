"""Further runs over several devices, opt-in: pipelines, both kinds of cuts at once, torchrun, and the lesson."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.lesson.model import build_model
from meshloom.lesson.problems import write_problems
from meshloom.lesson.settings import GRPO_FILE, SFT_FILE, write_settings
from meshloom.loop.sft import run_sft
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.train.export import export_model
from tests.lesson_runs import command, train_settings, write_inputs
from tests.test_many_devices import BRIEF, assert_like, samples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Path:
    """A finished run on one device."""
    assert run_training(train_settings(inputs, inputs / "alone", *BRIEF), resume=False) == 0
    return inputs / "alone"


@pytest.mark.parametrize(
    "cuts",
    [
        ("cluster.devices_per_node=2", "parallel.actor.pipeline=2", "parallel.reference.pipeline=2"),
        ("cluster.devices_per_node=2", "parallel.actor.tensor=2", "parallel.reference.pipeline=2"),
        ("cluster.devices_per_node=4", "parallel.actor.tensor=2", "parallel.reference.sequence=2"),
        ("cluster.devices_per_node=4", "placement.actor=[0,1]", "placement.reference=[2]", "placement.rollout=[2,3]"),
        ("cluster.devices_per_node=2", "offload.actor={parameters: host, optimizer: disk}"),
    ],
    ids=[
        "pipeline",
        "layers are cut, those of the reference in stages",
        "sharded and split",
        "pools that overlap",
        "weights that leave their devices",
    ],
)
def test_cuts_of_each_role_do_what_one_device_does(
    inputs: Path, alone: Path, tmp_path: Path, cuts: tuple[str, ...]
) -> None:
    assert run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *cuts), resume=False) == 0
    assert_like(alone, tmp_path / "run")


def test_a_run_goes_from_a_pipeline_to_tensor_parallelism_to_one_device(inputs: Path, tmp_path: Path) -> None:
    steps = ("optimizer.schedule=constant", "checkpoint.every_steps=0", "validation.every_steps=0")
    assert run_training(train_settings(inputs, tmp_path / "whole", *steps, "batch.steps=6"), resume=False) == 0
    two = "cluster.devices_per_node=2"
    cuts = ((two, "parallel.actor.pipeline=2"), (two, "parallel.actor.tensor=2"), ())
    for number, cut in enumerate(cuts):
        settings = train_settings(inputs, tmp_path / "run", *steps, f"batch.steps={2 * number + 2}", *cut)
        assert run_training(settings, resume=number > 0) == 0
    assert_like(tmp_path / "whole", tmp_path / "run", only_last=True)


def test_what_a_worker_finds_wrong_with_the_input_leaves_nothing_behind(inputs: Path, tmp_path: Path) -> None:
    """A weight that is missing is found where the model is loaded: bad input, told once, without a run folder."""
    shutil.copytree(inputs / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    changes = (f"model.path={tmp_path / 'model'}", "cluster.devices_per_node=2")
    with pytest.raises(UserError, match=r"missing from .*layers\.1\.mlp\.up_proj") as refused:
        run_training(train_settings(inputs, tmp_path / "runs" / "run", *BRIEF, *changes), resume=False)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_torchruns_processes_are_the_devices_of_the_run(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """As many devices as torchrun has started, without a word in the settings."""
    args = command(train_settings(inputs, tmp_path / "run", *BRIEF))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "meshloom", *args]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_like(alone, tmp_path / "run")
    assert "peak_memory_bytes/rank1" in read_metrics(tmp_path / "run")[-1]["metrics"]


def test_the_lesson_over_two_devices_sees_the_samples_of_one(tmp_path: Path) -> None:
    """The quickstart's own settings, with a shorter warm-up and fewer steps."""
    data = write_problems(tmp_path / "data", seed=0, num_examples=3000, num_train=600)
    base = build_model(tmp_path / "base", data.examples, seed=0)
    write_settings(tmp_path, base=base, warm=tmp_path / "warm", data=data, seed=0, small=True)
    brief = ["batch.steps=100", "batch.samples_per_update=64"]
    assert run_sft(load_settings(SftSettings, tmp_path / SFT_FILE, brief), resume=False) == 0
    export_model(tmp_path / "sft", tmp_path / "warm")
    short = ["batch.steps=4", "batch.prompts_per_step=32", "validation.every_steps=0", "logging.loggers=[]"]
    for name, more in (("one", []), ("two", ["cluster.devices_per_node=2"])):
        changes = [*short, f"run_dir={tmp_path / name}", *more]
        assert run_training(load_settings(TrainSettings, tmp_path / GRPO_FILE, changes), resume=False) == 0
    drawn = [[(s["step"], s["row"], s["response_ids"]) for s in samples(tmp_path / name)] for name in ("one", "two")]
    pairs = list(zip(*drawn, strict=True))
    assert all(one == two for one, two in pairs if one[0] <= 1)
    # Later on, rounding may make a token another one, and the sample with it.
    assert sum(one != two for one, two in pairs) <= 0.02 * len(pairs)
    last = [read_metrics(tmp_path / name)[-1]["metrics"]["accuracy"] for name in ("one", "two")]
    assert last[0] == pytest.approx(last[1], abs=0.02)
