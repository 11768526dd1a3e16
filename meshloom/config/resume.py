"""Which settings may differ between a checkpoint and the run that continues it.

Owns: the rule. Always holds: a resumed run repeats the uninterrupted one, so what decides its numbers may not change.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from meshloom.config.errors import UserError
from meshloom.config.load import flatten
from meshloom.config.settings import Settings, SftSettings, TrainSettings

_LENGTH = {"batch.steps", "batch.epochs"}
"""How long the run is. A linear or cosine schedule spreads over the new length from there on."""
_PLACE = {"run_dir", "device"}
"""Where the run lives. Another device rounds differently."""
_WATCHING = {
    "checkpoint.*",
    "logging.*",
    "validation.every_steps",
    "validation.before_training",
    "validation.after_training",
}
"""When the run is saved, shown and measured."""
_CHECKS = {"rollout.vllm.max_probe_gap"}
"""What stops a run and changes no number."""
_COMPONENT, _JUDGE = r"reward\.components\.[^.]+", r"reward\.components\.[^.]+\.judge"
_JUDGED = (
    "url|api_key_variable|max_concurrent|requests_per_minute|request_deadline_s|retries|backoff_s|longest_backoff_s"
)
_OF_COMPONENTS = re.compile(rf"{_COMPONENT}\.(deadline_s|model\.tokens_per_batch)|{_JUDGE}\.({_JUDGED}|cache|price_.*)")
_REWARD_PROCESSES = {"reward.workers", "reward.deadline_s"}
"""How fast rewards come, and where they come from; a deadline that is met changes no reward. So are those of
``_OF_COMPONENTS``."""
_ENVIRONMENT_PROCESSES = {"environment.workers", "environment.step_deadline_s", "environment.episode_deadline_s"}
"""The same of environments."""
_MEMORY_BOUNDS = {
    "batch.tokens_per_microbatch",
    "batch.samples_per_microbatch",
    "device_memory_bytes",
    "model.gradient_checkpointing",
    "model.logits_chunk_bytes",
    "rollout.kv_cache_bytes",
    "rollout.vllm.gpu_memory_utilization",
    "rollout.vllm.sleep",
}
"""Bounds of memory. A run that ended out of memory continues only if they may shrink; they change rounding, as the device
does, and nothing else."""
_KERNELS = {"model.attention", "model.compile"}
"""How the same numbers are computed: they change rounding, as the device does, and nothing else."""
_DEVICES = {"fabric", "cluster.*", "placement.*", "parallel.*", "offload.*"}
"""Which devices compute and how models are cut: they change rounding, as the device does, and nothing else."""

_NAMES = {"algorithm.recipe"}
"""What values are called that are compared one by one."""

MAY_CHANGE = frozenset(
    _NAMES
    | _LENGTH
    | _PLACE
    | _WATCHING
    | _REWARD_PROCESSES
    | _ENVIRONMENT_PROCESSES
    | _MEMORY_BOUNDS
    | _KERNELS
    | _DEVICES
)
"""What may change on resume; ``group.*`` is a whole group. All else decides the numbers of the run and may not, even where
only the order of work changes (``rollout.max_sequences``)."""

_DECIDED = "gradient_checkpointing"
"""Of the model: a run that was left to decide this has written down what it decided."""

_FILES = {
    "algorithm.advantage",
    "algorithm.policy_loss",
    "algorithm.kl_estimator",
    "model.path",
    "reference.model",
    "rollout.from_samples",
    "data.train.files",
    "data.validation.files",
    "reward.function",
    "environment.tools",
    "environment.gym",
    "environment.custom",
}
"""Names of files, relative to the current directory: other names of the same files are no contradiction."""

_FILES_OF_COMPONENTS = re.compile(rf"{_COMPONENT}\.(function|model\.path|judge\.prompt_file)")


def _names_files(path: str) -> bool:
    return path in _FILES or _FILES_OF_COMPONENTS.fullmatch(path) is not None


def contradictions(saved: Settings, new: Settings, allowed: Collection[str] = MAY_CHANGE) -> list[tuple[str, Any, Any]]:
    """Settings that differ and may not.

    Args:
        saved: settings of the checkpoint.
        new: settings of the run that continues it.
        allowed: dotted paths that may differ; ``group.*`` is a whole group.

    Returns:
        (dotted path, saved value, new value) of each, in the order of the fields. A value that one side has not is none.
    """
    before, after = flatten(saved), flatten(new)
    groups = tuple(path[:-1] for path in allowed if path.endswith(".*"))
    paths = [path for path in dict.fromkeys([*before, *after]) if path not in allowed and not path.startswith(groups)]
    if allowed is MAY_CHANGE:
        paths = [path for path in paths if not _OF_COMPONENTS.fullmatch(path)]
    values = ((path, before.get(path), after.get(path)) for path in paths)
    return [
        (path, old, new)
        for path, old, new in values
        if old != new and not (_names_files(path) and old and new and _resolved(old) == _resolved(new))
    ]


S = TypeVar("S", TrainSettings, SftSettings)


def as_decided(settings: S, recompute: bool) -> S:
    """Settings with ``auto`` recompute replaced by what it came to, for the run and for those that continue it."""
    if settings.model.gradient_checkpointing != "auto":
        return settings
    model = settings.model.model_copy(update={_DECIDED: recompute})
    return settings.model_copy(update={"model": model})


def as_begun(saved: S, new: S) -> S:
    """Settings of a run that continues another: what is left open is as it was decided there, since recompute may round
    otherwise. A value that is given now stands."""
    before = saved.model.gradient_checkpointing
    return new if before == "auto" else as_decided(new, before)


def _resolved(names: str | list[str]) -> list[Path]:
    """Absolute paths. The function behind a reward file's name stays a part of the last name."""
    return [Path(name).resolve() for name in ([names] if isinstance(names, str) else names)]


def require_same(saved: Settings, new: Settings, allowed: Collection[str] = MAY_CHANGE) -> None:
    """Refuse to continue a run whose settings contradict its checkpoint.

    Raises:
        UserError: that names each key, both values and where the new one came from.
    """
    found = contradictions(saved, new, allowed)
    if not found:
        return
    lines = [
        f"  {path}: {old!r} in the checkpoint, {now!r} now ({new.provenance.of(path)})" for path, old, now in found
    ]
    fix = (
        "give the checkpoint's values, or begin a new run in another run_dir, whose model.path may be the checkpoint's "
        "folder model (with adapters: what meshloom export makes of it)"
    )
    if any(_names_files(path) for path, _, _ in found):
        fix += "; where a file has only moved, name its new place in the run's settings.yaml too"
    raise UserError(
        "\n".join(["the settings contradict the checkpoint", *lines]),
        why="a resumed run repeats the uninterrupted one",
        fix=fix,
    )
