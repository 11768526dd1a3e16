"""The sandbox as its user sees it: start it, run a program, hear how that ended.

Owns: the server's process, the streams of a run and their bounds. Refuses to know: tests, rewards. Always holds: output is read
as it comes and never more of it than its bound; closing the sandbox, or the death of this process, ends all it started.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import meshloom
from meshloom.rewards.sandbox.limits import Ending, Limits, Means

_START = (
    "import sys, json; sys.path.insert(0, sys.argv[2]); from meshloom.rewards.sandbox.server import serve; "
    "sys.path.pop(0); serve(int(sys.argv[1]), json.loads(sys.argv[3]))"
)
KEPT: set[int] = set()
"""Servers of this process: children that stay from one sample to the next."""
_START_DEADLINE_S = 60.0
_GRACE_S = 5.0
"""How much longer than its bound a run is waited for, before the server itself is held to be stuck."""
_LAST_CHARACTERS = 2000


class SandboxFault(Exception):
    """The sandbox, not the program, failed: nothing is known of the program."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run gave.

    Args:
        ending: how it ended.
        output: what it wrote, up to its bound.
        complaint: the last of what it wrote to standard error.
        answer: what it wrote as its result.
        overflow: whether it wrote more than its bound.
    """

    ending: Ending
    output: bytes
    complaint: str
    answer: bytes
    overflow: bool


@dataclass(eq=False)
class Run:
    """A run that is under way."""

    streams: dict[str, int]
    status: socket.socket
    limit_bytes: int
    until: float
    kept: dict[str, bytearray] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    overflow: bool = False
    told: bytearray = field(default_factory=bytearray)

    def stop(self) -> None:
        """End it; its supervisor does, as soon as the socket closes."""
        with suppress(OSError):
            self.status.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for descriptor in self.streams.values():
            os.close(descriptor)
        self.status.close()
        self.streams.clear()

    def read(self, name: str) -> None:
        """Take what a stream has; stop the run when it is too much."""
        chunk = os.read(self.streams[name], 2**16)
        if not chunk:
            os.close(self.streams.pop(name))
            return
        kept = self.kept.setdefault(name, bytearray())
        self.total[name] = self.total.get(name, 0) + len(chunk)
        kept += chunk
        if name == "stderr":
            del kept[:-_LAST_CHARACTERS]
        else:
            del kept[self.limit_bytes :]
        if self.total[name] > self.limit_bytes and not self.overflow:
            self.overflow = True
            self.stop()

    @property
    def has_ended(self) -> bool:
        """Whether its supervisor has told how it ended, or is gone."""
        return self.status.fileno() < 0 or self.told.endswith(b"\n")

    def outcome(self) -> Outcome:
        try:
            ending = Ending.from_bytes(bytes(self.told))
        except (ValueError, TypeError) as error:
            raise SandboxFault("the supervisor of a program ended before it told how that went") from error
        if ending.fault:
            raise SandboxFault(ending.fault)
        return Outcome(
            ending=ending,
            output=bytes(self.kept.get("stdout", b"")),
            complaint=self.kept.get("stderr", bytearray()).decode(errors="replace").strip(),
            answer=bytes(self.kept.get("result", b"")),
            overflow=self.overflow,
        )


class Sandbox:
    """A fork server, and the runs it is asked for. Close it, or use it as a context manager.

    Args:
        python: the interpreter that runs programs; none: this one.
        without: means not to use, see ``server.serve``.

    Raises:
        SandboxFault: if the server does not start.
    """

    def __init__(self, python: str | None = None, without: Collection[str] = ()) -> None:
        if sys.platform != "linux":
            raise SandboxFault(f"programs are run on Linux, not on {sys.platform}")
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(meshloom.__file__).parent.parent)
        self._process = subprocess.Popen(
            [
                python or sys.executable,
                "-s",
                "-P",
                "-c",
                _START,
                str(other.fileno()),
                root,
                json.dumps(sorted(without)),
            ],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **_ONE_THREAD},
        )
        other.close()
        KEPT.add(self._process.pid)
        self.means = self._hear_means()
        """What the server found it can use."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def _hear_means(self) -> Means:
        self._socket.settimeout(_START_DEADLINE_S)
        try:
            told = self._socket.recv(2**16)
        except TimeoutError:
            told = b""
        if told:
            self._socket.settimeout(_GRACE_S)
            return Means.from_bytes(told)
        self._process.kill()
        _, complaint = self._process.communicate()
        lines = complaint.decode(errors="replace").strip().splitlines()
        raise SandboxFault(f"the sandbox does not start: {lines[-1] if lines else 'it says nothing'}")

    def start(
        self,
        job: str,
        task: Mapping[str, Any],
        limits: Limits,
        *,
        output_bytes: int,
        stdin: bytes = b"",
        channel: int | None = None,
    ) -> Run:
        """Start a run.

        Args:
            job: one of ``inside.JOBS``.
            task: what the job reads.
            limits: bounds of the program.
            output_bytes: the most that each of its streams may bring.
            stdin: its standard input.
            channel: a descriptor it is given besides; closed here.

        Raises:
            SandboxFault: if the server has ended.
        """
        mine, theirs = socket.socketpair()
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "result")}
        files = [_file(json.dumps(task).encode()), _file(stdin), pipes["stdout"][1], pipes["stderr"][1]]
        files += [theirs.fileno(), pipes["result"][1], *([] if channel is None else [channel])]
        message = json.dumps({"job": job, "limits": limits.to_json()}).encode()
        try:
            socket.send_fds(self._socket, [message], files)
        except OSError as error:
            mine.close()
            for read, _ in pipes.values():
                os.close(read)
            raise SandboxFault(f"the server of the sandbox has ended: {error}") from error
        finally:
            theirs.close()
            for descriptor in (*files[:4], *files[5:]):
                os.close(descriptor)
        until = time.monotonic() + limits.wall_s + _GRACE_S
        return Run({name: read for name, (read, _) in pipes.items()}, mine, output_bytes, until)

    def finish(self, runs: Sequence[Run]) -> list[Outcome]:
        """Read all runs to their ends.

        Raises:
            SandboxFault: if one of them could not be run, or its supervisor is lost.
        """
        open_runs = list(runs)
        try:
            while open_runs:
                _read_some(open_runs)
                open_runs = [run for run in open_runs if run.streams or not run.has_ended]
            return [run.outcome() for run in runs]
        finally:
            for run in runs:
                run.close()

    def run(
        self, job: str, task: Mapping[str, Any], limits: Limits, *, output_bytes: int, stdin: bytes = b""
    ) -> Outcome:
        """Start one run and read it to its end; see ``start`` and ``finish``."""
        (outcome,) = self.finish([self.start(job, task, limits, output_bytes=output_bytes, stdin=stdin)])
        return outcome

    def close(self) -> None:
        """End the server and all it started. May be called twice."""
        self._socket.close()
        if self._process.returncode is None:
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
        KEPT.discard(self._process.pid)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Libraries that start a thread for each processor would use up what a program may start."""


def _file(data: bytes) -> int:
    """A file in memory that holds some bytes, to be read from its start."""
    descriptor = os.memfd_create("task")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_some(runs: list[Run]) -> None:
    """Wait for anything of any run and take it."""
    poll, owners = select.poll(), {}
    for run in runs:
        for name, descriptor in run.streams.items():
            poll.register(descriptor, select.POLLIN)
            owners[descriptor] = (run, name)
        if run.has_ended:
            continue
        poll.register(run.status, select.POLLIN)
        owners[run.status.fileno()] = (run, "status")
    left = max(0.0, min(run.until for run in runs) - time.monotonic())
    ready = poll.poll(left * 1000)
    if not ready:
        raise SandboxFault("the supervisor of a program does not answer")
    for descriptor, _ in ready:
        run, name = owners[descriptor]
        if name != "status":
            run.read(name)
        elif data := run.status.recv(2**16):
            run.told += data
        else:
            run.status.close()
