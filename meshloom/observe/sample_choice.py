"""Which samples a report shows when it cannot show all.

Owns: the choice and the bound on its size. Always holds: no more than the given number and bytes; each stage's and kind's
first and last step are represented; a group is shown whole where there is room for it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.observe.history import Stage, evenly
from meshloom.observe.records import SAMPLES_FILE, iterate

STEPS_OF_A_KIND = 60
"""Steps of each kind that are represented, when there are more samples than room."""


@dataclass(frozen=True)
class _Place:
    """Where a sample's line begins, and how long it is."""

    file: Path
    stage: int
    offset: int
    size: int


def choose_samples(stages: Sequence[Stage], *, limit: int, byte_limit: int) -> tuple[list[dict[str, Any]], int]:
    """Samples to show and the number there are.

    Args:
        stages: where to look; each sample gets the key ``stage``, its stage's index.
        limit: most samples.
        byte_limit: most bytes of their lines.
    """
    buckets: dict[tuple[int, str, int], dict[int, list[_Place]]] = {}
    total = 0
    for index, stage in enumerate(stages):
        file = stage.path / SAMPLES_FILE
        for offset, size, record in _lines(file):
            total += 1
            groups = buckets.setdefault((index, record["kind"], record["step"]), {})
            groups.setdefault(record["group"], []).append(_Place(file, index, offset, size))
    while True:
        chosen = _choose(buckets, total, limit)
        size = sum(place.size for place in chosen)
        if size <= byte_limit or limit <= 1:
            return [_read(place) for place in chosen], total
        limit = max(1, min(limit - 1, int(limit * 0.9 * byte_limit / size)))


def last_samples(stages: Sequence[Stage], count: int) -> list[dict[str, Any]]:
    """At most ``count`` samples of the last step that left any, spread over the step; held-out ones where there are both."""
    for stage in reversed(stages):
        step = -1
        kinds: dict[str, list[dict[str, Any]]] = {}
        for _, record in iterate(stage.path / SAMPLES_FILE):
            if record["step"] > step:
                step, kinds = record["step"], {}
            if record["step"] == step:
                kinds.setdefault(record["kind"], []).append(record)
        if kinds:
            found = kinds.get("validation") or next(iter(kinds.values()))
            return [found[i] for i in evenly(len(found), count)] if count > 1 else found[:count]
    return []


def _lines(file: Path) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Offset, size and record of each line."""
    before: tuple[int, Mapping[str, Any]] | None = None
    for offset, record in iterate(file):
        if before is not None:
            yield before[0], offset - before[0], before[1]
        before = (offset, record)
    if before is not None:
        yield before[0], file.stat().st_size - before[0], before[1]


def _choose(buckets: Mapping[tuple[int, str, int], Mapping[int, list[_Place]]], total: int, limit: int) -> list[_Place]:
    """Steps first, then a fair share of each, taken as groups spread over the step."""
    if total <= limit:
        return [place for groups in buckets.values() for group in groups.values() for place in group]
    keys = _steps(list(buckets), limit)
    chosen: dict[tuple[int, str, int], list[_Place]] = {}
    room = limit
    # The smallest first, so that what a small step leaves over goes to the larger ones.
    for left, key in enumerate(sorted(keys, key=lambda k: sum(map(len, buckets[k].values()))), start=-len(keys)):
        chosen[key] = _take(list(buckets[key].values()), room // -left)
        room -= len(chosen[key])
    return [place for key in keys for place in chosen[key]]


def _steps(keys: Sequence[tuple[int, str, int]], limit: int) -> list[tuple[int, str, int]]:
    by_kind: dict[tuple[int, str], list[tuple[int, str, int]]] = {}
    for key in keys:
        by_kind.setdefault(key[:2], []).append(key)
    each = max(2, min(STEPS_OF_A_KIND, limit // len(by_kind)))
    return [steps[i] for steps in by_kind.values() for i in evenly(len(steps), each)]


def _take(groups: Sequence[list[_Place]], quota: int) -> list[_Place]:
    """At most ``quota`` samples: whole groups spread evenly, or the beginning of one group if none fits."""
    if sum(map(len, groups)) <= quota:
        return [place for group in groups for place in group]
    largest = max(map(len, groups))
    count = quota // largest
    if count == 0:
        return groups[0][:quota]
    spread = [groups[i] for i in evenly(len(groups), count)] if count > 1 else [groups[0]]
    return [place for group in spread for place in group]


def _read(place: _Place) -> dict[str, Any]:
    with place.file.open("rb") as file:
        file.seek(place.offset)
        record: dict[str, Any] = json.loads(file.readline())
    return {**record, "stage": place.stage}
