"""Whole runs that sample with real vLLM: the trainer and vLLM agree after each movement of weights, and not without."""

from pathlib import Path

import pytest
import torch

from meshloom.config.errors import RunFault, UserError
from meshloom.config.settings import EvalSettings, TrainSettings
from meshloom.lesson.model import build_model
from meshloom.loop.evaluate import run_evaluation
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.rollout.vllm_build import OpenVllm, VllmOptions, open_vllm
from meshloom.weights.feed import TrainerFeed
from meshloom.weights.movement import Movement
from tests.lesson_runs import REWARD, train_settings, write_rows

pytestmark = pytest.mark.vllm
KEPT: list[OpenVllm] = []
NEAR = 2e-3 if torch.cuda.is_available() else 2e-5
"""Gap of float32 with float32; a GPU's attention multiplies with fewer bits."""
VLLM = [
    "rollout.engine=vllm",
    "rollout.vllm.enforce_eager=true",
    "rollout.kv_cache_bytes=60000000",
    "rollout.max_sequences=16",
    "algorithm.kl=none",
    "model.dtype=float32",
    "validation.before_training=true",
    "batch.steps=4",
    f"device={'cuda' if torch.cuda.is_available() else 'cpu'}",
    "rollout.vllm.sleep=false",
]


@pytest.fixture(autouse=True)
def engines_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of vLLM's engines that is collected takes the state with it that all of a process share."""

    def open_and_keep(options: VllmOptions) -> OpenVllm:
        KEPT.append(open_vllm(options))
        return KEPT[-1]

    monkeypatch.setattr("meshloom.loop.vllm.open_vllm", open_and_keep)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_rows(folder / "train.jsonl", 14)
    write_rows(folder / "held_out.jsonl", 5, first=20)
    (folder / "reward.py").write_text(REWARD)
    build_model(folder / "model", folder / "train.jsonl", seed=1)
    return folder


def gaps(settings: TrainSettings) -> list[float]:
    records = [record for record in read_metrics(Path(settings.run_dir)) if record["kind"] == "train"]
    return [record["metrics"]["sampler_gap"] for record in records]


@pytest.mark.parametrize("changes", [[], ["model.lora.rank=4", "optimizer.lr=0.05"]], ids=["whole", "adapters"])
def test_sampler_and_trainer_agree_in_every_step(inputs: Path, tmp_path: Path, changes: list[str]) -> None:
    settings = train_settings(inputs, tmp_path / "run", *VLLM, *changes)
    assert run_training(settings, resume=False) == 0
    found = gaps(settings)
    assert len(found) == 4 and max(found) < NEAR
    validations = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "validation"]
    assert [record["step"] for record in validations] == [0, 2, 4]


def test_without_movement_the_gap_grows(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure that shows stale weights shows them."""
    move = Movement.move
    monkeypatch.setattr(Movement, "move", lambda self, receiver: self.last or move(self, receiver))
    settings = train_settings(inputs, tmp_path / "seen", *VLLM)
    with pytest.raises(RunFault, match="disagree about fixed tokens"):
        run_training(settings, resume=False)
    monkeypatch.setattr(TrainerFeed, "prove", lambda self, engine: None)
    settings = train_settings(inputs, tmp_path / "unseen", *VLLM, "algorithm.max_sampler_gap=null")
    assert run_training(settings, resume=False) == 0
    found = gaps(settings)
    assert found[0] < NEAR and min(found[1:]) > 0.01 and found[-1] > found[1]


def test_a_resumed_run_repeats_the_uninterrupted_one(inputs: Path, tmp_path: Path) -> None:
    whole = train_settings(inputs, tmp_path / "whole", *VLLM)
    run_training(whole, resume=False)
    short = train_settings(inputs, tmp_path / "parts", *VLLM, "batch.steps=2", "optimizer.schedule=constant")
    long = train_settings(inputs, tmp_path / "parts", *VLLM, "optimizer.schedule=constant")
    straight = train_settings(inputs, tmp_path / "straight", *VLLM, "optimizer.schedule=constant")
    run_training(short, resume=False)
    run_training(long, resume=True)
    run_training(straight, resume=False)
    assert _rewards(tmp_path / "parts") == _rewards(tmp_path / "straight") != _rewards(tmp_path / "whole")


def _rewards(run_dir: Path) -> list[float]:
    return [record["metrics"]["reward_mean"] for record in read_metrics(run_dir) if record["kind"] == "train"]


def test_an_evaluation_samples_with_vllm_what_the_embedded_engine_samples(inputs: Path, tmp_path: Path) -> None:
    found = []
    for engine in ("torch", "vllm"):
        settings = train_settings(inputs, tmp_path / "run", *VLLM, f"rollout.engine={engine}")
        values = {
            name: getattr(settings, name) for name in EvalSettings.model_fields if name in TrainSettings.model_fields
        }
        run_dir = tmp_path / engine
        run_evaluation(EvalSettings(**values | {"run_dir": str(run_dir)}))
        found.append([r["metrics"]["reward_mean"] for r in read_metrics(run_dir)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("rollout.vllm.arguments.max_num_seq=3", "did you mean max_num_seqs"),
        ("rollout.vllm.arguments.max_num_seqs=3", r"rollout\.max_sequences"),
        ("rollout.vllm.max_model_len=20", "opened for 20"),
        ("rollout.vllm.arguments.block_size=-3", "refuses to start"),
    ],
)
def test_what_vllm_cannot_do_is_said_before_anything_is_written(
    inputs: Path, tmp_path: Path, change: str, says: str
) -> None:
    settings = train_settings(inputs, tmp_path / "run", *VLLM, change)
    with pytest.raises(UserError, match=says):
        run_training(settings, resume=False)
    assert not (tmp_path / "run").exists()
