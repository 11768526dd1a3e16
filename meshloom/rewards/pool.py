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
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future

from meshloom.config.settings import RewardSettings
from meshloom.killable.pool import START_DEADLINE_S, Pool
from meshloom.rewards.function import choose_function
from meshloom.rewards.keeper import RewardKeeper, RewardWorker, Task, TaskQueue
from meshloom.rewards.outcome import Reward, RewardRequest


class RewardPool(Pool[RewardKeeper]):
    """Worker processes that score. It is ready when the first has loaded the function; the others follow.

    Once it is closed, samples without a reward end with ``CancelledError``.

    Args:
        settings: the function, its arguments, the number of workers and the deadline.
        data_sources: ``data_source`` of all rows, for the default function.
        start_deadline_s: seconds a worker may take to load the function.

    Raises:
        UserError: if there is no such function, or it cannot be loaded or called.
    """

    def __init__(
        self, settings: RewardSettings, data_sources: Iterable[str] = (), *, start_deadline_s: float = START_DEADLINE_S
    ) -> None:
        self.spec = choose_function(settings, data_sources)
        """The function in use."""
        super().__init__()
        num_workers = settings.workers or len(os.sched_getaffinity(0))
        self._queue = TaskQueue(num_workers)

        def started() -> RewardWorker:
            return RewardWorker(self.spec, self._guardian, lambda: self.is_closed)

        self.start(
            [
                RewardKeeper(
                    self._queue,
                    started,
                    deadline_s=settings.deadline_s,
                    start_deadline_s=start_deadline_s,
                    report=self.report,
                )
                for _ in range(num_workers)
            ]
        )

    @property
    def is_closed(self) -> bool:
        return self._queue.closed

    def refuse(self, fault: BaseException | None) -> None:
        """As ``Pool.refuse``; samples without a reward end with ``CancelledError``, or with what ended the pool."""
        ended = CancelledError() if fault is None else RuntimeError(f"a reward worker cannot be started: {fault}")
        self._queue.close(ended)

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
