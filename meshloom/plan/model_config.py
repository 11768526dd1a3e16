"""Whether a config.json can be one: sizes that are counts, groups that are groups.

Owns: which keys the plan reads, and what each may be. Refuses to know: families, and what follows from the sizes. Always holds:
what passes is safe to count with; lists, which some families have in a size's place, pass: those who count refuse them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError

_MANY = 2**31 - 1
_COUNTS = {
    "num_hidden_layers": 10_000_000,
    "hidden_size": _MANY,
    "num_attention_heads": 1_000_000,
    "num_key_value_heads": 1_000_000,
    "head_dim": _MANY,
    "intermediate_size": _MANY,
    "moe_intermediate_size": _MANY,
    "vocab_size": _MANY,
    "num_local_experts": 1_000_000,
    "num_experts": 1_000_000,
    "n_routed_experts": 1_000_000,
    "num_experts_per_tok": 1_000_000,
    "decoder_sparse_step": 10_000,
    "kv_lora_rank": _MANY,
    "q_lora_rank": _MANY,
    "qk_rope_head_dim": _MANY,
    "qk_nope_head_dim": _MANY,
    "v_head_dim": _MANY,
    "max_position_embeddings": 2**53,
    "original_max_position_embeddings": 2**53,
}
"""Keys that are counts of at least 1, and the most that they can be."""
_OR_ZERO = {
    "n_shared_experts": 10_000,
    "first_k_dense_replace": 10_000,
    "num_nextn_predict_layers": 10_000,
    "num_mtp_layers": 10_000,
    "qk_rope_head_dim": _MANY,
    "qk_nope_head_dim": _MANY,
}
"""Keys that may be 0, too."""
_GROUPS = ("text_config", "rope_parameters", "rope_scaling")
_SHOWN = 60


def require_config(config: Any, file: Path, where: str) -> Mapping[str, Any]:
    """The content of a config.json.

    Args:
        config: what the file holds.
        file: it came from.
        where: the setting that names it.

    Raises:
        UserError: that names every value that cannot be.
    """
    if not isinstance(config, dict):
        raise UserError(f"{file} holds no object", where=where)
    faults = list(_faults(config, "")) or list(_narrow_heads(config.get("text_config", config)))
    if faults:
        others = "; ".join(faults[1:6])
        what = f"{file} cannot be a model's: {faults[0]}"
        raise UserError(what, where=where, why=others, fix="copy or download the file again")
    return config


def _faults(group: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in group.items():
        name = f"{prefix}{key}"
        if key in _GROUPS:
            if isinstance(value, dict):
                yield from _faults(value, f"{name}.")
            elif value is not None or key == "text_config":
                yield f"{name} is {_shown(value)}, not a group of values"
        elif key in _COUNTS or key in _OR_ZERO:
            least = 0 if key in _OR_ZERO else 1
            most = _OR_ZERO.get(key, _COUNTS.get(key, 0))
            is_count = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            if not is_count and value is not None and not isinstance(value, list):
                yield f"{name} is {_shown(value)}, not a count from {least} to {most:,}"
        elif key == "mlp_only_layers" and value is not None and not isinstance(value, list):
            yield f"{name} is {_shown(value)}, not a list"
        elif prefix.endswith(("rope_parameters.", "rope_scaling.")) and isinstance(value, dict):
            yield from _faults(value, f"{name}.")


def _narrow_heads(config: Mapping[str, Any]) -> Iterator[str]:
    """Heads that would have no width."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not config.get("head_dim") and isinstance(hidden, int) and isinstance(heads, int) and hidden < heads:
        yield f"hidden_size {hidden} is too small for {heads} heads (num_attention_heads)"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
