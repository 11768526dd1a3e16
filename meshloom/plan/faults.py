"""A fault of a run's devices with the changes that may end it, and settings with a change made.

Owns: the record and the text of a change. Refuses to know: which faults there are. Always holds: a change is written as the
overrides that make it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from meshloom.config.base import Settings
from meshloom.config.provenance import Provenance

Change = Mapping[str, Any]
"""Values by their dotted paths, to be given together."""

_LONGEST = 400

S = TypeVar("S", bound=Settings)


def no_changes() -> Iterable[Change]:
    """No change is known."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a run cannot be laid out.

    Args:
        code: stable short name.
        path: the setting.
        what: the fault in one sentence.
        why: the reason it cannot work, when ``what`` does not say it.
        subject: what has the fault, where several could have it at this path.
        form: what is expected, where no value can say it.
        changes: makes changes that may end it, best first; they are tried before they are suggested.
    """

    code: str
    path: str
    what: str
    why: str = ""
    subject: str = ""
    form: str = ""
    changes: Callable[[], Iterable[Change]] = no_changes

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells faults apart."""
        return self.code, self.path, self.subject


def with_values(settings: S, change: Change, origin: str | Mapping[str, str] = "change") -> S:
    """Settings with some values replaced; the values must be of the fields' types.

    Args:
        settings: to begin with; they stay as they are.
        change: values by their dotted paths.
        origin: where all come from, or each by its path.
    """
    for path, value in change.items():
        settings = _replaced(settings, path.split("."), value)
    origins = {path: origin if isinstance(origin, str) else origin[path] for path in change}
    settings._provenance = Provenance({**settings.provenance.origins, **origins})
    return settings


def _replaced(group: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(group, dict):
        return {**group, name: _replaced(group[name], rest, value) if rest else value}
    if name not in type(group).model_fields:
        raise KeyError(name)
    return group.model_copy(update={name: _replaced(getattr(group, name), rest, value) if rest else value})


def overrides(change: Change) -> tuple[str, ...]:
    """A change as overrides ``a.b=c``."""
    return tuple(f"{path}={_text(value)}" for path, value in change.items())


def shortened(text: str) -> str:
    """A change in a sentence: what is too long to be read ends with an ellipsis."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.-]*(:[\w-]+)?|\d+-\d+", value):
        return value
    return json.dumps(value)
