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
    unknown = _num_unknown(file, overrides)
    return min(_KINDS, key=unknown.__getitem__)


def better_kind(kind: Kind, file: Path | None, overrides: Sequence[str]) -> Kind | None:
    """Another kind of settings that knows more of the given keys than ``kind`` does; none if there is no such kind, or if
    ``kind`` knows all keys of the file, so that an override is what it does not know."""
    if file is not None and not _num_unknown(file, [])[kind]:
        return None
    unknown = _num_unknown(file, overrides)
    best = min(_KINDS, key=unknown.__getitem__)
    return best if unknown[best] < unknown[kind] else None


def _num_unknown(file: Path | None, overrides: Sequence[str]) -> dict[Kind, int]:
    paths = list(_paths(given_keys(file, overrides)))
    return {kind: sum(path not in keys for path in paths) for kind, keys in ((kind, Keys(kind)) for kind in _KINDS)}


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")
