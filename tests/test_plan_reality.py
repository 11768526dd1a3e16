"""What the plan of a run says of bytes, against what the trainer of that run allocates and what its checkpoint takes."""

import json
from pathlib import Path

import pytest
import torch

from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.build import build_actor
from meshloom.plan import Plan, build_plan
from meshloom.samples import Samples
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.snapshot import ModelSnapshot, snapshot_bytes
from tests.lesson_runs import write_model
from tests.live_bytes import LiveBytes
from tests.models import tiny_model
from tests.test_train_model import make_samples, weighted

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 512}


def folder_of(path: Path, family: str, *, tied: bool) -> Path:
    """A model folder whose tokenizer is small beside its weights."""
    write_model(path)
    model = tiny_model(family, **WIDE, **({} if family == "qwen2" else {"tie_word_embeddings": tied}))
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    return path


def planned(path: Path, *given: str) -> tuple[TrainSettings, Plan]:
    required = ["run_dir=r", f"model.path={path}", "data.train.reasoning_gym=basic_arithmetic", "device=cpu"]
    settings = load_settings(TrainSettings, None, [*required, "data.max_prompt_tokens=32", *given])
    return settings, build_plan(settings, 1000)


def trained(settings: TrainSettings) -> TrainedModel:
    bound = MicrobatchBound(100)
    return build_actor(settings.model, settings.optimizer, bound, device="cpu", seed=0, checkpoint=None)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("family", "tied", "given"),
    [
        ("llama", False, ()),
        ("llama", True, ("model.dtype=bfloat16",)),
        ("qwen2", True, ()),
        ("qwen3", False, ("model.dtype=bfloat16",)),
        ("llama", False, ("model.lora.rank=32",)),
        ("qwen2", True, ("model.lora.rank=32", "model.dtype=bfloat16")),
        ("llama", False, ("model.lora.rank=32", "model.lora.target_modules=[q_proj, up_proj]")),
    ],
    ids=str,
)
def test_a_run_allocates_and_saves_what_its_plan_says(
    tmp_path: Path, family: str, tied: bool, given: tuple[str, ...]
) -> None:
    """Bytes of weights, gradients, masters and moments, and of the folder of a checkpoint, to 2 %."""
    path = folder_of(tmp_path / "model", family, tied=tied)
    settings, plan = planned(path, *given)
    model = trained(settings)
    model.forward_backward(make_samples(), weighted, temperature=1.0)
    optimizer = model.optimizer
    assert optimizer is not None
    optimizer.collect()
    gradients = sum(master.grad.nbytes for master in optimizer.masters.values() if master.grad is not None)
    model.optim_step(10)
    state = optimizer.state_tensors()
    weights = {p.data_ptr(): p.nbytes for p in model.module.parameters()}
    said = {line.name: line.value for line in plan.lines if isinstance(line.value, int)}
    assert sum(weights.values()) == pytest.approx(said["weights"] + said.get("adapter weights", 0), rel=0.02)
    assert gradients == pytest.approx(said["gradients"], rel=0.02)
    for name, kind in (("float32 masters", "master/"), ("optimizer moments", "exp_avg")):
        held = sum(tensor.nbytes for key, tensor in state.items() if key.startswith(kind))
        assert held == pytest.approx(said[name], rel=0.02)
    ModelSnapshot.take(model, load_tokenizer(path)).write(tmp_path / "checkpoint")
    assert size_of(tmp_path / "checkpoint") == pytest.approx(said["checkpoint"], rel=0.02)
    assert snapshot_bytes(model) == pytest.approx(said["checkpoint"], rel=0.02)


def test_the_checkpoint_of_a_run_over_devices_is_counted_once(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model", "llama", tied=False)
    _, alone = planned(path, "model.dtype=bfloat16")
    _, eight = planned(path, "model.dtype=bfloat16", "cluster.devices_per_node=8", "device=cuda")
    assert eight.value("checkpoint") == alone.value("checkpoint") == 14 * json_parameters(path)
    _, adapted = planned(path, "model.lora.rank=8", "cluster.devices_per_node=8", "device=cuda")
    assert adapted.value("checkpoint") == 14 * int(adapted.value("trained parameters") or 0)


def json_parameters(path: Path) -> int:
    """Parameters by the model itself."""
    config = json.loads((path / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    return sum(p.numel() for p in tiny_model("llama", torch.float32, **WIDE, tie_word_embeddings=False).parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_most_that_an_update_has_at_once_is_near_what_its_plan_says(tmp_path: Path, recompute: bool) -> None:
    """Gradients, activations and logits in float32, of layers that are not compiled; so many that what the plan leaves out of
    one of them counts little. The second microbatch has the gradients of the first beside it."""
    tokens, length = 1024, 64
    model = tiny_model(
        "llama", num_hidden_layers=12, hidden_size=128, intermediate_size=512, head_dim=32, vocab_size=512
    )
    write_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "m")
    given = (f"batch.tokens_per_microbatch={tokens}", f"rollout.max_response_tokens={length - 32}")
    chunk = f"model.logits_chunk_bytes={64 * 512 * 4}"
    settings, plan = planned(tmp_path / "m", *given, chunk, f"model.gradient_checkpointing={str(recompute).lower()}")
    bound = MicrobatchBound(tokens)
    actor = build_actor(settings.model, settings.optimizer, bound, device="cpu", seed=0, checkpoint=None)
    lengths = torch.full((2 * tokens // length,), length)
    columns = {"ids": torch.arange(2 * tokens) % 500, "mask": torch.arange(2 * tokens) % length > 0}
    samples = Samples(lengths, tokens={**columns, "weight": torch.ones(2 * tokens, dtype=torch.float64)})
    with LiveBytes() as live:
        actor.forward_backward(samples, weighted, temperature=1.0)
    said = {line.name: line.value for line in plan.lines if isinstance(line.value, int)}
    predicted = said["gradients"] + said["activations"] + said["logits"]
    assert live.peak == pytest.approx(predicted, rel=0.08)
