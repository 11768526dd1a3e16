"""Parameters counted from config.json, against the models that transformers builds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshloom.plan.parameters import UnknownFamily, count_parameters

PUBLIC: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "public_models.json").read_text())
"""Shapes of public models, from their config.json."""

_TINY = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
_GROUPED = {**_TINY, "num_key_value_heads": 2}
_MIXED = {**_GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2}
_LATENT = {
    **_TINY,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
SHAPES: list[dict[str, Any]] = [
    {"model_type": "llama", **_GROUPED},
    {"model_type": "llama", **_GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    {"model_type": "llama", **_TINY, "tie_word_embeddings": True},
    {"model_type": "qwen2", **_GROUPED, "tie_word_embeddings": True},
    {"model_type": "qwen3", **_GROUPED, "head_dim": 24},
    {"model_type": "qwen3", **_GROUPED, "attention_bias": True, "tie_word_embeddings": True},
    {"model_type": "mistral", **_GROUPED, "head_dim": 32},
    {"model_type": "mistral", **_GROUPED, "head_dim": None},
    {"model_type": "mixtral", **_MIXED},
    {"model_type": "gemma3_text", **_GROUPED, "head_dim": 32},
    {"model_type": "gemma3_text", **_GROUPED, "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "qwen3_moe", **_GROUPED, "head_dim": 16, "num_experts": 16, "moe_intermediate_size": 24},
    {"model_type": "qwen3_moe", **_MIXED, "decoder_sparse_step": 2, "attention_bias": True},
    {"model_type": "qwen3_moe", **_MIXED, "mlp_only_layers": [0, 2], "tie_word_embeddings": True},
    {"model_type": "deepseek_v3", **_LATENT},
    {"model_type": "deepseek_v3", **_LATENT, "q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0},
    {"model_type": "deepseek_v3", **_LATENT, "attention_bias": True, "num_nextn_predict_layers": 2},
    {"model_type": "gpt_oss", **_MIXED, "head_dim": 16},
    {"model_type": "gpt_oss", **_MIXED, "head_dim": 16, "attention_bias": False},
]
DEFAULTS = [{"model_type": kind} for kind in dict.fromkeys(str(shape["model_type"]) for shape in SHAPES)]


def on_meta(config: dict[str, Any]) -> Any:
    """The language model that transformers builds, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text = dict(config.get("text_config", config))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(text.pop("model_type"), **text))


def components(model: Any) -> dict[str, int]:
    """Its parameters by the names that they have there."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "experts", "shared_experts", "router", "norms", "head"), 0)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "norm" in parts[-2]:
            kind = "norms"
        elif "self_attn" in parts:
            kind = "attention"
        elif "experts" in parts or "shared_experts" in parts:
            kind = "experts" if "experts" in parts else "shared_experts"
        elif parts[-2] in ("gate", "router"):
            kind = "router"
        else:
            kind = {"embed_tokens": "embedding", "lm_head": "head"}.get(parts[-2], "mlp")
        counts[kind] += parameter.numel()
    return counts


@pytest.mark.parametrize("config", [*SHAPES, *DEFAULTS], ids=str)
def test_every_component_is_counted_as_transformers_builds_it(config: dict[str, Any]) -> None:
    model = on_meta(config)
    counted = count_parameters(config)
    assert counted.by_component() == components(model)
    assert counted.total == model.num_parameters()
    assert len(counted.layers) == len(model.model.layers)
    for layer, built in zip(counted.layers, model.model.layers, strict=True):
        assert layer.total == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", PUBLIC)
def test_public_shapes_are_counted_as_transformers_builds_them(name: str) -> None:
    counted = count_parameters(PUBLIC[name])
    assert counted.total == on_meta(PUBLIC[name]).num_parameters()
    assert counted.tied == (not counted.by_component()["head"])


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen2.5-1.5B", 1_543_714_304, 1_543_714_304),
        ("Llama-3.1-8B", 8_030_261_248, 8_030_261_248),
        ("Mixtral-8x7B-v0.1", 46_702_792_704, 12_879_925_248),
        ("Qwen3-30B-A3B", 30_532_122_624, 3_353_032_704),
        ("DeepSeek-V3", 671_026_404_352, 37_552_282_624),
        ("gpt-oss-20b", 20_914_757_184, None),
    ],
)
def test_totals_are_those_of_the_model_cards(name: str, total: int, active: int | None) -> None:
    """46.7B and 12.9B, 30.5B and 3.3B, 671B and 37B are what the papers say."""
    counted = count_parameters(PUBLIC[name])
    assert counted.total == total
    assert active is None or counted.active == active


@pytest.mark.parametrize("config", [shape for shape in SHAPES if "deepseek" in shape["model_type"]], ids=str)
def test_layers_that_predict_further_tokens_are_apart(config: dict[str, Any]) -> None:
    """As transformers adds them for speculative decoding, where the version has them."""
    import torch
    from transformers import modeling_layers

    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this version of transformers has no layers that predict further tokens")
    number = config.get("num_nextn_predict_layers", 0)
    model = on_meta({**config, "num_nextn_predict_layers": max(number, 1)})
    with torch.device("meta"):
        further = modeling_layers.MtpModel(model, 1)
    shared = {id(parameter) for parameter in model.parameters()}
    own = {id(p): p.numel() for p in further.parameters() if id(p) not in shared}
    counted = count_parameters(config)
    assert counted.further == number * sum(own.values())
    assert counted.total == model.num_parameters()


def test_the_widths_are_those_of_the_layers() -> None:
    for config in SHAPES:
        if config["model_type"] == "deepseek_v3":
            continue
        counted, layer = count_parameters(config), on_meta(config).model.layers[0].self_attn
        assert counted.query_width == counted.value_width == layer.q_proj.out_features
        assert counted.key_value_width == layer.k_proj.out_features
        assert counted.cached == layer.k_proj.out_features + layer.v_proj.out_features
    latent = count_parameters(PUBLIC["DeepSeek-V3"])
    assert (latent.cached, latent.query_width, latent.value_width) == (512 + 64, 128 * 192, 128 * 128)
    assert latent.layers[0].intermediate == 18432
    assert latent.layers[60].intermediate == 9 * 2048


def test_the_text_part_of_a_vision_language_model_is_counted() -> None:
    whole = PUBLIC["gemma-3-4b"]
    assert "vision_config" in whole
    assert count_parameters(whole) == count_parameters({**whole["text_config"], "model_type": "gemma3_text"})
    assert count_parameters({**whole, "tie_word_embeddings": False}).head == 262208 * 2560


@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_a_token_meets_its_own_experts_alone(config: dict[str, Any]) -> None:
    model = on_meta(config)
    counted, built, experts = count_parameters(config), model.config, components(model)["experts"]
    unmet = experts * (built.num_local_experts - built.num_experts_per_tok) // built.num_local_experts if experts else 0
    assert counted.active == model.num_parameters() - unmet
    assert counted.active - counted.computed == counted.embedding + counted.head


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(UnknownFamily, match="'mamba': known are llama"):
        count_parameters({"model_type": "mamba", "hidden_size": 8})
    with pytest.raises(UnknownFamily, match="has no hidden_size"):
        count_parameters({"model_type": "llama", "hidden_size": None})


def test_counting_needs_no_torch() -> None:
    code = (
        "import sys, json; from meshloom.plan.parameters import count_parameters\n"
        f"print(count_parameters(json.loads({json.dumps(json.dumps(PUBLIC['DeepSeek-V3']))})).total)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:2] == ["671026404352", "[]"]
