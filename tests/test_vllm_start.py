"""A quick start of vLLM: what is left out, and that nothing else changes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshloom.rollout.vllm_build import VllmOptions, open_vllm
from meshloom.rollout.vllm_start import filters_uncompiled, graph_sizes, know_model_class
from tests.test_train_ahead import compiled_pieces, folder_of
from tests.vllm_engines import DEVICE, model_folder


def test_graphs_are_captured_for_a_full_batch_and_for_few_sizes_below() -> None:
    assert graph_sizes(256, 8192) == [1, 2, 4, 8, *range(16, 256, 16), *range(256, 513, 32)]
    assert graph_sizes(1000, 8192)[-1] == 512
    assert graph_sizes(100, 150) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 100, 112, 128, 144, 150]
    assert graph_sizes(3, 8192) == [1, 2, 3, 4, 6]
    assert graph_sizes(1, 1) == [1]


@pytest.mark.vllm
def test_a_models_class_is_looked_at_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm import ModelRegistry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr("vllm.model_executor.models.registry._SUBPROCESS_COMMAND", ["false"])
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    folder, name = tmp_path, "Olmo2ForCausalLM"
    (folder / "config.json").write_text(json.dumps({"architectures": [name, "NobodyKnowsIt"]}))
    lazy = ModelRegistry.models[name]
    with pytest.raises(RuntimeError):
        lazy.inspect_model_cls()
    know_model_class(folder)
    found = ModelRegistry.models[name]
    assert found.inspect_model_cls().is_text_generation_model
    assert found.load_model_cls() is lazy.load_model_cls()


@pytest.mark.vllm
def test_filters_are_left_out_of_trial_passes_alone() -> None:
    samplers = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    rows, k = torch.randn(2, 50), torch.tensor([3, 3])
    with filters_uncompiled():
        assert samplers.apply_top_k_top_p(rows.clone(), k, None).isfinite().all()
    assert samplers.apply_top_k_top_p(rows.clone(), k, None).isfinite().sum() == 6


@pytest.mark.vllm
def test_what_is_compiled_ahead_is_found_beside_a_vllm_that_compiles(tmp_path: Path) -> None:
    """vLLM used to lead the compilers into a folder of its own, where the trainer found nothing."""
    folder = folder_of(tmp_path / "m", "qwen2", torch.bfloat16)
    told = {"model": {"path": str(folder), "compile": True, "dtype": "bfloat16"}, "device": DEVICE.type}
    text = json.dumps({**told, "tokens": 1500, "longest": 60, "group": 8, "asks": True})
    subprocess.run([sys.executable, "-m", "meshloom.train.rehearsal"], input=text, text=True, check=True)
    code = f"from tests.test_vllm_start import beside_vllm\nprint(beside_vllm({str(folder)!r}))"
    out = subprocess.run([sys.executable, "-c", code], text=True, check=True, capture_output=True).stdout
    hits, misses = (float(word) for word in out.split()[-3:-1])
    assert hits > 0 and misses == 0


def beside_vllm(folder: str) -> str:
    """What ``compiled_pieces`` says where vLLM has compiled before."""
    options = VllmOptions(
        model_path=model_folder("qwen2"),
        dtype=torch.bfloat16,
        device=DEVICE,
        max_sequences=8,
        max_model_len=160,
        kv_cache_bytes=10**8,
        sleep=False,
    )
    opened = open_vllm(options)
    from torch._dynamo.utils import counters

    counters.clear()
    found = compiled_pieces(folder)
    opened.close()
    return found
