"""Matrices of a model by name and shape, told from its config.json, where there are no files of weights to read them from.

Owns: the names that files of weights give to linear layers, by family. Refuses to know: files, dtypes. Always holds: what it
names is what adapters attach to in the model itself (a test compares them), for dense families; experts are named as in files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from meshloom.plan.decoder_numbers import DecoderNumbers, Layer

Shape = tuple[int, int]
_EXPERTS = {
    "mixtral": ("block_sparse_moe", "gate", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", "gate", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v3": ("mlp", "gate", ("gate_proj", "up_proj", "down_proj")),
}
"""Of families with a matrix for each expert: its group, its router, and its gate, up and down."""


def linear_matrices(model: DecoderNumbers, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes (outputs, inputs) of all linear layers but the head, by the name of their weight.

    Args:
        model: in numbers.
        config: of the language model, as in config.json.
    """
    found: dict[str, Shape] = {}
    for index, layer in enumerate(model.layers):
        inside = [*_attention(model, config), *_mlp(model, layer)]
        found |= {f"model.layers.{index}.{name}.weight": shape for name, shape in inside}
    return found


def _attention(model: DecoderNumbers, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, query = model.hidden, model.query_width
    if model.family == "deepseek_v3":
        rank, low = int(config.get("kv_lora_rank", 512)), config.get("q_lora_rank", 1536)
        if low is None:
            yield "self_attn.q_proj", (query, hidden)
        else:
            yield "self_attn.q_a_proj", (low, hidden)
            yield "self_attn.q_b_proj", (query, low)
        rotary = model.cached - rank
        yield "self_attn.kv_a_proj_with_mqa", (model.cached, hidden)
        yield "self_attn.kv_b_proj", (query - model.num_heads * rotary + model.value_width, rank)
    else:
        yield "self_attn.q_proj", (query, hidden)
        yield "self_attn.k_proj", (model.key_value_width, hidden)
        yield "self_attn.v_proj", (model.key_value_width, hidden)
    yield "self_attn.o_proj", (hidden, model.value_width)


def _mlp(model: DecoderNumbers, layer: Layer) -> Iterator[tuple[str, Shape]]:
    hidden = model.hidden
    if not layer.experts:
        yield from _gated("mlp", hidden, layer.intermediate)
        return
    if model.family not in _EXPERTS:
        yield "mlp.router", (layer.num_experts, hidden)
        return
    group, router, (gate, up, down) = _EXPERTS[model.family]
    yield f"{group}.{router}", (layer.num_experts, hidden)
    width = layer.experts // layer.num_experts // (3 * hidden)
    for expert in range(layer.num_experts):
        at = f"{group}.experts.{expert}"
        yield from (
            (f"{at}.{gate}", (width, hidden)),
            (f"{at}.{up}", (width, hidden)),
            (f"{at}.{down}", (hidden, width)),
        )
    if layer.shared_experts:
        yield from _gated(f"{group}.shared_experts", hidden, layer.shared_experts // (3 * hidden))


def _gated(at: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate_proj", (width, hidden)
    yield f"{at}.up_proj", (width, hidden)
    yield f"{at}.down_proj", (hidden, width)
