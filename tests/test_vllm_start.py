"""A quick start of vLLM: what is left out, and that nothing else changes."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from meshloom.rollout.vllm_start import filters_uncompiled, graph_sizes, know_model_class


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
