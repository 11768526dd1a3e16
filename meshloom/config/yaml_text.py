"""YAML as settings use it, with the line of every value.

Owns: reading and writing YAML. Refuses to know: which keys exist. Always holds: plain values are read by YAML 1.2's core
rules (``1e-6`` is a number, ``yes`` and ``2026-01-01`` are texts); no tag builds a Python object; a key that is given twice is
an error; what ``write`` wrote, ``read`` reads back as the same values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str, ...]

_PREFIX = "tag:yaml.org,2002:"
_MOST_DIGITS = 300
_PLAIN_VALUES = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain values of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text which YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Characters that YAML takes for line breaks are kept only in double quotes."""
        style = '"' if re.search("[\r\x85\u2028\u2029\ufeff]", text) else None
        return self.represent_scalar(f"{_PREFIX}str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)

for _tag, _pattern, _first in _PLAIN_VALUES:
    for _class in (_Loader, _Dumper):
        firsts = ["" if character == "\0" else character for character in _first]
        _class.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), firsts)


@dataclass
class Document:
    """What a YAML text holds.

    Args:
        data: plain Python values.
        lines: line number, from 1, of each key or list entry, by its path.
        faults: (line, what) of each fault; ``data`` leaves out what they are about.
    """

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[tuple[int, str]] = field(default_factory=list)


def read(text: str) -> Document:
    """Read one YAML document; faults of its form are in the result, not raised."""
    try:
        return _read(text)
    except RecursionError:
        return Document(faults=[(1, "this is nested too deeply to be settings")])


def _read(text: str) -> Document:
    document = Document()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        document.faults.append((mark.line + 1 if mark else 1, f"this is not YAML: {said}"))
        return document
    except yaml.YAMLError as error:
        document.faults.append((1, f"this is not YAML: {' '.join(str(error).split())}"))
        return document
    if node is not None:
        document.data = _Builder(loader, document).build(node, ())
    return document


class _Builder:
    """Turns YAML nodes into plain values and notes their lines."""

    def __init__(self, loader: _Loader, document: Document) -> None:
        self.loader, self.document = loader, document
        self.open_nodes: list[yaml.Node] = []

    def fault(self, node: yaml.Node, what: str) -> None:
        self.document.faults.append((node.start_mark.line + 1, what))

    def build(self, node: yaml.Node, path: Path) -> Any:
        if any(node is other for other in self.open_nodes):
            return self.fault(node, "an alias stands inside its own anchor")
        self.open_nodes.append(node)
        try:
            return self._build(node, path)
        finally:
            self.open_nodes.pop()

    def _build(self, node: yaml.Node, path: Path) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_PREFIX}map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_PREFIX}seq":
            for number, entry in enumerate(node.value):
                self.document.lines[*path, str(number)] = entry.start_mark.line + 1
            return [self.build(entry, (*path, str(number))) for number, entry in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_PREFIX) in (
            "null",
            "bool",
            "int",
            "float",
            "str",
        ):
            return self._scalar(node)
        return self.fault(node, f"the tag {node.tag.replace(_PREFIX, '!!')} is not read here")

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        digits = re.fullmatch(r"([-+]?)(0o|0x|)([0-9a-fA-F]+)", node.value)
        try:
            if node.tag == f"{_PREFIX}int" and digits:
                if len(digits[3]) > _MOST_DIGITS:
                    return self.fault(node, f"{_short(node.value)} has more digits than any number here")
                return int(digits[1] + digits[3], {"0o": 8, "0x": 16, "": 10}[digits[2]])
            value = self.loader.construct_object(node)
            if isinstance(value, str) and not value.isascii():
                value.encode()
            return value
        except UnicodeEncodeError:
            return self.fault(node, f"{_short(node.value)} holds half of a character")
        except (ValueError, KeyError, yaml.YAMLError):
            return self.fault(node, f"{_short(node.value)} is not of the type {node.tag.replace(_PREFIX, '!!')}")

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        merges = [value for key, value in node.value if key.tag == f"{_PREFIX}merge"]
        for value in merges:
            merged = {**self._merge(value, path), **merged}
        for key, value in node.value:
            if key.tag == f"{_PREFIX}merge":
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_PREFIX}str":
                self.fault(
                    key,
                    f"a key must be a name, not {key.value!r}"
                    if isinstance(key.value, str)
                    else "a key must be a name",
                )
            elif key.value in own:
                first = self.document.lines[*path, key.value]
                self.fault(key, f"the key {'.'.join((*path, key.value))!r} is given twice; first in line {first}")
            else:
                self._forget(own_path := (*path, key.value))
                self.document.lines[own_path] = key.start_mark.line + 1
                own[key.value] = self.build(value, own_path)
        return {**merged, **own}

    def _forget(self, path: Path) -> None:
        """Drop the lines of a merged value that a key of the mapping itself replaces."""
        for known in [known for known in self.document.lines if known[: len(path)] == path]:
            del self.document.lines[known]

    def _merge(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """The values of ``<<: *anchor`` or of a list of anchors, where the first wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values: dict[str, Any] = {}
        for source in sources:
            value = self.build(source, path)
            if isinstance(value, Mapping):
                values = {**value, **values}
            else:
                self.fault(source, "<< merges mappings only")
        return values


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}…"


def write(data: Any) -> str:
    """YAML of plain values, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)
