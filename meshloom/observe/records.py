"""Metric and sample records as lines of JSON.

Owns: the shape of a record, its line, reading lines back, cutting a file back to a step. Refuses to know: who
writes. Always holds: a line is one JSON object and ends in a newline; a last line that was cut off is no record and is
passed over; a number that is not finite is null under its name.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from meshloom.config.errors import UserError
from meshloom.observe.atomic import replace_file

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"

Kind = Literal["train", "validation", "sft"]


class MetricRecord(TypedDict):
    """One step's numbers. ``phases`` in seconds, ``time`` in unix seconds; ``step`` counts from 1, 0 is before training."""

    step: int
    kind: Kind
    metrics: Mapping[str, float | int | None]
    phases: NotRequired[Mapping[str, float]]
    time: float


class SampleRecord(TypedDict):
    """One sample, as text and as tokens. An invalid reward is null with its reason in ``invalid``; where a component of it is
    invalid, ``failed`` says why, by name."""

    step: int
    kind: Kind | Literal["greedy"]
    row: int
    group: int
    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    answer: Any
    data_source: str
    reward: float | None
    invalid: str | None
    advantage: float | None
    finish: str
    versions: list[int]
    parts: Mapping[str, float]
    failed: NotRequired[Mapping[str, str]]
    remark: NotRequired[str]
    printed: NotRequired[str]


def encode(record: Mapping[str, Any]) -> bytes:
    """A record's line. NaN and infinities become null; a value JSON does not know is written as its text."""
    text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    # A lone surrogate has no UTF-8; its backslash form is the JSON escape that reads back as the same character.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not all(type(item) is int for item in value):
        return [_finite(item) for item in value]
    return value


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All metric records of a run folder (or of a metrics file), in order; none if there is no such file."""
    return [record for _, record in iterate(_file(path, METRICS_FILE))]


def read_samples(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All sample records of a run folder (or of a samples file), in order; none if there is no such file."""
    return [record for _, record in iterate(_file(path, SAMPLES_FILE))]


def _file(path: str | os.PathLike[str], name: str) -> Path:
    return Path(path) if Path(path).suffix == ".jsonl" else Path(path) / name


def iterate(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record with the byte its line begins at, one at a time.

    Raises:
        UserError: if a line other than an unfinished last one is no JSON object.
    """
    if not file.exists():
        return
    offset = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            yield offset, _decode(line, file, number)
            offset += len(line)


def _decode(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(
            "a line is no JSON", where=f"{file}:{number}", why=str(error), fix="remove that line"
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise UserError("a line is no record", where=f"{file}:{number}", fix="remove that line")
    return record


def rewind_file(file: Path, step: int) -> int:
    """Drop the records after ``step`` and an unfinished last line; the number of records dropped.

    The kept lines are written aside and renamed over the file, so that it is the old or the new one at any moment.
    """
    if not file.exists():
        return 0
    steps = [(offset, record["step"]) for offset, record in iterate(file)]
    dropped = {offset for offset, at in steps if at > step}
    if not dropped and ends_whole(file):
        return 0
    keep = [offset for offset, _ in steps if offset not in dropped]
    with file.open("rb") as old:
        replace_file(file, (_line_at(old, offset) for offset in keep))
    return len(dropped)


def _line_at(file: Any, offset: int) -> bytes:
    file.seek(offset)
    line: bytes = file.readline()
    return line


def ends_whole(file: Path) -> bool:
    """Whether the file's last line is finished (an empty file's is)."""
    with file.open("rb") as data:
        if data.seek(0, os.SEEK_END) == 0:
            return True
        data.seek(-1, os.SEEK_END)
        return data.read(1) == b"\n"
