"""The lock of a run folder: one process at a time.

Owns: ``run.lock``. Always holds: the system releases the lock when its process ends, however that happens; children that
were forked from it do not keep it.
"""

import fcntl
import os
import socket
import weakref
from pathlib import Path

from meshloom.config.errors import UserError

LOCK_FILE = "run.lock"

_open_locks: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


class FolderLock:
    """An exclusive lock on a folder, held from construction to ``release``.

    Raises:
        UserError: if another process holds it; names that process.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 4096, 0).decode("utf-8", "replace").strip()
            os.close(self._descriptor)
            raise UserError(
                f"the run folder is in use by {holder or 'another process'}",
                where=str(folder),
                fix="wait until it ends, stop it, or use another run_dir",
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _open_locks.add(self)

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the folder at this moment."""
    return is_held(folder / LOCK_FILE)


def is_held(path: Path) -> bool:
    """Whether a living process holds an exclusive lock on a file or folder; not if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _release_in_child() -> None:
    # Closing the child's copy leaves the parent's lock in place; keeping it would outlive the parent.
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
