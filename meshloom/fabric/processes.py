"""What the operating system says of processes, and how they are ended.

Owns: a process's state, how it ended, its last words, ending it with everything it started. Refuses to know: what runs in it.
Always holds: asked to end, a process is given a moment, then killed; who asks waits until it is gone.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

TAIL_LINES = 12
"""Lines of a log that a failure quotes."""
_TAIL_BYTES = 2**14
_LOOK_S = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when the thread that started it ends; at once, if the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave_termination_to_others() -> None:
    """Let SIGTERM pass in this process, but not in what it forks or starts: who wants the run to end may tell every process of
    it, and the controller decides. SIGHUP ends it as before."""

    def hold() -> None:  # what is sent to a child at its birth must find it ready
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def end_as_usual() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children have it ignored
    # A handler that does nothing, unlike SIG_IGN, is not handed on to programs that are started.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=end_as_usual)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found and ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP, or by a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def ending_text(status: int) -> str:
    """How a process ended, from a return code: negative for a signal."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def interface_of(address: str) -> str:
    """The network interface that has an address; empty if none has, or if it is the loopback's."""
    if address.startswith("127.") or address == "::1":
        return ""
    found = (
        name
        for name, held in psutil.net_if_addrs().items()
        if any(one.address.partition("%")[0] == address for one in held)
    )
    return next(found, "")


def memory_kills() -> int:
    """Processes of this container that the system has killed for want of memory; 0 if it does not say."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def last_lines(file: Path, count: int = TAIL_LINES) -> list[str]:
    """The last lines of a text file that are not blank; none if there is no file."""
    try:
        with file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def end_groups(leaders: Iterable[int], *, grace_s: float) -> None:
    """End process groups and all descendants of their leaders: SIGTERM, to leaders SIGHUP too, which those obey that leave
    SIGTERM to others; after ``grace_s`` seconds SIGKILL.

    Args:
        leaders: processes that lead a group each; they may have ended already.
        grace_s: seconds that they are given to end by themselves.
    """
    leaders = list(leaders)
    found = [process for pid in leaders for process in _with_descendants(pid)]
    for pid in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGHUP)
            os.killpg(pid, signal.SIGCONT)  # what is stopped cannot end otherwise
    until = time.monotonic() + grace_s
    while time.monotonic() < until and any(map(_lives, found)):
        time.sleep(_LOOK_S)
    for pid in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=5.0)


def end_descendants(spare: Iterable[int] = ()) -> None:
    """Kill everything that descends from this process, but for some children and what descends from them."""
    children = [child for child in psutil.Process().children() if child.pid not in set(spare)]
    for process in [found for child in children for found in _with_descendants(child.pid)]:
        with suppress(psutil.Error):
            process.kill()


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
