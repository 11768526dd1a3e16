"""Scoring many samples side by side, in processes that can be killed.

Owns: the pool and its life. Refuses to know: what a reward means. Always holds: each request gets exactly one reward, a
value or invalid with a reason; a sample that raises, hangs, dies or breaks its process costs itself only; rewards are
collected in the order the caller chooses, so they do not depend on which worker was faster.

Each worker has a channel of its own instead of a queue they share: a process that is killed in the middle of anything
cannot hold a lock that another one needs. That, and a kill that a function cannot delay, is why this is not an executor
from a library.
"""

import os
import pickle
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType

from meshloom.config.settings import RewardSettings
from meshloom.rewards.function import choose_function
from meshloom.rewards.keeper import Keeper, Task, TaskQueue
from meshloom.rewards.outcome import Reward, RewardRequest
from meshloom.rewards.process import Guardian, Worker


class RewardPool:
    """Worker processes that score. Close it, or use it as a context manager.

    It is ready when the first worker has loaded the function; the others follow.

    Args:
        settings: the function, its arguments, the number of workers and the deadline.
        data_sources: ``data_source`` of all rows, for the default function.
        start_deadline_s: seconds a worker may take to load the function.

    Raises:
        UserError: if there is no such function, or it cannot be loaded or called.
    """

    def __init__(
        self, settings: RewardSettings, data_sources: Iterable[str] = (), *, start_deadline_s: float = 120.0
    ) -> None:
        self.spec = choose_function(settings, data_sources)
        """The function in use."""
        num_workers = settings.workers or len(os.sched_getaffinity(0))
        self._queue = TaskQueue(num_workers)
        self._guardian = Guardian()
        self._started = threading.Event()
        self._fault: BaseException | None = None
        self._keepers = [
            Keeper(
                self._queue,
                lambda: Worker(self.spec, self._guardian, lambda: self._queue.closed),
                deadline_s=settings.deadline_s,
                start_deadline_s=start_deadline_s,
                report=self._report,
            )
            for _ in range(num_workers)
        ]
        for keeper in self._keepers:
            keeper.start()
        try:
            self._started.wait()
            if self._fault is not None:
                raise self._fault
        except BaseException:
            self.close()
            raise

    def submit(self, request: RewardRequest) -> "Future[Reward]":
        """Queue a sample while others run; ``result()`` of what is returned waits for its reward.

        Raises:
            RuntimeError: if the pool is closed, or its workers cannot be started any more.
        """
        task = Task(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
        task.future.set_running_or_notify_cancel()
        if not self._queue.put(task):
            raise RuntimeError("the reward pool is closed") from self._fault
        return task.future

    def begin(self, scorings: Sequence[object]) -> None:
        """Samples begin when a worker is free, whatever group they are of."""

    def take_counts(self) -> dict[str, float]:
        """Nothing is counted here."""
        return {}

    def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score samples and wait for all of them; rewards come in the order of the requests."""
        futures = [self.submit(request) for request in requests]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Kill the workers; samples without a reward end with ``CancelledError``. May be called twice."""
        self._queue.close(CancelledError())
        for keeper in self._keepers:
            keeper.join()
        self._guardian.close()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _report(self, fault: BaseException | None) -> None:
        """A keeper has its first worker, or has failed; a failure ends the pool."""
        if fault is not None and not self._queue.closed:
            self._fault = fault
            self._queue.close(RuntimeError(f"a reward worker cannot be started: {fault}"))
        self._started.set()
