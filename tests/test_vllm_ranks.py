"""Real vLLM over several processes: a replica on each, on devices of its own, and one replica cut over two."""

from pathlib import Path

import pytest

from meshloom.lesson.model import build_model
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from tests.lesson_runs import REWARD, train_settings, write_rows
from tests.test_many_devices import assert_like

pytestmark = pytest.mark.vllm
VLLM = (
    "rollout.engine=vllm",
    "rollout.vllm.enforce_eager=true",
    "rollout.kv_cache_bytes=60000000",
    "rollout.max_sequences=16",
    "algorithm.kl=none",
    "model.dtype=float32",
    "batch.steps=3",
)
LAYOUTS = {
    "two replicas": ("cluster.devices_per_node=2",),
    "devices of its own": ("cluster.devices_per_node=2", "placement.actor=[0]", "placement.rollout=[1]"),
    "one replica over two": ("cluster.devices_per_node=2", "parallel.rollout.tensor=2"),
}
NEAR = 2e-5
"""Gap of float32 with float32."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_rows(folder / "train.jsonl", 14)
    write_rows(folder / "held_out.jsonl", 5, first=20)
    (folder / "reward.py").write_text(REWARD)
    build_model(folder / "model", folder / "train.jsonl", seed=1)
    return folder


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    assert run_training(train_settings(inputs, run_dir, *VLLM), resume=False) == 0
    return run_dir


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_over_devices_does_what_one_device_does(inputs: Path, alone: Path, tmp_path: Path, layout: str) -> None:
    settings = train_settings(inputs, tmp_path / "run", *VLLM, *LAYOUTS[layout])
    assert run_training(settings, resume=False) == 0
    assert_like(alone, tmp_path / "run")
    gaps = [r["metrics"]["sampler_gap"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert len(gaps) == 3 and max(gaps) < NEAR
    assert not list(Path("/dev/shm").glob("meshloom-*")), "memory that ranks shared has still a name"
