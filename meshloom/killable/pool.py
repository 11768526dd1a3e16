"""Processes that can be killed, side by side: the frame of a pool, and of the thread that keeps one of them.

Owns: the start of the first process, replacing those that end while they load, and the end of all. Refuses to know: what is
called, what a failure costs. Always holds: a pool that cannot start says why; nothing that waits for a pool waits for one that
has ended.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from meshloom.config.errors import UserError
from meshloom.killable.process import Guardian, Worker, WorkerDied

WorkerT = TypeVar("WorkerT", bound=Worker)
KeeperT = TypeVar("KeeperT", bound="Keeper[Any]")
START_DEADLINE_S = 120.0
"""Seconds that a process may take to load what it runs."""
_START_ATTEMPTS = 3


class Keeper(threading.Thread, ABC, Generic[WorkerT]):
    """Keeps one process: starts it, and replaces one that was killed.

    Args:
        start: starts a process.
        report: called once with nothing when the first process is ready, or with the error that ended this keeper.
        is_closed: whether the pool has ended.
        name: of the thread.
        start_deadline_s: seconds that a process may take to load.
    """

    def __init__(
        self,
        start: Callable[[], WorkerT],
        report: Callable[[BaseException | None], None],
        is_closed: Callable[[], bool],
        *,
        name: str,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._start_process, self._report, self._is_closed = start, report, is_closed
        self._start_deadline_s = start_deadline_s
        self._worker: WorkerT | None = None
        self.num_started = 0
        """Processes that were ready, so far."""

    @abstractmethod
    def work(self) -> None:
        """Give calls to the process until the pool ends."""

    def leave(self) -> None:
        """Called when the keeper ends, whatever ends it, and its process is gone."""

    def run(self) -> None:
        try:
            self.ready_worker()
            self._report(None)
            self.work()
        except BaseException as error:  # a thread's end would be silent, and leave its callers waiting
            self._report(error)
        finally:
            self.drop_worker()
            self.leave()

    def ready_worker(self) -> WorkerT:
        """The process at hand, or a fresh one.

        Raises:
            UserError: if what it runs cannot be loaded.
        """
        attempts = 0
        while self._worker is None:
            attempts += 1
            worker = self._worker = self._start_process()
            try:
                worker.load(self._start_deadline_s)
            except UserError:
                self.drop_worker()
                raise
            except WorkerDied as death:
                self.drop_worker()
                if attempts == _START_ATTEMPTS or self._is_closed():
                    raise _ended_early(worker, death) from death
            else:
                self.num_started += 1
        return self._worker

    def drop_worker(self) -> None:
        """Kill the process, if there is one."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


def try_loading(
    kind: type[Worker],
    spec: Any,
    deadline_s: float = START_DEADLINE_S,
    abandoned: Callable[[], bool] = lambda: False,
) -> Mapping[str, Any]:
    """Load in a process of its own what a pool's processes would load, and end it; what the process says of it.

    Args:
        kind: of process.
        spec: what it loads.
        deadline_s: seconds that this may take.
        abandoned: asked meanwhile; once true, this ends as if the process had.

    Raises:
        UserError: if it cannot be loaded, in the words of a pool.
    """
    guardian = Guardian()
    try:
        worker = kind(spec, guardian, abandoned)
        try:
            worker.load(deadline_s)
            return worker.about
        except WorkerDied as death:
            raise _ended_early(worker, death) from death
        finally:
            worker.kill()
    finally:
        guardian.close()


def _ended_early(worker: Worker, death: WorkerDied) -> UserError:
    printed = worker.printed()
    why = f"{death}; it printed: {printed}" if printed else str(death)
    return UserError(f"the process of {worker.called} ends {worker.loading}", where=worker.setting, why=why)


class Pool(ABC, Generic[KeeperT]):
    """Keepers and their processes. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._guardian = Guardian()
        self._started = threading.Event()
        self._fault: BaseException | None = None
        self._keepers: Sequence[KeeperT] = ()

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether no call is taken any more."""

    @abstractmethod
    def refuse(self, fault: BaseException | None) -> None:
        """Take no more calls, and let keepers end.

        Args:
            fault: that ended the pool; none where it is closed.
        """

    def start(self, keepers: Sequence[KeeperT]) -> None:
        """Start all processes; returns when the first is ready, the others follow.

        Raises:
            UserError: if what they run cannot be loaded.
        """
        self._keepers = keepers
        for keeper in keepers:
            keeper.start()
        try:
            self._started.wait()
            if self._fault is not None:
                raise self._fault
        except BaseException:
            self.close()
            raise

    def report(self, fault: BaseException | None) -> None:
        """A keeper has its first process, or has failed; a failure ends the pool."""
        if fault is not None and not self.is_closed:
            self._fault = fault
            self.refuse(fault)
        self._started.set()

    def close(self) -> None:
        """Kill the processes. May be called twice."""
        self.refuse(None)
        for keeper in self._keepers:
            keeper.join()
        self._guardian.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
