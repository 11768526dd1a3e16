"""Reading settings: a YAML file, overrides from the command line, defaults.

Owns: which value wins and where it came from, and telling all faults at once. Refuses to know: what the values mean together
(``plan.checks``). Always holds: a later override beats an earlier one, an override beats the file, the file beats the
default; a value has exactly the type its field declares, so the text ``"8"`` is not a number. Paths in settings are
relative to the current directory, not to the file.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from meshloom.config import yaml_text
from meshloom.config.problems import Problem, require_none
from meshloom.config.provenance import Provenance
from meshloom.config.schema import Keys
from meshloom.config.settings import Settings

S = TypeVar("S", bound=Settings)


def load_settings(kind: type[S], file: Path | None, overrides: Sequence[str] = ()) -> S:
    """Settings from a file and overrides.

    Args:
        kind: ``TrainSettings``, ``SftSettings`` or ``EvalSettings``.
        file: a YAML file, or none if the overrides say everything.
        overrides: each ``a.b=value``, the value in YAML: ``optimizer.lr=1e-5``, ``rollout.stop=["\\n"]``, ``model.lora=null``.
            A value of a group or list replaces it whole.

    Returns:
        The settings; their ``provenance`` knows where each value came from.

    Raises:
        UserError: that names every fault: malformed YAML, unknown keys with the nearest ones, wrong types, values out of range,
            missing keys, malformed overrides.
    """
    given = _Given()
    if file is not None:
        given.add_file(file)
    for override in overrides:
        given.add_override(override)
    title = str(file) if file is not None else "the overrides"
    if given.unreadable:
        require_none(given.problems, title)
    try:
        settings = kind.model_validate_json(json.dumps(given.data), strict=True)
    except ValidationError as error:
        require_none([*given.problems, *_problems_of(error, Keys(kind), given)], title)
        raise
    require_none(given.problems, title)
    settings._provenance = given.provenance()
    return settings


def given_keys(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """What a file and overrides give, unchecked; faults are passed over."""
    given = _Given()
    if file is not None:
        given.add_file(file)
    for override in overrides:
        given.add_override(override)
    return given.data


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One value and its origin: ``default``, ``run.yaml:12`` or ``override optimizer.lr=1e-5``."""

    path: str
    value: Any
    origin: str


def explain(settings: Settings) -> list[Explained]:
    """Every value of the settings with its origin, in the order of their fields."""
    return [
        Explained(path=path, value=value, origin=settings.provenance.of(path))
        for path, value in flatten(settings).items()
    ]


def flatten(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted path, as JSON values; a group that is none is one value."""
    values: dict[str, Any] = {}
    plain = settings.model_dump(mode="json")
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = plain[name]
    return values


def dump_yaml(settings: Settings) -> str:
    """All settings, defaults included, as YAML that ``load_settings`` reads back to equal settings."""
    return yaml_text.write(settings.model_dump(mode="json"))


class _Given:
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
        origin = f"override {override}"
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


def _problems_of(error: ValidationError, keys: Keys, given: _Given) -> list[Problem]:
    """Our own words for what pydantic found, one problem a key."""
    problems: dict[str, Problem] = {}
    for fault in error.errors(include_url=False, include_context=False):
        path = ".".join(map(str, fault["loc"]))
        where = " ".join(filter(None, (path, f"({place})" if (place := given.place_of(fault["loc"])) else "")))
        if fault["type"] == "missing" and path in keys:
            for key in keys.required(path):
                what = f"the key {key!r} is missing"
                problems[key] = Problem(code="K002", what=what, where=where, fix=f"give {key}: {keys.expected(key)}")
        elif fault["type"] == "extra_forbidden":
            near = keys.nearest(path)
            fix = f"did you mean {' or '.join(near)}?" if near else "leave it out; `meshloom schema` prints all keys"
            problems[path] = Problem(code="K001", what=f"there is no key {path!r}", where=where, fix=fix)
        else:
            key = keys.known_part(fault["loc"])
            problems.setdefault(key, _wrong_value(key, fault["loc"], fault["input"], keys, given))
    return list(problems.values())


def _wrong_value(key: str, loc: tuple[str | int, ...], value: Any, keys: Keys, given: _Given) -> Problem:
    inside = loc[len(key.split(".")) :]
    shown = json.dumps(value, ensure_ascii=False)
    which = f" at entry {inside[0] + 1}" if inside and isinstance(inside[0], int) else ""
    place = given.place_of(loc)
    return Problem(
        code="K003",
        what=f"{key} cannot be {shown if len(shown) <= 80 else shown[:77] + '…'}{which}",
        where=f"{key} ({place})" if place else key,
        fix=f"expected: {keys.expected(key)}",
    )
