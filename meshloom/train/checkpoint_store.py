"""The folder of a run's checkpoints: writing, finding, checking and pruning them.

Owns: files and folders, and what a complete checkpoint is. Refuses to know: models, optimizers, what is in a file. Always
holds, after a kill at any moment: a folder called ``step-…`` has every file that was written into it, whole and on the disk;
the newest such folder is at least as new as the last save that was reported done; earlier ones are untouched. Pruning goes
by what is on the disk, and never takes the only complete checkpoint.

A checkpoint is written into ``.writing-step-…``, its files are brought to the disk, ``manifest.json`` with their sizes and
SHA-256 is written last, and the folder is renamed. Whoever writes holds a lock on the folder, so that a later process can
tell a dead writer's leftovers from a living one's work, in any container and whatever the process numbers are.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from meshloom.config.errors import RunFault, UserError, is_disk_full
from meshloom.observe.atomic import give_usual_modes
from meshloom.observe.lock import is_held
from meshloom.plan.amounts import format_bytes
from meshloom.plan.model_folder import refuse_pickles

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_ASIDE = re.compile(r"\.(?:writing|removing)-step-.+")
_SPARE_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and SHA-256 of a file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: the step it was saved after.
        score: how good the run was then, larger is better; none if it was not measured.
        files: every file but the manifest, by its path in the checkpoint.
    """

    step: int
    score: float | None
    files: dict[str, FileRecord]


