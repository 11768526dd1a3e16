"""What is given of a run's settings: a YAML file, overrides, and the recipe they name.

Owns: which value wins and where it came from. Refuses to know: types and ranges of values (``config.load``). Always holds: a
later override beats an earlier one, an override beats the file, what is given beats the recipe, the recipe beats the default.
A recipe that an override names beats the file too, as every override does: of the keys that recipes decide the file's are left
out then, and those of other overrides stand, before it or behind it.
"""

import json
import re
from pathlib import Path
from typing import Any

from meshloom.config import yaml_text
from meshloom.config.names import Recipe
from meshloom.config.problems import Problem
from meshloom.config.provenance import Provenance
from meshloom.config.recipes import DECIDED, RECIPES, Same
from meshloom.config.settings import Settings

_OVERRIDE = "override "
_ALGORITHM, _RECIPE = ("algorithm",), ("algorithm", "recipe")


class Given:
    """The values given so far, with their origins."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.places: dict[tuple[str, ...], str] = {}
        self.problems: list[Problem] = []
        self.unreadable = False
        """Nothing sensible can be said about keys, because the file could not be read."""

    def add_file(self, file: Path) -> None:
        try:
            document = yaml_text.read(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            near = sorted(str(path) for path in file.parent.glob("*.yaml"))[:8] if file.parent.is_dir() else []
            fix = f"files nearby: {', '.join(near)}" if near else f"there is no *.yaml in {file.parent.absolute()}"
            return self._cannot_read(file, f"there is no file {file}", fix)
        except UnicodeDecodeError as error:
            return self._cannot_read(file, f"{file} is not UTF-8 text: {error}", "save it as UTF-8")
        except OSError as error:
            return self._cannot_read(file, f"{file} cannot be read: {error.strerror}", "name a YAML file")
        self.problems += [Problem(code="Y001", what=what, where=f"{file}:{line}") for line, what in document.faults]
        if isinstance(document.data, dict):
            self.data = document.data
            self.places = {path: f"{file}:{line}" for path, line in document.lines.items()}
            self._name_recipe()
        elif document.data is not None or document.faults:
            self.unreadable = True
            if not document.faults:
                self.problems.append(
                    Problem(
                        code="Y002",
                        what="the file holds no keys",
                        where=f"{file}:1",
                        fix="write settings as 'key: value'",
                    )
                )
        return None

    def _cannot_read(self, file: Path, what: str, fix: str) -> None:
        self.unreadable = True
        self.problems.append(Problem(code="Y003", what=what, where=str(file.absolute()), fix=fix))

    def add_override(self, override: str) -> None:
        origin = f"{_OVERRIDE}{override}"
        name, equals, text = override.partition("=")
        path = tuple(name.split("."))
        if not equals or not all(re.fullmatch(r"\w[\w-]*", part) for part in path):
            return self._bad_override(origin, "it has not the form a.b=value", "write for example optimizer.lr=1e-5")
        if not text.strip():
            return self._bad_override(
                origin, "it has no value", f"write {name}=null for none, or {name}='\"\"' for an empty text"
            )
        document = yaml_text.read(text)
        if document.faults:
            return self._bad_override(origin, document.faults[0][1], f"quote a text: {name}='\"…\"'")
        if path == _ALGORITHM and isinstance(document.data, str):
            path = _RECIPE
        if path == _RECIPE:
            self._leave_out_decided()
        group: Any = self.data
        for depth, part in enumerate(path[:-1], 1):
            if group.get(part) is None:
                group[part] = {}
                self.places[path[:depth]] = origin
            group = group[part]
            if not isinstance(group, dict):
                above = ".".join(path[:depth])
                kind = "list; give it whole" if isinstance(group, list) else "single value"
                return self._bad_override(
                    origin, f"{above} is a {kind}", f"{above}={json.dumps(group)} is what it is now"
                )
        group[path[-1]] = document.data
        self.places = {known: place for known, place in self.places.items() if known[: len(path)] != path}
        self.places |= dict.fromkeys([path, *((*path, *inside) for inside in document.lines)], origin)
        return None

    def _leave_out_decided(self) -> None:
        """Of the keys that recipes decide keep those only that overrides gave: an override names the recipe."""
        for path in DECIDED:
            parts = tuple(path.split("."))
            if not self.place_of(parts).startswith(_OVERRIDE) and (group := self._group(parts[:-1])) is not None:
                group.pop(parts[-1], None)
                self.places.pop(parts, None)

    def _name_recipe(self) -> None:
        """``algorithm: dapo`` is ``algorithm: {recipe: dapo}``."""
        if isinstance(name := self.data.get("algorithm"), str):
            self.data["algorithm"] = {"recipe": name}
            self.places[_RECIPE] = self.place_of(_ALGORITHM)

    def choose_by_recipe(self, kind: type[Settings]) -> None:
        """Put in what the recipe chooses and nobody gave.

        Args:
            kind: of the settings; only those with an algorithm have recipes.
        """
        if "algorithm" not in kind.model_fields:
            return
        name = (self._group(_ALGORITHM) or {}).get("recipe")
        if not isinstance(name, str) or name not in list(Recipe):
            return
        for path, choice in RECIPES[Recipe(name)].items():
            parts = tuple(path.split("."))
            group = self._group(parts[:-1], make=True)
            if group is not None and parts[-1] not in group:
                group[parts[-1]] = self._value(choice, kind)
                of = f": {choice.path}" if isinstance(choice, Same) else ""
                self.places[parts] = f"recipe {name}{of}"

    def _group(self, path: tuple[str, ...], *, make: bool = False) -> dict[str, Any] | None:
        """The group at a path; none if there is none, or something else is there."""
        group: Any = self.data
        for part in path:
            if make and isinstance(group, dict):
                group.setdefault(part, {})
            group = group.get(part) if isinstance(group, dict) else None
        return group if isinstance(group, dict) else None

    def _value(self, choice: Any, kind: type[Settings]) -> Any:
        """A recipe's choice as a value; that of another setting as given, or its default."""
        if not isinstance(choice, Same):
            return choice
        *groups, last = choice.path.split(".")
        given = self._group(tuple(groups)) or {}
        if isinstance(number := given.get(last), int | float) and not isinstance(number, bool):
            return choice.of(number)  # what is no number is refused as what it is
        for name in groups:
            kind = kind.model_fields[name].annotation
        return choice.of(kind.model_fields[last].default)

    def _bad_override(self, origin: str, why: str, fix: str) -> None:
        self.problems.append(Problem(code="Y004", what="this override cannot be read", where=origin, why=why, fix=fix))

    def place_of(self, path: tuple[str | int, ...]) -> str:
        """Where a path, or the nearest group or list around it, was given; empty if nowhere."""
        parts = tuple(map(str, path))
        while parts and parts not in self.places:
            parts = parts[:-1]
        return self.places.get(parts, "")

    def provenance(self) -> Provenance:
        """Origins of the values that are not groups."""
        origins: dict[str, str] = {}

        def visit(value: Any, path: tuple[str, ...]) -> None:
            if isinstance(value, dict):
                for name, child in value.items():
                    visit(child, (*path, name))
            else:
                origins[".".join(path)] = self.place_of(path)

        visit(self.data, ())
        return Provenance(origins)
