"""What a run folder tells, read back: its stages, its numbers as columns, where the time went, before and after.

Owns: reading finished or unfinished run folders for report and summary. Refuses to know: how anything is drawn. Always
holds: reading never writes and needs no lock; totals are over all records, thinned columns say what they left out.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.observe.names import PHASES
from meshloom.observe.records import METRICS_FILE, read_metrics
from meshloom.observe.run_folder import PLAN_TEXT_FILE, RunState, read_settings, read_status


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run folder of possibly several that make a whole (warm-up, then reinforcement learning).

    Args:
        name: short name for people.
        path: its folder.
        records: all metric records, in order.
        settings: resolved settings; empty if the folder has none.
        plan: the plan's text; empty if there is none.
        status: as ``read_status`` gives it.
    """

    name: str
    path: Path
    records: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    plan: str
    status: Mapping[str, Any]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(record["kind"] for record in self.records))

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def steps(self) -> int | None:
        """Steps the whole run was to have, where that is known."""
        if self.status["steps"] is not None:
            return int(self.status["steps"])
        given = self.settings.get("batch", {}).get("steps")
        return None if given is None else int(given)

    @property
    def state(self) -> str:
        """How the stage ended; a folder without a status is finished when its last step is there."""
        state: str = self.status["state"]
        if state == RunState.LOST and self.steps is not None and self.last_step >= self.steps:
            return RunState.FINISHED.value
        return state

    @property
    def seconds(self) -> float:
        """From the first record's step to the last record: phases of the first, then the clock. A pause between a stop
        and a resume counts."""
        if not self.records:
            return 0.0
        first = sum(self.records[0].get("phases", {}).values())
        return float(self.records[-1]["time"] - self.records[0]["time"] + first)


def read_stages(
    run_dir: str | os.PathLike[str], stages: Mapping[str, str | os.PathLike[str]] | None = None
) -> list[Stage]:
    """The stages of a run, in order; the run folder itself is the last one if it has metrics of its own.

    Args:
        run_dir: folder of the run, or a folder that only holds the stages' folders.
        stages: further run folders by name, in order, before ``run_dir``. Default: sub-folders that hold metrics, by the
            time of their first record.

    Raises:
        UserError: if there are no metrics at all.
    """
    root = Path(run_dir)
    if stages is None:
        folders = {file.parent.name: file.parent for file in sorted(root.glob(f"*/{METRICS_FILE}"))}
    else:
        folders = {name: Path(path) for name, path in stages.items()}
    found = [_read_stage(name, path) for name, path in folders.items()]
    if stages is None:
        found.sort(key=lambda stage: stage.records[0]["time"] if stage.records else 0.0)
    if (root / METRICS_FILE).exists() and root.resolve() not in [path.resolve() for path in folders.values()]:
        found.append(_read_stage(root.resolve().name, root))
    found = [stage for stage in found if stage.records]
    if not found:
        why = f"no {METRICS_FILE} with records in it" if root.is_dir() else "there is no such folder"
        fix = "name the folder of a run (run_dir), one that has finished a step"
        raise UserError("there is nothing to show", where=str(root), why=why, fix=fix)
    return found


def _read_stage(name: str, path: Path) -> Stage:
    plan = path / PLAN_TEXT_FILE
    return Stage(
        name=name,
        path=path,
        records=read_metrics(path),
        settings=read_settings(path),
        plan=plan.read_text("utf-8") if plan.exists() else "",
        status=read_status(path),
    )


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """A validation that marks a beginning or an end. Accuracy and its interval are shares."""

    label: str
    step: int
    accuracy: float
    low: float | None
    high: float | None


def milestones(stages: Sequence[Stage]) -> list[Milestone]:
    """The first validation of all, then the last one of each stage; empty without validation."""
    found: list[Milestone] = []
    for stage in stages:
        validations = [r for r in stage.of_kind("validation") if r["metrics"].get("accuracy") is not None]
        if not validations:
            continue
        if not found:
            found.append(_milestone("before" if len(validations) > 1 else "accuracy", validations[0]))
        if validations[-1] is not validations[0] or len(found) > 1:
            label = "after" if len(stages) == 1 else f"after {stage.name}"
            found.append(_milestone(label, validations[-1]))
    return found


def _milestone(label: str, record: Mapping[str, Any]) -> Milestone:
    metrics = record["metrics"]
    low, high = metrics.get("accuracy_low"), metrics.get("accuracy_high")
    return Milestone(label=label, step=record["step"], accuracy=metrics["accuracy"], low=low, high=high)


def held_out_losses(stages: Sequence[Stage]) -> list[float]:
    """The loss on held-out rows as the last stage with one found it first and last; empty without, one of one."""
    for stage in reversed(stages):
        metrics = [record["metrics"] for record in stage.of_kind("validation")]
        if losses := [found["loss"] for found in metrics if found.get("loss") is not None]:
            return [losses[0], *losses[1:][-1:]]
    return []


def phase_totals(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by phase over all records, canonical phases first."""
    totals: dict[str, float] = {}
    for record in records:
        for name, seconds in record.get("phases", {}).items():
            totals[name] = totals.get(name, 0.0) + (seconds or 0.0)
    order = list(PHASES)
    return dict(sorted(totals.items(), key=lambda item: order.index(item[0]) if item[0] in PHASES else len(order)))


def invalid_totals(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Invalid rewards by kind of record: ``count``, and ``reasons`` with their counts where they were noted. A kind without
    any is left out."""
    totals: dict[str, dict[str, Any]] = {}
    for record in records:
        if not record["metrics"].get("reward_invalid"):
            continue
        kind = totals.setdefault(record["kind"], {"count": 0, "reasons": {}})
        kind["count"] += int(record["metrics"]["reward_invalid"])
        for name, value in record["metrics"].items():
            if name.startswith("reward_invalid/") and value:
                reason = name.partition("/")[2]
                kind["reasons"][reason] = kind["reasons"].get(reason, 0) + int(value)
    return totals


def columns(records: Sequence[Mapping[str, Any]], *, limit: int) -> dict[str, Any]:
    """Records of one kind as columns: ``step``, ``metrics`` by name, ``phases`` by name, ``records`` (how many there are).

    More than ``limit`` records are thinned evenly, the first and the last one kept.
    """
    kept = [records[i] for i in evenly(len(records), limit)]
    return {
        "records": len(records),
        "step": [record["step"] for record in kept],
        "metrics": _columns([record["metrics"] for record in kept]),
        "phases": _columns([record.get("phases", {}) for record in kept]),
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [_rounded(row.get(name)) for row in rows] for name in names}


def _rounded(value: float | None) -> float | None:
    """Six significant digits, more than a chart shows."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def evenly(count: int, limit: int) -> list[int]:
    """At most ``limit`` (2 or more) indices below ``count``, evenly spaced, the first and the last one among them."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]
