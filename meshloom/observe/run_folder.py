"""The run folder: everything a run leaves behind, in one place.

Owns: the folder's lock, its names, settings, plan, status, and the growing files of metrics and samples. Refuses to
know: checkpoints (it only says where they go), how a number is computed. Always holds: a folder belongs to one process
at a time; a fresh start never writes into a folder that holds something; a kill at any moment loses no whole record.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshloom.config import yaml_text
from meshloom.config.errors import UserError
from meshloom.config.load import dump_yaml
from meshloom.config.settings import Settings
from meshloom.observe.atomic import aside_of, replace_file
from meshloom.observe.lock import LOCK_FILE, FolderLock, is_locked
from meshloom.observe.records import (
    METRICS_FILE,
    SAMPLES_FILE,
    MetricRecord,
    SampleRecord,
    encode,
    ends_whole,
    read_metrics,
    rewind_file,
)

SETTINGS_FILE = "settings.yaml"
PLAN_TEXT_FILE = "plan.txt"
PLAN_FILE = "plan.json"
STATUS_FILE = "status.json"
MEMORY_FILE = "memory.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
LOGS_FOLDER = "logs"
"""Of workers' logs, which are there before the run itself begins."""


class RunState(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Ended before its last step, in order (Ctrl-C); it can be resumed."""
    FAILED = "failed"
    """Ended by an error."""
    LOST = "lost"
    """Its process ended without a word; only readers see this."""


class RunFolder:
    """A folder that this process holds until ``close`` or the end of the ``with`` block.

    Made by ``create`` or ``resume``. Leaving the block through an exception notes it in the status.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS_FOLDER
        self._lock = lock
        self._last_step = 0
        self._metrics = _Lines(path / METRICS_FILE)
        self._samples = _Lines(path / SAMPLES_FILE)
        self._memory = _Lines(path / MEMORY_FILE)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        settings: Settings | None = None,
        plan_text: str | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make the folder and take it.

        Raises:
            UserError: if the path is no folder, cannot be made, holds something, or is in use by another process.
        """
        folder = Path(path)
        check_free(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder)
        except OSError as error:
            raise UserError("the run folder cannot be made", where=str(folder), why=str(error)) from error
        try:
            _refuse_filled(folder)
            run = cls(folder, lock)
            run._write_given(settings, plan_text, plan)
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> Self:
        """Take the folder of an earlier run.

        Raises:
            UserError: if there is no run at ``path``, or it is in use by another process.
        """
        folder = Path(path)
        if not (folder / SETTINGS_FILE).is_file():
            raise UserError(
                "there is no run to resume",
                where=str(folder),
                why=f"it has no {SETTINGS_FILE}",
                fix="leave --resume out, or name the folder of an earlier run",
            )
        return cls(folder, FolderLock(folder))

    def write_settings(self, settings: Settings) -> None:
        """Write all settings, defaults included, to ``settings.yaml``."""
        replace_file(self.path / SETTINGS_FILE, [dump_yaml(settings).encode()])

    def write_plan(self, text: str, plan: Mapping[str, Any] | None = None) -> None:
        """Write the plan for people (``plan.txt``) and for programs (``plan.json``)."""
        replace_file(self.path / PLAN_TEXT_FILE, [text.encode()])
        if plan is not None:
            replace_file(self.path / PLAN_FILE, [json.dumps(plan, indent=2, default=str).encode()])

    def set_status(self, state: RunState, *, step: int, steps: int | None = None, reason: str = "") -> None:
        """Note how the run stands: the last step done, the steps in all, and why it ended, if it did."""
        status = {"state": state.value, "step": step, "steps": steps, "reason": reason}
        replace_file(self.path / STATUS_FILE, [encode(status)])

    def log_metrics(self, record: MetricRecord | Mapping[str, Any]) -> None:
        """Append one step's metrics. Values are numbers, or tensors and arrays of one element."""
        metrics = {name: _number(value) for name, value in record["metrics"].items()}
        self._metrics.append([{**record, "metrics": metrics}])
        self._last_step = record["step"]

    def log_samples(self, records: Sequence[SampleRecord | Mapping[str, Any]]) -> None:
        """Append a step's samples, in one write."""
        self._samples.append(records)

    def log_memory(self, record: Mapping[str, Any]) -> None:
        """Append what is held at a boundary between phases."""
        self._memory.append([record])

    def rewind(self, step: int) -> int:
        """Drop all records after ``step`` and half-written last lines; the number of records dropped."""
        for lines in (self._metrics, self._samples, self._memory):
            lines.close()
        return sum(rewind_file(self.path / name, step) for name in (METRICS_FILE, SAMPLES_FILE, MEMORY_FILE))

    def sync(self) -> None:
        """Bring metrics and samples to the disk. Called before a checkpoint counts as complete, it makes sure that a
        power cut leaves every record up to that checkpoint."""
        self._metrics.sync()
        self._samples.sync()

    def close(self) -> None:
        """Close the files and release the folder; a second call does nothing."""
        for lines in (self._metrics, self._samples, self._memory):
            lines.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self._note_end(kind, error)
        finally:
            self.close()

    def _note_end(self, kind: type[BaseException], error: BaseException | None) -> None:
        before = read_status(self.path)
        if before["state"] not in (RunState.RUNNING, RunState.LOST):
            return
        state = RunState.STOPPED if issubclass(kind, KeyboardInterrupt) else RunState.FAILED
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"{kind.__name__}: {first_line}" if first_line else kind.__name__
        with suppress(OSError):  # a full disk, say: what ended the run is on its way and tells more
            step = max(before["step"], self._last_step)
            self.set_status(state, step=step, steps=before["steps"], reason=reason)

    def _write_given(self, settings: Settings | None, plan_text: str | None, plan: Mapping[str, Any] | None) -> None:
        # First, since a folder with settings can be resumed, and one without is free: a kill leaves one or the other.
        if settings is not None:
            self.write_settings(settings)
        if plan_text is not None:
            self.write_plan(plan_text, plan)


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings a run was started with, as plain values; none if the folder has none."""
    file = Path(path) / SETTINGS_FILE
    if not file.exists():
        return {}
    document = yaml_text.read(file.read_text(encoding="utf-8", errors="replace"))
    for line, fault in document.faults:
        raise UserError("the settings of the run cannot be read", where=f"{file}:{line}", why=fault)
    if not isinstance(document.data, dict):
        raise UserError("the settings of the run are no mapping", where=str(file))
    return document.data


def read_status(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How a run stands: ``state``, ``step``, ``steps``, ``reason``. A run that says it is running while no process
    holds its folder is lost."""
    folder = Path(path)
    file = folder / STATUS_FILE
    running: dict[str, Any] = {"state": RunState.RUNNING.value, "step": 0, "steps": None, "reason": ""}
    status = running | json.loads(file.read_bytes()) if file.exists() else running
    if status["state"] == RunState.RUNNING and not is_locked(folder):
        status["state"] = RunState.LOST.value
    return status


def check_free(path: str | os.PathLike[str], *, resume: bool = False) -> None:
    """Check, before any work, that a run may take a folder; nothing is written.

    Args:
        path: of the run folder.
        resume: it may hold a run.

    Raises:
        UserError: if the path is no folder, is in use by another process, or holds something it may not.
    """
    folder = Path(path)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError("the run folder is a file", where=str(folder), fix="use another run_dir")
    if is_locked(folder):
        FolderLock(folder).release()
    if not resume:
        _refuse_filled(folder)


def require_unfinished(path: str | os.PathLike[str]) -> None:
    """Check that a run without a checkpoint may begin anew: one that has finished is complete, and would only be dropped.

    Raises:
        UserError: if it has finished.
    """
    folder = Path(path)
    if read_status(folder)["state"] == RunState.FINISHED:
        raise UserError(
            "the run in this folder has finished, and kept no checkpoint to go on from",
            where=str(folder),
            why="to begin it anew would drop its records",
            fix="use another run_dir",
        )


def _refuse_filled(folder: Path) -> None:
    left_by_a_kill = {LOCK_FILE, LOGS_FOLDER, aside_of(folder / SETTINGS_FILE).name}
    names = sorted(item.name for item in folder.iterdir() if item.name not in left_by_a_kill)
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise UserError(
            "the run folder is not empty",
            where=str(folder),
            why=f"it holds {shown}; a fresh start writes over nothing",
            fix=f"{_going_on(folder)}use another run_dir",
        )


def _going_on(folder: Path) -> str:
    """What ``--resume`` does in a folder, and what it drops; nothing where it is refused."""
    if not (folder / SETTINGS_FILE).is_file():
        return ""
    if any((folder / CHECKPOINTS_FOLDER).glob("step-*")):
        return "add --resume to go on with that run, or "
    if read_status(folder)["state"] == RunState.FINISHED:
        return ""
    lost = _records_of(folder)
    return f"add --resume to begin that run anew, as no checkpoint of it was saved (dropping its {lost}), or "


def _records_of(folder: Path) -> str:
    steps = max((record["step"] for record in read_metrics(folder)), default=0)
    return f"records of {steps:,} step{'s'[: steps != 1]}" if steps else "validation before training"


def _number(value: Any) -> float | int | None:
    return value if value is None or isinstance(value, int) else float(value)


class _Lines:
    """A growing file of records, opened at the first record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records. An error of the system, such as a full disk, has the file's name."""
        if self._file is None:
            _drop_unfinished(self._path)
            self._file = self._path.open("ab", buffering=0)
        # One unbuffered write a step: after it, the records outlive this process.
        data = memoryview(b"".join(encode(record) for record in records))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            error.filename = str(self._path)
            raise

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _drop_unfinished(path: Path) -> None:
    """Cut a half-written last line off, so that the next record begins on its own line."""
    if not path.exists() or ends_whole(path):
        return
    with path.open("rb+") as file:
        whole = 0
        for line in file:
            whole += len(line) if line.endswith(b"\n") else 0
        file.truncate(whole)
