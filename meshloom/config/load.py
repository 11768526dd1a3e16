"""Reading settings: a YAML file, overrides from the command line, defaults.

Owns: making settings of what is given (``config.given``), and telling all faults at once. Refuses to know: what the values mean
together (``plan.checks``). Always holds: a value has exactly the type its field declares, so the text ``"8"`` is not a number.
Paths in settings are relative to the current directory, not to the file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from meshloom.config import yaml_text
from meshloom.config.given import Given
from meshloom.config.near import did_you_mean
from meshloom.config.problems import Problem, require_none
from meshloom.config.rollout_settings import ENGINES_NOT_OFFERED
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
        UserError: that names every fault: malformed YAML, unknown keys with the nearest ones, wrong types, values out of
        range,
            missing keys, malformed overrides.
    """
    given = Given()
    if file is not None:
        given.add_file(file)
    for override in overrides:
        given.add_override(override)
    given.choose_by_recipe(kind)
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
    given = Given()
    if file is not None:
        given.add_file(file)
    for override in overrides:
        given.add_override(override)
    return given.data


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One value and its origin: ``default``, ``run.yaml:12``, ``override optimizer.lr=1e-5`` or ``recipe dapo``."""

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
    """Every value by its dotted path, as JSON values; a group that is none, and groups by name where there is none, are one
    value."""
    values: dict[str, Any] = {}
    plain = settings.model_dump(mode="json")
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            values |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and any(isinstance(group, Settings) for group in value.values()):
            for each, group in value.items():
                values |= flatten(group, f"{prefix}{name}.{each}.")
        else:
            values[f"{prefix}{name}"] = plain[name]
    return values


def dump_yaml(settings: Settings) -> str:
    """All settings, defaults included, as YAML that ``load_settings`` reads back to equal settings."""
    return yaml_text.write(settings.model_dump(mode="json"))


def _problems_of(error: ValidationError, keys: Keys, given: Given) -> list[Problem]:
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
            near = _nearest(path, fault["input"], keys)
            fix = f"did you mean {' or '.join(near)}?" if near else "leave it out; `meshloom schema` prints all keys"
            problems[path] = Problem(code="K001", what=f"there is no key {path!r}", where=where, fix=fix)
        else:
            key = keys.known_part(fault["loc"])
            problems.setdefault(key, _wrong_value(key, fault["loc"], fault["input"], keys, given))
    return list(problems.values())


def _nearest(path: str, given: Any, keys: Keys) -> list[str]:
    """Keys that an unknown one may mean; for a group that is like none beside it, keys that are called as those in it."""
    near = keys.nearest(path)
    above, _, last = path.rpartition(".")
    if not isinstance(given, dict) or any(did_you_mean(last, [key.removeprefix(f"{above}.")]) for key in near):
        return near
    inside = [(f"{path}.{name}", str(name)) for name in given]
    meant = [key for whole, name in inside for key in keys.nearest(whole) if key.rpartition(".")[2] == name]
    return list(dict.fromkeys(meant)) or near


def _wrong_value(key: str, loc: tuple[str | int, ...], value: Any, keys: Keys, given: Given) -> Problem:
    inside = loc[len(key.split(".")) :]
    shown = json.dumps(value, ensure_ascii=False)
    which = f" at entry {inside[0] + 1}" if inside and isinstance(inside[0], int) else ""
    place = given.place_of(loc)
    return Problem(
        code="K003",
        what=f"{key} cannot be {shown if len(shown) <= 80 else shown[:77] + '…'}{which}",
        where=f"{key} ({place})" if place else key,
        why=ENGINES_NOT_OFFERED.get(str(value).lower(), "") if key == "rollout.engine" else "",
        fix=f"{did_you_mean(value, keys.options(key)) if isinstance(value, str) else ''}expected: {keys.expected(key)}",
    )
