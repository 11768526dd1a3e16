"""What kinds of layers a model may have.

Owns: the names of kinds whose tokens attend to all before them, or to those in a window, and why the embedded engine refuses
latent attention. Refuses to know: families. Always holds: a kind that is not known is named, never computed as another.
"""

from collections.abc import Mapping
from typing import Any

from meshloom.config.errors import UserError

_KNOWN = ("full_attention", "sliding_attention")


def layers_of_other_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of layers of a text model's config.json that no kernel computes, such as ``linear_attention`` or ``conv``."""
    kinds = config.get("layer_types")
    return tuple(sorted({str(kind) for kind in kinds} - {*_KNOWN})) if isinstance(kinds, list) else ()


def latent_refusal() -> UserError:
    """Why the embedded engine does not generate where keys and values come from a latent vector, as DeepSeek-V2's do
    (arXiv:2405.04434)."""
    return UserError(
        "the embedded engine does not generate with latent attention (kv_lora_rank)",
        where="rollout.engine",
        why="its cache holds keys and values of one width for each head",
        fix="rollout.engine=vllm, or a model of another family",
    )
