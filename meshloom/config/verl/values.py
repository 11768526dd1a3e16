"""The values of Hydra overrides: ``1e-6``, ``'text'``, ``[a, b]``, ``{k: v}``, ``null``, ``${a.b}``.

Owns: how an override's text becomes a value. Refuses to know: which keys there are. Always holds: what Hydra would refuse
or run several times is an error here too; an interpolation stays a text, for ``given`` to resolve.
"""

import re
from collections.abc import Callable
from typing import Any

_INTEGER = re.compile(r"[-+]?\d[\d_]*")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(inf|nan)", re.IGNORECASE)
_CALL = re.compile(r"(int|float|str|bool|json_str|choice|range|interval|glob|shuffle|sort|tag)\((.*)\)", re.DOTALL)
_CASTS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
_WORDS = {"null": None, "true": True, "false": False}
_QUOTES = "'\""


def read_value(text: str) -> Any:
    """The value of an override's text.

    Raises:
        ValueError: if a bracket or quote is not closed, or if it is a sweep over several values.
    """
    text = text.strip()
    if text[:1] in ("[", "{", "'", '"'):
        reader = _Reader(text)
        value = reader.value()
        if reader.rest():
            raise ValueError(f"{reader.rest()!r} stands behind the value")
        return value
    if match := _CALL.fullmatch(text):
        return _called(match[1], match[2])
    if "," in re.sub(r"\$\{[^}]*\}|\\.|\([^)]*\)", "", text):
        raise ValueError("several values are a sweep, which starts several runs; give one, or a list in [ ]")
    return _scalar(text)


def _called(name: str, arguments: str) -> Any:
    """The value of one of Hydra's functions: casts have one, the others are sweeps or change one."""
    if name not in (*_CASTS, "bool"):
        raise ValueError(f"{name}(…) is a sweep, which starts several runs, or makes one; give the value itself")
    value = read_value(arguments)
    if name == "bool":
        words = {"true": True, "false": False}
        if str(value).lower() not in words and not isinstance(value, int | float):
            raise ValueError(f"{arguments} is neither true nor false")
        return words.get(str(value).lower(), bool(value))
    try:
        return _CASTS[name](str(value).lower() if isinstance(value, bool) and name == "str" else value)
    except TypeError as error:
        raise ValueError(f"{arguments} is not one value") from error


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return re.sub(r"\\(.)", r"\1", text)


class _Reader:
    """Reads lists, mappings and quoted texts from the left."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def rest(self) -> str:
        return self.text[self.place :].strip()

    def peek(self) -> str:
        while self.text[self.place : self.place + 1].isspace():
            self.place += 1
        return self.text[self.place : self.place + 1]

    def value(self) -> Any:
        first = self.peek()
        if first == "[":
            return self._list()
        if first == "{":
            return self._mapping()
        if first and first in _QUOTES:
            return self._quoted()
        return _scalar(self._plain(",]}"))

    def _list(self) -> list[Any]:
        self.place += 1
        values: list[Any] = []
        while self.peek() != "]":
            values.append(self.value())
            self._separator("]")
        self.place += 1
        return values

    def _mapping(self) -> dict[str, Any]:
        self.place += 1
        values: dict[str, Any] = {}
        while (first := self.peek()) != "}":
            key = self._quoted() if first and first in _QUOTES else str(_unescaped(self._plain(":,}")))
            if self.peek() != ":":
                raise ValueError(f"the entry {key!r} of a mapping has no value")
            self.place += 1
            values[key] = "" if self.peek() in (",", "}") else self.value()
            self._separator("}")
        self.place += 1
        return values

    def _separator(self, end: str) -> None:
        found = self.peek()
        if found == ",":
            self.place += 1
        elif found != end:
            raise ValueError(
                f"{end!r} is missing" if not found else f"{self.rest()!r} stands where ',' or {end!r} should"
            )

    def _quoted(self) -> str:
        quote = self.text[self.place]
        end = self.place + 1
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise ValueError(f"the quote {quote} is not closed")
        inside = self.text[self.place + 1 : end]
        self.place = end + 1
        return inside.replace(f"\\{quote}", quote)

    def _plain(self, ends: str) -> str:
        """Text up to one of ``ends`` that is neither escaped nor inside ``${…}``."""
        start, depth = self.place, 0
        while self.place < len(self.text):
            here = self.text[self.place]
            if self.text.startswith("${", self.place):
                depth += 1
            elif here == "}" and depth:
                depth -= 1
            elif here in ends and not depth:
                break
            self.place += 2 if here == "\\" else 1
        return self.text[start : self.place].strip()


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
