"""The process that watches one run of a program: starts it behind its walls, stops it at its bounds, tells how it ended.

Owns: the life of a run. Refuses to know: tests, verdicts. Always holds: when it has ended, so has every process the program
started; the program cannot signal it, read it, or write what it tells.

Where a run has namespaces of its own this is their first process: its end is the end of all in them, whatever they did.
Elsewhere it is the parent that orphans come to, and it kills until none is left.
"""

import fcntl
import gc
import os
import resource
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from meshloom.rewards.sandbox import confine, kernel
from meshloom.rewards.sandbox.limits import Ending, Limits, Means

_LOOK_S = 0.015
_DISK_LOOK_S = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SETUP_FAILED = 117
_ASIDE = 10
"""Descriptors from here on are no program's."""
_KILL_ATTEMPTS = 200


@dataclass(frozen=True, kw_only=True)
class Descriptors:
    """Open files of a run, as numbers in the server. ``status`` is a socket: the supervisor writes how the program ended, and
    stops the program when the other end closes."""

    task: int
    stdin: int
    stdout: int
    stderr: int
    status: int
    result: int
    channel: int | None


def run(files: Descriptors, limits: Limits, means: Means, program: Callable[[int], int]) -> None:
    """Run a program in a child of the server, and tell how it ended. Does not return.

    Args:
        files: what is open for it.
        limits: its bounds.
        means: the walls that are there.
        program: called in the innermost process with the task's descriptor; gives the exit code.
    """
    folder = ""
    try:
        kernel.die_with_parent()
        _ignore_signals()
        if means.namespaces:
            confine.enter_namespaces(kernel.NEW_PID | kernel.NEW_MOUNTS, confine.INNER_USER)
            _become_first_process()
            confine.own_folder(limits)
        else:
            kernel.adopt_orphans()
            folder = tempfile.mkdtemp(prefix=f"meshloom-code-{os.getppid()}-")
            if means.own_user is not None:
                os.chown(folder, means.own_user, means.own_user)
            os.chdir(folder)
        kernel.set_dumpable(False)
        child = _start(files, limits, means, program, folder or confine.FOLDER)
        ending = _Watch(limits, means, child, files.status, folder).until_it_ends()
    except OSError as error:
        ending = Ending(fault=f"the sandbox cannot be set up: {error}")
    if folder:
        confine.remove_folder(folder)
    with suppress(OSError):
        os.write(files.status, ending.to_bytes())
    os._exit(0)


def _ignore_signals() -> None:
    """Leave no handler that a program could set off: the first process of a namespace gets those it has handlers for."""
    for number in range(1, signal.NSIG):
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _become_first_process() -> None:
    """Go on as the first process of the new process namespace; the one before waits for it and ends."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(0)
    kernel.die_with_parent()
    if os.getppid() != 0:  # 0: the parent lives, outside of this namespace
        os._exit(0)


def _start(files: Descriptors, limits: Limits, means: Means, program: Callable[[int], int], folder: str) -> int:
    """Fork the program's process; what goes wrong before the program itself is an OSError here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            task, write = _shut_in(files, limits, means, write, folder)
        except (OSError, ValueError) as error:
            os.write(write, str(error).encode()[:1000])
            os._exit(_SETUP_FAILED)
        os.close(write)
        os._exit(program(task))
    os.close(write)
    trouble = os.read(read, 1000)
    os.close(read)
    if trouble:
        os.waitpid(child, 0)
        raise OSError(trouble.decode(errors="replace"))
    return child


