"""The translation while it is made: what was read, what it became, and the account of every key.

Owns: the account. Refuses to know: verl's keys. Always holds: a key that was given ends up translated, ignored with a
reason, or refused with a reason; a value of verl's own default says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshloom.config.provenance import VERLS_DEFAULT
from meshloom.config.verl.given import Given, shown


@dataclass(frozen=True, kw_only=True)
class Native:
    """One of our settings.

    Args:
        value: plain Python value.
        origin: the verl override, or verl's default, that it comes from.
    """

    value: Any
    origin: str


@dataclass
class Sheet:
    """Reads verl's keys and writes native settings.

    Args:
        given: what the command gives.
        defaults: verl's own.
    """

    given: Given
    defaults: Mapping[str, Any]
    settings: dict[str, Native] = field(default_factory=dict)
    translated: dict[str, list[str]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Whether the command gives a key with a value that is not null."""
        return key in self.given.entries and self.given.entries[key].value is not None

    def value(self, key: str, default: Any = None) -> Any:
        """A key's value: as given, else verl's default, else ``default``."""
        if key in self.given.entries:
            return self.given.entries[key].value
        return self.defaults.get(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A key's value as true or false; another value is refused."""
        value = self.value(key, default)
        if value in (True, False, None):
            return bool(value)
        kind = "the text " if isinstance(value, str) else ""
        self.refuse(key, f"{kind}{shown(value)} is neither true nor false, without quotes")
        return bool(self.defaults.get(key, default))

    def number(self, key: str, default: float | None = None) -> float | None:
        """A key's value as a number, also where it stands in quotes; another value is refused."""
        return self._number(key, default, float)

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A key's value as a whole number; another value is refused."""
        number = self._number(key, default, int)
        return None if number is None else int(number)

    def _number(self, key: str, default: float | None, kind: type) -> float | None:
        value = self.value(key, default)
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        fits = number is None or (math.isfinite(number) and not (kind is int and number % 1))
        if isinstance(value, bool) or not fits:
            self.refuse(key, f"{shown(value)} is not a {'whole ' if kind is int else ''}number")
            fallback = self.defaults.get(key, default)
            return None if fallback is None else kind(fallback)
        return None if number is None else int(number) if isinstance(value, int) or kind is int else number

    def text(self, key: str, default: str = "") -> str:
        """A key's value as text; empty for null."""
        value = self.value(key, default)
        return "" if value is None else shown(value)

    def texts(self, key: str) -> list[str]:
        """A key's value as a list of texts; one text is a list of one."""
        value = self.value(key)
        return [] if value is None else [shown(one) for one in value] if isinstance(value, list) else [shown(value)]

    def origin(self, *keys: str) -> str:
        """Where a value that follows from these keys comes from: the given ones, or verl's default."""
        given = [self.given.entries[key].origin for key in keys if key in self.given.entries]
        if given:
            return f"verl {', '.join(given)}"
        known = [key for key in keys if key in self.defaults]
        return f"{VERLS_DEFAULT} {known[0]}={shown(self.defaults[known[0]])}" if known else VERLS_DEFAULT

    def set(self, path: str, value: Any, *keys: str) -> None:
        """State a native setting that follows from these keys, the deciding one first."""
        self.settings[path] = Native(value=value, origin=self.origin(*keys))
        self.count(path, *keys)

    def count(self, path: str, *keys: str) -> None:
        """Account for keys that decide a native setting that is stated elsewhere."""
        for key in keys:
            if key in self.given.entries:
                paths = self.translated.setdefault(key, [])
                if path not in paths:
                    paths.append(path)

    def ignore(self, reason: str, *keys: str) -> None:
        """Account for keys that are not used, if they are given."""
        for key in keys:
            if key in self.given.entries:
                self.ignored.setdefault(key, reason)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse the command because of a key, given or not."""
        self.refused.setdefault(key, reason)

    def warn(self, key: str, text: str) -> None:
        """Say something about a key that runs but is likely not meant."""
        self.warnings.setdefault(self.typed(key), text)

    def typed(self, key: str) -> str:
        """A key as the user spelt it."""
        return self.given.entries[key].typed if key in self.given.entries else key

    def open(self, keys: Sequence[str] | None = None) -> list[str]:
        """Given keys that are not accounted for yet."""
        return [
            key
            for key in (self.given.entries if keys is None else keys)
            if key not in self.translated and key not in self.ignored and key not in self.refused
        ]
