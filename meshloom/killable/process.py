"""Starting, hearing and killing processes.

Owns: worker processes and the guardian that kills them should this process die. Refuses to know: what they run, queues. Always
holds: a killed worker takes its children with it; no worker outlives the controller, however that ends; what a worker prints
reaches no terminal, and is kept (``output``) or goes nowhere; a wait has a deadline.
"""

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from meshloom.config.errors import UserError
from meshloom.killable.output import Output
from meshloom.killable.serving import frame

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from meshloom.{module} import {function}; {function}(int(sys.argv[1]))"
)
_MARK = "MESHLOOM_REWARD_WORKER"
"""Environment variable that a worker and its descendants carry."""
_LOOK_S = 0.05
"""How often a wait looks whether the worker still lives."""
_MAX_LINE_BYTES = 2**20
_END_S = 3.0
"""Seconds that the guardian is given to end by itself."""


class WorkerLate(Exception):
    """Nothing came from the worker in time."""


class WorkerDied(Exception):
    """The worker's process ended, or no longer speaks the protocol."""


def _start(
    module: str, function: str, descriptor: int, mark: str, output: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """A fresh interpreter in a session of its own: Ctrl-C in the terminal does not reach it; it prints into ``output``.

    It is given this process's import path, and does not import its main program, so it starts the same from a script, a
    test or a notebook. All its descendants inherit the mark.
    """
    path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
    python = [sys.executable, "-c", _START.format(module=module, function=function), str(descriptor), path]
    return subprocess.Popen(
        ["env", f"{_MARK}={mark}", *python],
        pass_fds=[descriptor],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def kill_tree(pid: int, mark: str) -> None:
    """Kill a process that leads a group, the group, and all its descendants. It must not have been waited for yet.

    Args:
        pid: the process.
        mark: found in the environment of its descendants: those it left in sessions of their own before it ended by itself
            can be told by nothing else.
    """
    try:
        root = psutil.Process(pid)
        root.suspend()
        ended = root.status() == psutil.STATUS_ZOMBIE
        descendants = _marked(mark) if ended else root.children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = _marked(mark)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in descendants:
        with suppress(psutil.Error):
            process.kill()


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found


class Guardian:
    """A small process that kills the workers as soon as this one has died, be it by SIGKILL.

    It holds the reading end of a pipe whose other end dies with the controller. Should it be killed itself, the next worker
    to start or end brings it back.
    """

    def __init__(self) -> None:
        self._marks: dict[int, str] = {}
        self._lock = threading.Lock()
        self._launch()

    def _launch(self) -> None:
        read, self._pipe = os.pipe()
        self._process = _start("killable.guardian", "guard", read, "guardian")
        os.close(read)

    def watch(self, pid: int, mark: str) -> None:
        with self._lock:
            self._marks[pid] = mark
            self._tell(f"+ {pid} {mark}\n")

    def forget(self, pid: int) -> None:
        with self._lock:
            del self._marks[pid]
            self._tell(f"- {pid}\n")

    def _tell(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            os.close(self._pipe)
            self._process.wait()
            self._launch()
            os.write(self._pipe, "".join(f"+ {pid} {mark}\n" for pid, mark in self._marks.items()).encode())

    def close(self) -> None:
        """Let it end. The workers it still watches are killed. May be called twice."""
        with self._lock:
            if self._process.returncode is None:
                self._tell("end\n")
                os.close(self._pipe)
                try:
                    self._process.wait(_END_S)
                except subprocess.TimeoutExpired:  # it is held, and cannot follow
                    self._process.kill()
                    self._process.wait()


class Worker:
    """One process, from its start to its death.

    Args:
        spec: what it loads.
        guardian: who kills it when this process dies.
        abandoned: asked during waits; once true, they end as if the worker had died.
    """

    module: str
    """Whose ``serve`` runs in the process."""
    called: str
    setting: str
    loading: str
    """What it runs, the setting that names it, and since when an end is too early, for errors."""
    keeps_output = False
    """Whether what it prints is kept."""

    def __init__(self, spec: Any, guardian: Guardian, abandoned: Callable[[], bool] = lambda: False) -> None:
        self._socket, other = socket.socketpair()
        self._mark = uuid.uuid4().hex
        self._polled = select.poll()
        self._polled.register(self._socket, select.POLLIN)
        self._process = self._started(other.fileno())
        other.close()
        self._guardian, self._abandoned = guardian, abandoned
        guardian.watch(self._process.pid, self._mark)
        self._spec, self._buffer = spec, bytearray()
        self.about: Mapping[str, Any] = {}
        """What it says of what it has loaded."""
        self.answered = 0
        """Requests it has answered."""
        self.leftovers = 0
        """Threads, processes and tasks that earlier requests left in it."""

    def _started(self, descriptor: int) -> subprocess.Popen[bytes]:
        self._output: Output | None = None
        if not self.keeps_output:
            return _start(self.module, "serve", descriptor, self._mark)
        read, write = os.pipe()
        self._output = Output(read)
        self._polled.register(read, select.POLLIN)
        try:
            return _start(self.module, "serve", descriptor, self._mark, output=write)
        finally:
            os.close(write)

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, deadline_s: float) -> None:
        """Load what it runs.

        Raises:
            UserError: if it cannot be loaded, or not in time.
            WorkerDied: if the process ended.
        """
        try:
            self.send(pickle.dumps(self._spec), deadline_s)
            answer = self._read_answer(self.receive(time.monotonic() + deadline_s))
        except WorkerLate:
            raise UserError(
                f"{self.called} was not loaded within {deadline_s:g} s",
                where=f"{self.setting}: {self._spec}",
                fix="let the file import quickly; move slow work into the function, behind a cache",
            ) from None
        if "error" in answer:
            raise UserError(**answer["error"])
        self.about = answer["about"]

    def _read_answer(self, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
            if len(answer.keys() & {"error", "about"}) == 1:
                return answer
        except (ValueError, AttributeError):
            pass
        raise WorkerDied(f"{self.called} wrote into the channel of its process")

    def read_output(self) -> None:
        """Read what it prints while nothing is asked of it: what calls left running, such as a server, must not stand still."""
        if self._output:
            self._output.drain()

    def printed(self) -> str:
        """What the first call printed that was not asked for yet; empty where nothing is kept. Of a process that was killed,
        what it had printed by then."""
        return self._output.take() if self._output else ""

    def send(self, message: bytes, deadline_s: float) -> None:
        """Hand over a message.

        Raises:
            WorkerLate: if the worker does not take it in time.
            WorkerDied: if it has ended.
        """
        left, until = memoryview(frame(message)), time.monotonic() + deadline_s
        while left:
            self._socket.settimeout(_LOOK_S)
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:  # its process may be held
                if self._abandoned():
                    raise WorkerDied("no longer needed") from None
                if time.monotonic() > until:
                    raise WorkerLate from None
            except OSError as error:
                raise WorkerDied(self._how_it_ended() or str(error)) from None

    def receive(self, until: float) -> bytes:
        """The next line, waiting for it until a time of the monotonic clock.

        Raises:
            WorkerLate: if none came in time.
            WorkerDied: if the process ended before it sent one.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise WorkerDied(f"{self.called} wrote into the channel of its process")
            self._receive_more(until)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _receive_more(self, until: float) -> None:
        left = max(0.0, until - time.monotonic())
        try:
            chunk = self._chunk(min(left, _LOOK_S))
        except OSError as error:
            raise WorkerDied(self._how_it_ended(wait_s=1) or str(error)) from None
        if chunk is None:
            ended = self._how_it_ended()
            if ended and not self._has_more():
                raise WorkerDied(ended) from None
            if self._abandoned():
                raise WorkerDied("no longer needed") from None
            if not left and not ended:
                raise WorkerLate from None
            return
        if not chunk:
            raise WorkerDied(self._how_it_ended(wait_s=1) or f"{self.called} closed the channel of its process")
        self._buffer += chunk

    def _chunk(self, wait_s: float) -> bytes | None:
        """What the process sent, or nothing if it sent nothing in this time; what it prints meanwhile is read too, so that it
        never waits for a reader."""
        ready = {descriptor for descriptor, _ in self._polled.poll(1000 * wait_s)}
        if self._output and self._output.descriptor in ready and not self._output.drain():
            self._polled.unregister(self._output.descriptor)
        return self._socket.recv(2**16) if self._socket.fileno() in ready else None

    def _has_more(self) -> bool:
        """Whether anything, if only the end, can be read at once."""
        with suppress(OSError):
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return True
        return False

    def _how_it_ended(self, wait_s: float = 0) -> str:
        """Exit status or signal of the process, without waiting for it as its parent; empty while it lives."""
        until = time.monotonic() + wait_s
        while (state := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() >= until:
                return ""
            time.sleep(0.005)
        if state.si_code == os.CLD_EXITED:
            return f"the process ended with status {state.si_status}"
        return f"the process was killed by {signal.Signals(state.si_status).name}"

    def kill(self) -> None:
        """End the process and its children, and wait until it is gone."""
        kill_tree(self._process.pid, self._mark)
        self._process.wait()
        self._guardian.forget(self._process.pid)
        self._socket.close()
        if self._output:
            self._output.close()
