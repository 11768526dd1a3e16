"""A file of the cost model's constants, as ``meshloom calibrate`` writes it and ``cluster.constants`` names it.

Owns: its form. Refuses to know: where constants come from. Always holds: a name that is no constant, and a value that is not
physically possible, are errors that name line and nearest name; what the file leaves out keeps its default; what was written
is read back as the same numbers.

    device: h200
    constants:
      training_matrix_share: {value: 0.71, unit: of the matrix rate, origin: fitted to runs/a}
      decode_layer_s: 4.1e-05
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshloom.config import yaml_text
from meshloom.config.errors import UserError
from meshloom.config.problems import Problem, require_none
from meshloom.plan.constants import NAMES, Constants, bounds_of, unit_of

_KEYS = ("value", "unit", "origin")
_TITLE = "# Constants of meshloom's cost model. Use: cluster.constants=FILE, or meshloom plan --constants FILE\n"


@dataclass(frozen=True, kw_only=True)
class GivenConstants:
    """Constants with what is known of them.

    Args:
        constants: all of them.
        origins: where those that were given come from, by name.
        device: kind of the device that they were fitted to; none if the file does not say.
    """

    constants: Constants = Constants()
    origins: Mapping[str, str]
    device: str | None = None


def read_constants(path: str | os.PathLike[str]) -> GivenConstants:
    """Constants of a file.

    Raises:
        UserError: that lists everything that is wrong with it: no such file, no YAML, unknown names, values out of bounds.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = sorted(str(other) for other in file.parent.glob("*.yaml"))[:8] if file.parent.is_dir() else []
        fix = f"files nearby: {', '.join(near)}" if near else "meshloom calibrate RUN_DIR --write constants.yaml"
        raise UserError(f"[C001] there is no file of constants {file}", where=str(file.absolute()), fix=fix) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"[C001] {file} cannot be read", where=str(file.absolute()), why=str(error)) from error
    document = yaml_text.read(text)
    reader = _Reader(file, document)
    reader.problems += [reader.problem("C001", what, line) for line, what in document.faults]
    if not reader.problems:
        reader.read()
    require_none(reader.problems, str(file))
    return GivenConstants(constants=replace(Constants(), **reader.values), origins=reader.origins, device=reader.device)


class _Reader:
    """Turns a document into constants, and collects what is wrong."""

    def __init__(self, file: Path, document: yaml_text.Document) -> None:
        self.file, self.document = file, document
        self.values: dict[str, float] = {}
        self.origins: dict[str, str] = {}
        self.device: str | None = None
        self.problems: list[Problem] = []

    def problem(self, code: str, what: str, line: int, fix: str = "") -> Problem:
        return Problem(code=code, what=what, where=f"{self.file}:{line}", fix=fix)

    def refuse(self, code: str, what: str, *path: str, fix: str = "") -> None:
        self.problems.append(self.problem(code, what, self.document.lines.get(path, 1), fix))

    def read(self) -> None:
        data = self.document.data
        if not isinstance(data, dict) or not isinstance(data.get("constants"), dict):
            self.refuse("C001", "the file has no group 'constants'", fix="write constants: {NAME: NUMBER}")
            return
        for key in data:
            if key not in ("device", "constants"):
                fix = "'constants' with a value for each name, and 'device'"
                self.refuse("C002", f"there is no key {key!r} in a file of constants", key, fix=f"the keys are {fix}")
        self.device = str(data["device"]) if data.get("device") is not None else None
        for name, given in data["constants"].items():
            if name not in NAMES:
                near = difflib.get_close_matches(name, NAMES, n=3)
                fix = f"did you mean {' or '.join(near)}?" if near else f"constants are {', '.join(NAMES)}"
                self.refuse("C002", f"the cost model has no constant {name!r}", "constants", name, fix=fix)
            else:
                self.one(name, given)

    def one(self, name: str, given: Any) -> None:
        entry = given if isinstance(given, dict) else {"value": given}
        path = ("constants", name)
        for key in entry:
            if key not in _KEYS:
                what = f"a constant has no key {key!r}"
                self.refuse("C002", what, *path, key, fix=f"the keys are {', '.join(_KEYS)}")
        value, (least, most) = entry.get("value"), bounds_of(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            what = f"{name} cannot be {value!r}"
            self.refuse("C003", what, *path, fix=f"a number from {least:g} to {most:g} ({unit_of(name)})")
            return
        self.values[name] = float(value)
        self.origins[name] = str(entry.get("origin") or f"{self.file}:{self.document.lines.get(path, 1)}")


def constants_text(given: GivenConstants) -> str:
    """The file of those constants whose origin is known."""
    entries = {
        name: {
            "value": float(f"{getattr(given.constants, name):.6g}"),
            "unit": unit_of(name),
            "origin": given.origins[name],
        }
        for name in NAMES
        if name in given.origins
    }
    head = {} if given.device is None else {"device": given.device}
    return _TITLE + yaml_text.write({**head, "constants": entries})
