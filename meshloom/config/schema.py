"""What the settings are, as data: the JSON schema, all dotted keys, what a value must be, and the nearest key.

Owns: everything said about a key in an error. Always holds: it is derived from the settings' own types, so it cannot differ
from what is enforced.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshloom.config.base import MANY
from meshloom.config.names import Advantage, KlEstimator, PolicyLoss, Recipe
from meshloom.config.settings import Settings

ANY = "*"
"""In a key: a name that the user chooses."""
_EXAMPLES = {"advantage": Advantage, "policy_loss": PolicyLoss, "kl_estimator": KlEstimator}


def schema_json(kind: type[Settings]) -> str:
    """JSON schema (2020-12) of a kind of settings, for editors; descriptions are the fields' docstrings."""
    schema = kind.model_json_schema()
    if (algorithm := schema["properties"].get("algorithm")) is not None:
        # A recipe's name alone may stand for the group.
        group = {"$ref": algorithm.pop("$ref")}
        algorithm["anyOf"] = [{"enum": [str(name) for name in Recipe]}, group]
        algorithm["description"] = "A recipe by its name, or choices by theirs."
    for name, names in _EXAMPLES.items():
        for definition in schema["$defs"].values():
            if name in definition.get("properties", {}):
                definition["properties"][name]["examples"] = [str(value) for value in names]
    return json.dumps(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2, ensure_ascii=False
    )


class Keys:
    """All keys of a kind of settings.

    Args:
        kind: the settings.
    """

    def __init__(self, kind: type[Settings]) -> None:
        self._root = kind.model_json_schema()
        self._nodes = dict(self._walk((), self._root))

    def _walk(self, path: tuple[str, ...], node: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, child in self._group(node).items():
            yield ".".join((*path, name)), child
            yield from self._walk((*path, name), child)
            named = child.get("additionalProperties")
            if isinstance(named, Mapping) and self._group(named):
                yield ".".join((*path, name, ANY)), named
                yield from self._walk((*path, name, ANY), named)

    def _known(self, path: str) -> str | None:
        """A path as a key, with ``*`` for a name that the user has chosen; none if it is no key."""
        found: list[str] = []
        for part in path.split("."):
            options = (".".join((*found, name)) for name in (part, ANY))
            if (known := next((option for option in options if option in self._nodes), None)) is None:
                return None
            found = known.split(".")
        return ".".join(found)

    def _resolve(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        reference = node.get("$ref")
        return self._root["$defs"][reference.rpartition("/")[2]] if reference else node

    def _group(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keys of a group of settings, or none."""
        for option in node.get("anyOf", [node]):
            if "properties" in (resolved := self._resolve(option)):
                return resolved["properties"]
        return {}

    def __contains__(self, path: str) -> bool:
        return self._known(path) is not None

    def known_part(self, path: tuple[str | int, ...]) -> str:
        """The longest beginning of a path that is a key."""
        parts = [str(part) for part in path]
        while parts and ".".join(parts) not in self:
            parts.pop()
        return ".".join(parts)

    def expected(self, path: str) -> str:
        """What a key's value must be, in words."""
        return self._describe(self._node(path))

    def _node(self, path: str) -> Mapping[str, Any]:
        known = self._known(path)
        if known is None:
            raise KeyError(path)
        return self._nodes[known]

    def _describe(self, node: Mapping[str, Any]) -> str:
        if "anyOf" in node:
            return " or ".join(dict.fromkeys(self._describe(option) for option in node["anyOf"]))
        node = self._resolve(node)
        if "const" in node or "enum" in node:
            values = node.get("enum", [node.get("const")])
            return f"one of {', '.join(map(str, values))}" if len(values) > 1 else f"{values[0]}"
        if node.get("type") == "object" and "properties" in node:
            return f"a group with the keys {', '.join(node['properties'])}"
        if node.get("type") == "object":
            return f"names with values, each {self._describe(node['additionalProperties'])}"
        if node.get("type") == "array":
            items = node.get("items") or node["prefixItems"][0]
            count = f"{node['minItems']} values" if "prefixItems" in node else "values"
            return f"a list of {count}, each {self._describe(items)}"
        words = {
            "integer": "a whole number",
            "number": "a number",
            "string": "text",
            "boolean": "true or false",
            "null": "null",
        }
        return words[node["type"]] + _range(node)

    def options(self, path: str) -> list[str]:
        """The names of which a key's value must be one; empty where it may be anything else."""
        node = self._node(path)
        nodes = [self._resolve(option) for option in node.get("anyOf", [node])]
        return [name for each in nodes for name in each.get("enum", ()) if isinstance(name, str)]

    def required(self, path: str) -> list[str]:
        """The keys without a default at or below a key: itself, if it is no group."""
        node = self._resolve(self._node(path))
        return [key for name in node.get("required", []) for key in self.required(f"{path}.{name}")] or [path]

    def nearest(self, path: str, count: int = 3) -> list[str]:
        """Existing keys that a wrong one may mean, best first.

        Those of the same last name anywhere and similar ones in its group; else similar ones anywhere; else those whose
        description has its words.
        """
        above, _, last = path.rpartition(".")
        group = self._known(above) or above
        by_name: dict[str, list[str]] = {}
        for key in self._nodes:
            by_name.setdefault(key.rpartition(".")[2], []).append(key)
        siblings = [key for key in self._nodes if key.rpartition(".")[0] == group]
        similar = difflib.get_close_matches(last, by_name, n=count, cutoff=0.75)
        longer = [
            name
            for name in by_name
            if min(len(name), len(last)) >= 3 and (name.startswith(last) or last.startswith(name))
        ]
        tiers = (
            [*by_name.get(last, []), *difflib.get_close_matches(path, siblings, n=1, cutoff=0.75)],
            [key for name in (*similar, *longer) for key in by_name[name]],
            self._described_by(last),
        )
        best = dict.fromkeys(next((tier for tier in tiers if tier), []))
        return list(dict.fromkeys(_like(key, path) for key in best))[:count]

    def _described_by(self, name: str) -> list[str]:
        words = set(re.findall(r"[a-z]+", name.lower()))
        descriptions = {
            key: set(re.findall(r"[a-z]+", node.get("description", "").lower())) for key, node in self._nodes.items()
        }
        return [key for key, description in descriptions.items() if len(name) >= 3 and words and words <= description]


def _like(key: str, path: str) -> str:
    """A key with the names that a path has in the places which the user names, or ``NAME``."""
    given, parts = path.split("."), key.split(".")
    for at, part in enumerate(parts):
        if part == ANY:
            same = len(given) > at and given[:at] == parts[:at]
            parts[at] = given[at] if same else "NAME"
    return ".".join(parts)


def _range(node: Mapping[str, Any]) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    high = None if high == MANY else high
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = (("≥", low), (">", node.get("exclusiveMinimum")), ("≤", high), ("<", node.get("exclusiveMaximum")))
    return " and".join(f" {sign} {value}" for sign, value in bounds if value is not None)
