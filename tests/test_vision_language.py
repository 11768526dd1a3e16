"""A model that sees and writes is trained on text alone: the part that sees stays as it is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config

from meshloom.cli import main
from tests.lesson_runs import command, train_settings, write_inputs
from tests.models import _SHAPE


def write_gemma(inputs: Path) -> Path:
    """Gemma 3 as its larger models come: a language model with an image encoder before it."""
    text = _SHAPE | {"vocab_size": 64, "eos_token_id": 2, "bos_token_id": None, "sliding_window": 8}
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config=sees | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=60,
        eoi_token_index=61,
        image_token_index=62,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(inputs / "gemma")
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(inputs / "gemma")
    return inputs / "gemma"


@pytest.mark.parametrize(
    "adapters", [[], ["model.lora.rank=2"], ["model.lora.rank=2", "model.lora.target_modules=[q_proj]"]]
)
def test_only_the_language_model_learns(tmp_path: Path, adapters: list[str]) -> None:
    """The first step used to end the run with a fault, since the image encoder got no gradient."""
    inputs = write_inputs(tmp_path)
    folder, run = write_gemma(inputs), tmp_path / "run"
    changes = f"model.path={folder}", "batch.steps=1", "data.validation=null", "algorithm.kl=none", *adapters
    assert main(command(train_settings(inputs, run, *changes))) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed
    assert all("language_model" in name for name in changed)
    if not adapters:
        assert changed == {name for name in before if "language_model" in name}
