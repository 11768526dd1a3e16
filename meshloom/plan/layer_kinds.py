"""What kinds of layers a model may have.

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
