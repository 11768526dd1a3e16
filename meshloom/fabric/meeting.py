"""How tasks that a launcher has started find their controller, and end as it ends.

Owns: the store that they meet at, and the controller's process on task 0. Refuses to know: which launcher it was. Always holds:
every task exits with the run's exit code, also if the run ends before it has begun; the run's secret is known to who can
reach the store, which is what torchrun asks for too.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshloom.config.environment import controller_environment
from meshloom.config.errors import UserError
from meshloom.fabric.attendant import LOST_CODE, Ticket, attend
from meshloom.fabric.launch import Launched
from meshloom.fabric.tasks import Task

if TYPE_CHECKING:
    from torch.distributed import Store

_PLACE, _OVER, _LEFT = "place", "over", "left"
_CONNECT_S = 300
_PART_S, _LEAVE_S = 5.0, 600.0
_OVER_S, _ASK_S = 10.0, 0.2


def attend_task(task: Task, command: Sequence[str]) -> int:
    """Mind the worker of a task until the run ends; on task 0, run the controller beside.

    Args:
        task: that this process is.
        command: that runs the controller.

    Returns:
        The run's exit code.

    Raises:
        UserError: if the store cannot be where it should.
    """
    if task.rank == 0:
        return _lead(task, command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _follow(task, _store(task))
    except RuntimeError as error:  # of the store: its host is gone
        print(f"task {task.rank} has lost the first task of the run: {error}", file=sys.stderr, flush=True)
        return LOST_CODE


def _lead(task: Task, command: Sequence[str]) -> int:
    controller = ControllerProcess(command, Launched(task.kind, 0, task.world_size, task.nodes))
    try:
        store = _store(task)
    except RuntimeError as error:
        controller.end()
        where = "{}:{}".format(*task.master)
        fix = "MASTER_PORT names another port, which all tasks must be given"
        raise UserError("tasks cannot meet", where=where, why=str(error).splitlines()[0], fix=fix) from error
    place = controller.place()
    if place is not None:
        store.set(_PLACE, json.dumps(place))
        attend(_ticket(task, "127.0.0.1", place), spare=[controller.pid])
    # Without a worker here it has nothing to do but to end the others.
    code = controller.wait(None if place is None else _LEAVE_S)
    with suppress(RuntimeError):  # the store is gone, as the machine is that held it
        store.set(_OVER, str(code))
        if place is None:
            store.set(_PLACE, "null")
        if not task.has_store:
            _part(store, task.world_size - 1)
    return code


def _follow(task: Task, store: "Store") -> int:
    place = json.loads(_get(store, _PLACE))
    code = None if place is None else attend(_ticket(task, task.master[0], place))
    if code is None:
        store.set_timeout(timedelta(seconds=_OVER_S))
    with suppress(RuntimeError):  # who does not answer once is not asked again: torch tells each failure at length
        if code is None:
            # The run may have ended before this task had a part in it.
            code = int(_get(store, _OVER, within_s=_OVER_S))
        store.add(_LEFT, 1)
    return LOST_CODE if code is None else code


def _ticket(task: Task, host: str, place: dict[str, Any]) -> Ticket:
    position = {"node_index": task.node_index, "local_rank": task.local_rank, "parent": os.getppid()}
    return Ticket(host, place["port"], place["secret"], node=task.name, **position)


def _store(task: Task) -> "Store":
    from torch.distributed import PrefixStore, TCPStore

    host, port = task.master
    leads = task.rank == 0 and not task.has_store
    timeout = timedelta(seconds=_CONNECT_S)
    store = TCPStore(host, port, None, leads, timeout=timeout, wait_for_workers=False)
    return PrefixStore(f"meshloom/{task.key}", store)


def _get(store: "Store", key: str, *, within_s: float = math.inf) -> str:
    """A value, once it is there.

    Raises:
        RuntimeError: if the store is gone, or the value has not come in time.
    """
    until = time.monotonic() + within_s
    # Asking again and again: a wait whose deadline passes writes a warning each time.
    while not store.check([key]):
        if time.monotonic() > until:
            raise RuntimeError(f"nobody has set {key}")
        time.sleep(_ASK_S)
    return store.get(key).decode()


def _part(store: "Store", others: int) -> None:
    """Give the others a moment to read the store, which ends with this process."""
    until = time.monotonic() + _PART_S
    while time.monotonic() < until and store.add(_LEFT, 0) < others:
        time.sleep(0.05)


class ControllerProcess:
    """The process that runs the loop, told that a launcher has started it.

    Signals that mean a stop are passed on to it. It is in a session of its own, so that a launcher that signals a whole group
    does not signal it twice.

    Args:
        command: that runs it.
        launched: what has been started for it; the descriptor is filled in.
    """

    def __init__(self, command: Sequence[str], launched: Launched) -> None:
        self._read, write = os.pipe()
        told = Launched(launched.kind, write, launched.num_attendants, launched.nodes)
        self._process = subprocess.Popen(
            list(command),
            env=controller_environment(told.text()),
            pass_fds=[write],
            start_new_session=True,
        )
        os.close(write)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signal(number)

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def place(self) -> dict[str, Any] | None:
        """Where it listens, and the run's secret; waits for it. None if it ends without having listened."""
        with os.fdopen(self._read) as pipe:
            line = pipe.readline()
        return json.loads(line) if line else None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill it."""
        self.signal(signal.SIGKILL)

    def wait(self, within_s: float | None = None) -> int:
        """Wait for its end; its exit code.

        Args:
            within_s: seconds after which it is killed.
        """
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            print(
                f"the controller of this run did not end within {within_s:g} s: it is killed",
                file=sys.stderr,
                flush=True,
            )
            self.end()
            code = self._process.wait()
        return code if code >= 0 else LOST_CODE


def end_with_parent() -> None:
    """In a controller: end some time after the process that started it has, in case nothing else made it end."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        time.sleep(30.0)
        os._exit(LOST_CODE)

    threading.Thread(target=watch, name="parent", daemon=True).start()
