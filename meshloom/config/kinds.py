"""Which command a settings file is for.

Owns: telling the kind of settings from the keys that are given. Always holds: only keys count, no values; what cannot be read
is left for loading to tell.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshloom.config.load import given_keys
from meshloom.config.schema import Keys
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings

Kind = type[EvalSettings] | type[TrainSettings] | type[SftSettings]

_KINDS: tuple[Kind, ...] = (EvalSettings, TrainSettings, SftSettings)
"""Where several kinds have all the keys, the first of them: what has no ``batch`` and no ``optimizer`` trains nothing."""


def kind_of(file: Path | None, overrides: Sequence[str]) -> Kind:
    """The kind of settings that knows most of the given keys.

    Args:
        file: a YAML file, or none.
        overrides: each ``a.b=value``.
    """
    paths = list(_paths(given_keys(file, overrides)))

    def unknown(kind: Kind) -> int:
        keys = Keys(kind)
        return sum(path not in keys for path in paths)

    return min(_KINDS, key=unknown)


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")
