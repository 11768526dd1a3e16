"""What kinds of layers a model may have, and what they cache.

Owns: the names of kinds whose tokens attend to all before them, or to those in a window. Refuses to know: families. Always
holds: a kind that is not known is named, never computed as another.
"""

from collections.abc import Mapping
from typing import Any

_KNOWN = ("full_attention", "sliding_attention")


def layers_of_other_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of layers of a text model's config.json that no kernel computes, such as ``linear_attention`` or ``conv``."""
    kinds = config.get("layer_types")
    return tuple(sorted({str(kind) for kind in kinds} - {*_KNOWN})) if isinstance(kinds, list) else ()


def caches_latents(config: Mapping[str, Any]) -> bool:
    """Whether keys and values of a text model come from one latent vector a token, as DeepSeek-V2's and V3's do.

    Their heads have keys and values of different widths, and what is to be cached is the latent vector (arXiv:2405.04434).
    """
    return config.get("kv_lora_rank") is not None
