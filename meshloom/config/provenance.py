"""Where each value of the settings came from.

Owns: the record of a value's origin. Always holds: settings are equal when their values are, wherever those came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

VERLS_DEFAULT = "verl's default"
"""How the origin begins of a value that a command of verl's leaves to its default."""


def is_verls_default(origin: str) -> bool:
    """Whether nobody gave a value that a translated command has."""
    return origin.startswith(VERLS_DEFAULT)


@dataclass(frozen=True)
class Provenance:
    """Origins of the values that were given; what is not in it is a default.

    Args:
        origins: for the dotted path of each given value that is not a group, a text such as ``run.yaml:12`` or
            ``override optimizer.lr=1e-5``.
    """

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def of(self, path: str) -> str:
        """Origin of a dotted path: its own, those of the values in it, or that of the value it is a part of."""
        inside = {origin: None for known, origin in self.origins.items() if f"{known}.".startswith(f"{path}.")}
        if inside:
            return ", ".join(inside)
        while path := path.rpartition(".")[0]:
            if path in self.origins:
                return self.origins[path]
        return "default"