def _shut_in(files: Descriptors, limits: Limits, means: Means, report: int, folder: str) -> tuple[int, int]:
    """Put up the last walls; where the task and the report are now."""
    os.setsid()
    kernel.set_dumpable(True)  # its own files in /proc are a program's to use
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory ends after all, it is not the run that dies
    wanted = {0: files.stdin, 1: files.stdout, 2: files.stderr, 3: files.result}
    wanted |= {4: files.channel} if files.channel is not None else {}
    aside = {number: fcntl.fcntl(source, fcntl.F_DUPFD, _ASIDE) for number, source in wanted.items()}
    task, report = (fcntl.fcntl(source, fcntl.F_DUPFD, _ASIDE) for source in (files.task, report))
    for number, source in aside.items():
        os.dup2(source, number)
    keep = {task, report, *wanted}
    for number in map(int, os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else range(256):
        if number not in keep:
            with suppress(OSError):
                os.close(number)
    for number in range(1, signal.NSIG):
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as an interpreter that was started on its own does
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(HOME=folder, TMPDIR=folder)
    confine.set_limits(limits, means)
    confine.give_up_rights(means, folder)
    gc.enable()
    return task, report


@dataclass
class _Seen:
    cpu_s: float = 0.0
    num_bytes: int = 0
    num_processes: int = 0


@dataclass
class _Watch:
    """Looks at a program until it has ended."""

    limits: Limits
    means: Means
    child: int
    status: int
    folder: str
    began: float = field(default_factory=time.monotonic)
    peak: _Seen = field(default_factory=_Seen)
    disk_seen: float = 0.0

    def until_it_ends(self) -> Ending:
        ended = os.pidfd_open(self.child)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self.status, select.POLLRDHUP)
        stopped = ""
        while not stopped:
            ready = dict(poll.poll(_LOOK_S * 1000))
            if ended in ready:
                stopped = "disk" if self.folder and self._fills_disk(0.0) else ""
                break
            stopped = "no longer wanted" if self.status in ready else self._beyond()
        wall_s = time.monotonic() - self.began
        self._kill_all(stopped)
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        self._finish()
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Ending(
            exit_code=None if stopped or code < 0 else code,
            signal=-code if code < 0 and not stopped else None,
            stopped=stopped,
            cpu_s=max(self.peak.cpu_s, own.ru_utime + own.ru_stime),
            wall_s=wall_s,
            peak_bytes=max(self.peak.num_bytes, own.ru_maxrss * 1024),
            peak_processes=self.peak.num_processes,
        )

    def _beyond(self) -> str:
        """The bound that has been passed, if any."""
        seen = _Seen()
        for cpu_s, num_bytes, threads in map(_usage, self._processes()):
            seen.cpu_s += cpu_s
            seen.num_bytes += num_bytes
            seen.num_processes += threads
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        seen.cpu_s += reaped.ru_utime + reaped.ru_stime
        self.peak = _Seen(
            max(seen.cpu_s, self.peak.cpu_s),
            max(seen.num_bytes, self.peak.num_bytes),
            max(seen.num_processes, self.peak.num_processes),
        )
        if not self.means.namespaces:
            self._reap()
        limits = self.limits
        if time.monotonic() - self.began > limits.wall_s:
            return "wall"
        if seen.cpu_s > limits.cpu_s:
            return "cpu"
        if seen.num_bytes > limits.memory_bytes:
            return "memory"
        if seen.num_processes > limits.processes + 1:
            return "processes"
        return "disk" if self.folder and self._fills_disk(_DISK_LOOK_S) else ""

    def _reap(self) -> None:
        """Wait for orphans that have ended; never for the program itself."""
        for pid in self._processes():
            if pid != self.child:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _fills_disk(self, pause_s: float) -> bool:
        if (now := time.monotonic()) < self.disk_seen + pause_s:
            return False
        self.disk_seen, total = now, 0
        for root, _, names in os.walk(self.folder):
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(root, name)).st_blocks * 512
        return total > self.limits.disk_bytes

    def _processes(self) -> list[int]:
        """All processes of the program that there are."""
        everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in everyone if pid != 1] if self.means.namespaces else _descendants(everyone)

    def _kill_all(self, stopped: str) -> None:
        with suppress(ProcessLookupError):
            if stopped:
                os.kill(self.child, signal.SIGKILL)
            if self.means.namespaces:
                os.kill(-1, signal.SIGKILL)

    def _finish(self) -> None:
        """Kill what the program left, where its namespace does not die with this process."""
        if self.means.namespaces:
            return
        if self.means.own_user is not None:
            killer = os.fork()
            if killer == 0:
                confine.become(self.means.own_user)
                os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(killer, 0)
        for _ in range(_KILL_ATTEMPTS):
            left = self._processes()
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not left:
                return
            time.sleep(0.002)


def _usage(pid: int) -> tuple[float, int, int]:
    """Processor seconds, bytes in memory and threads of a process; zeros if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0, 0, 0
    return sum(map(int, fields[11:15])) * _TICK_S, int(fields[21]) * _PAGE_BYTES, int(fields[17])


def _descendants(everyone: list[int]) -> list[int]:
    parents = dict(_parents(everyone))
    mine, found = os.getpid(), []
    for pid in parents:
        above: int | None = pid
        while above is not None and above != mine:
            above = parents.get(above)
        if above == mine and pid != mine:
            found.append(pid)
    return found


def _parents(everyone: list[int]) -> Iterator[tuple[int, int]]:
    for pid in everyone:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                yield pid, int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
