"""Groups of samples on their way between a stage and the control, and in a checkpoint.

Owns: what the control is told of a group, and the form in which groups that wait are saved. Refuses to know: models, devices,
who generates. Always holds: what was saved is what is read back.
"""

from collections.abc import Sequence
from typing import Any

from meshloom.config.settings import TrainSettings
from meshloom.loop.session import Cut
from meshloom.loop.spread import spread_of
from meshloom.loop.stage import Attempt, Group, Progress, Spread
from meshloom.samples import Samples, concat
from meshloom.samples.store import from_parts, to_parts

_LATER = {"printed": ""}
"""Columns that groups of an earlier checkpoint do not have, with what stands for them: of what is shown alone."""


def as_groups(found: Attempt[Samples], settings: TrainSettings) -> Attempt[Group[Samples]]:
    """What a rollout gave, for the control."""
    groups = {number: group_of(number, samples, settings) for number, samples in found.groups.items()}
    return Attempt(groups, found.unfinished)


def group_of(number: int, samples: Samples, settings: TrainSettings) -> Group[Samples]:
    """The samples of a draw, for the control."""
    sifts = settings.algorithm.filter_groups.enabled and settings.rollout.from_samples is None
    spread = spread_of(samples, settings) if sifts else Spread.SOME
    return Group(number, oldest_version(samples), samples, spread)


def oldest_version(group: Samples) -> int:
    """Version of the weights that sampled a group's oldest token; of a group that has none, the one that it notes."""
    own = group["version"][group["mask"]]
    return int(own.min()) if len(own) else int(group["version"].max())


def cut_of(progress: Progress, waiting: Sequence[Group[Samples]], algorithm: dict[str, Any]) -> Cut:
    """What a checkpoint holds of a run besides its models: where it stands, the groups that wait, the algorithm's own
    state."""
    groups = [group.content for group in waiting]
    tensors, meta = to_parts(concat(groups)) if groups else ({}, {})
    values = {
        **progress.values(),
        "algorithm": algorithm,
        "buffer": {"groups": [len(group) for group in groups], "meta": meta},
    }
    return Cut(values, {f"buffer/{name}": tensor for name, tensor in tensors.items()})


def standing(cut: Cut, settings: TrainSettings) -> tuple[Progress, list[Group[Samples]]]:
    """What ``cut_of`` was given."""
    kept = cut.values["buffer"]
    tensors = {name.removeprefix("buffer/"): t for name, t in cut.tensors.items() if name.startswith("buffer/")}
    meta = {name: [value] * sum(kept["groups"]) for name, value in _LATER.items()} | kept["meta"]
    parts = from_parts(tensors, meta).split(kept["groups"]) if kept["groups"] else []
    groups = [group_of(int(part["group"][0]), part, settings) for part in parts]
    return Progress.of(cut.values), groups