class IncompleteCheckpoint(UserError):
    """A folder that is not a complete checkpoint."""


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        IncompleteCheckpoint: if there is none, or it cannot be read.
        UserError: if it was written in another format.
    """
    path = checkpoint / MANIFEST
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain["format"] != FORMAT:
            what = f"the checkpoint has format {plain['format']}, this version reads format {FORMAT}"
            raise UserError(what, where=str(checkpoint))
        files = {name: FileRecord(**record) for name, record in plain["files"].items()}
        return Manifest(step=int(plain["step"]), score=plain["score"], files=files)
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteCheckpoint(f"{checkpoint} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def verify(checkpoint: Path, *, contents: bool = True) -> Manifest:
    """Check a checkpoint against its manifest.

    Args:
        checkpoint: its folder.
        contents: read every file and compare its SHA-256; else sizes only.

    Returns:
        The manifest.

    Raises:
        IncompleteCheckpoint: that names the first file that is missing or differs.
        UserError: if the checkpoint holds a pickle, or has another format.
    """
    manifest = read_manifest(checkpoint)
    fix = f"remove {checkpoint}; an earlier checkpoint beside it is then used"
    for name, record in manifest.files.items():
        file = checkpoint / name
        if not file.is_file():
            raise IncompleteCheckpoint(f"the checkpoint lacks {name}", where=str(checkpoint), fix=fix)
        if (size := file.stat().st_size) != record.bytes:
            what = f"{name} has {size} bytes, {record.bytes} were written"
            raise IncompleteCheckpoint(what, where=str(checkpoint), fix=fix)
        if contents and _sha256(file) != record.sha256:
            raise IncompleteCheckpoint(f"{name} is not what was written: its SHA-256 differs", where=str(file), fix=fix)
    if contents:
        refuse_pickles(checkpoint, beside_safetensors=True)
    return manifest


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first; complete by their files' sizes.

    Raises:
        UserError: if one was written in another format.
    """
    return [entry for _, entry in _entries(folder) if _is_complete(entry)]


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder, or none."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def _entries(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Folders with the name of a checkpoint, complete or not, each with its step and revision, in that order.

    A step that is saved again gets the next revision (``step-000010-2``): no moment is without a checkpoint of it.
    """
    named = [(match, entry) for entry in _folders(folder) if (match := _NAME.fullmatch(entry.name))]
    return sorted(((int(match[1]), int(match[2] or 1)), entry) for match, entry in named)


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []


def _is_complete(checkpoint: Path) -> bool:
    try:
        verify(checkpoint, contents=False)
    except IncompleteCheckpoint:
        return False
    return True


def require_room(folder: Path, num_bytes: int, what: str, kind: type[UserError] = UserError) -> None:
    """Do nothing if the disk of a folder, which need not be there yet, has room.

    Args:
        folder: where it is to be written.
        num_bytes: what it needs; 0 if that is not known.
        what: is written, for the message.
        kind: of the error; a ``RunFault`` in a run that is on.

    Raises:
        UserError: or ``kind``, if there is too little room.
    """
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if num_bytes and free < num_bytes + _SPARE_BYTES:
        raise kind(
            f"there is no room for {what}: it needs {format_bytes(num_bytes)}",
            where=str(folder),
            why=f"{format_bytes(free)} are free on that disk, of which {format_bytes(_SPARE_BYTES)} are to be left",
            fix="free some, lower checkpoint.keep_last or checkpoint.keep_best, or use another run_dir",
        )


class CheckpointStore:
    """The checkpoints of one run. One process at a time writes into the folder.

    Opening it removes what dead processes left: half-written checkpoints, and those no longer kept. The first save makes the
    folder.

    Args:
        folder: where the checkpoints are.
        keep_last: newest checkpoints that are kept, at least one.
        keep_best: best checkpoints by score that are kept besides.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last {keep_last} must be at least 1, keep_best {keep_best} at least 0")
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._clean()
        # A process may have died between the end of a save and this.
        self._prune()

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        score: float | None = None,
        asynchronous: bool = False,
        estimated_bytes: int = 0,
    ) -> None:
        """Save a checkpoint; waits for the one before it.

        Args:
            step: the step that was just made. An earlier checkpoint of the same step is removed once this one is complete.
            write: writes the files into the folder it is given. When ``asynchronous``, it runs in another thread while training
                goes on, so what it writes must be a snapshot.
            score: how good the run is now, larger is better, for ``keep_best``.
            asynchronous: return at once; a failure is raised by the next ``save``, ``wait`` or ``close``.
            estimated_bytes: what ``write`` is going to write.

        Raises:
            RunFault: if the disk has too little room, before anything is written or when it is full.
            Exception: whatever ``write`` raised, now or in the save before; earlier checkpoints are untouched.
        """
        if score is not None and not math.isfinite(score):
            raise ValueError(f"score of step {step} is {score}")
        self.wait()
        require_room(self.folder, estimated_bytes, f"the checkpoint of step {step}", RunFault)
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            _sync(self.folder.parent)
        if asynchronous:
            self._pending = self._writer.submit(self._write, step, write, score)
        else:
            self._write(step, write, score)

    def wait(self) -> None:
        """Wait until the save in the background is done.

        Raises:
            Exception: what made it fail.
        """
        if (pending := self._pending) is not None:
            wait_for_all([pending])
            self._pending = None
            pending.result()

    def close(self) -> None:
        """Wait, and end the background thread.

        Raises:
            Exception: what made the last save fail.
        """
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or none."""
        return latest_checkpoint(self.folder)

    def _write(self, step: int, write: Callable[[Path], None], score: float | None) -> None:
        revisions = [revision for (other, revision), _ in _entries(self.folder) if other == step]
        name = f"step-{step:06d}-{max(revisions) + 1}" if revisions else f"step-{step:06d}"
        aside = self.folder / f".writing-{name}-{os.getpid()}"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        try:
            with _locked(aside):
                write(aside)
                give_usual_modes(aside)
                _finish(aside, step, score)
                aside.rename(self.folder / name)
                _sync(self.folder)
        except Exception as error:  # of whatever kind a library's is
            if is_disk_full(error):
                what = f"the disk is full: the checkpoint of step {step} could not be written"
                fix = "free some room and resume; earlier checkpoints are untouched"
                raise RunFault(what, where=str(self.folder), fix=fix) from error
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        if any(is_held(entry) for entry in self.folder.glob(".writing-*")):
            return
        self._remove_replaced()
        complete = complete_checkpoints(self.folder)
        scored = [
            (score, place) for place, path in enumerate(complete) if (score := read_manifest(path).score) is not None
        ]
        best = {complete[place] for _, place in sorted(scored, reverse=True)[: self.keep_best]}
        for path in complete[: -self.keep_last]:
            if path not in best:
                self._remove(path)

    def _remove_replaced(self) -> None:
        """Remove what a later, complete revision of the same step replaces."""
        newest: dict[int, int] = {}
        for (step, revision), path in _entries(self.folder):
            if _is_complete(path):
                newest[step] = revision
        for (step, revision), path in _entries(self.folder):
            if revision < newest.get(step, 0):
                self._remove(path)

    def _remove(self, checkpoint: Path) -> None:
        """Take the name away first, so that no half-removed folder ever has it."""
        aside = self.folder / f".removing-{checkpoint.name}-{os.getpid()}"
        checkpoint.rename(aside)
        _sync(self.folder)
        shutil.rmtree(aside)

    def _clean(self) -> None:
        """Remove what dead processes left."""
        for entry in _folders(self.folder):
            if _ASIDE.fullmatch(entry.name) and not is_held(entry):
                shutil.rmtree(entry)


def _finish(aside: Path, step: int, score: float | None) -> None:
    """Bring the files to the disk and write the manifest last."""
    files: dict[str, FileRecord] = {}
    entries = sorted(aside.rglob("*"))
    for entry in entries:
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise ValueError(f"a checkpoint holds files and folders only, {entry.name} is something else")
        if entry.is_file():
            files[entry.relative_to(aside).as_posix()] = FileRecord(bytes=entry.stat().st_size, sha256=_sha256(entry))
        _sync(entry)
    if MANIFEST in files:
        raise ValueError(f"{MANIFEST} is the store's own file")
    refuse_pickles(aside, beside_safetensors=True)
    plain = {
        "format": FORMAT,
        "step": step,
        "score": score,
        "files": {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in files.items()},
    }
    manifest = aside / MANIFEST
    manifest.write_text(json.dumps(plain, indent=1), encoding="utf-8")
    _sync(manifest)
    _sync(aside)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock that says a living process writes here; the system releases it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
