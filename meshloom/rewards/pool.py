"""Scoring many samples side by side, in processes that can be killed.

Owns: the pool and its life, and which samples a function that takes lists is called with. Refuses to know: what a reward means.
Always holds: each request gets exactly one reward, a value or invalid with a reason; a call that raises, hangs, dies or breaks
its process costs its own samples only; rewards are collected in the order the caller chooses, so they do not depend on which
worker was faster; the lists of a call are a group that ``begin`` named, in its order.

Each worker has a channel of its own instead of a queue they share: a process that is killed in the middle of anything
cannot hold a lock that another one needs. That, and a kill that a function cannot delay, is why this is not an executor
from a library.
"""

import os
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from meshloom.config.settings import RewardSettings
from meshloom.killable.pool import START_DEADLINE_S, Pool
from meshloom.rewards.function import choose_function
from meshloom.rewards.keeper import RewardKeeper, RewardWorker, Task, TaskQueue
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest
from meshloom.rewards.returned import called_with


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

        self._about: Mapping[str, Any] = {}
        self._members: dict[_Member, bytes] = {}
        """Samples that wait for the others of their group, with their requests."""
        self._lock = threading.Lock()

        def started() -> RewardWorker:
            return RewardWorker(self.spec, self._guardian, lambda: self.is_closed, self._hear)

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

    def _hear(self, about: Mapping[str, Any]) -> None:
        self._about = about

    @property
    def takes_groups(self) -> bool:
        """Whether the function is called with the lists of a group."""
        return bool(self._about["takes_groups"])

    @property
    def columns(self) -> Sequence[str]:
        """Columns of the rows that the function cannot be called without."""
        return list(self._about["columns"])

    @property
    def is_closed(self) -> bool:
        return self._queue.closed

    def refuse(self, fault: BaseException | None) -> None:
        """As ``Pool.refuse``; samples without a reward end with ``CancelledError``, or with what ended the pool."""
        ended = CancelledError() if fault is None else RuntimeError(f"a reward worker cannot be started: {fault}")
        self._queue.close(ended)
        for member in self._taken(self._members):
            member.set_exception(ended)

    def submit(self, request: RewardRequest) -> "Future[Reward]":
        """Queue a sample while others run; ``result()`` of what is returned waits for its reward.

        Where the function takes lists a sample begins with its group; one whose reward is wanted before that is ``unfinished``.

        Raises:
            RuntimeError: if the pool is closed, or its workers cannot be started any more.
        """
        pickled = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        if not self.takes_groups:
            done: Future[Reward] = Future()
            self._put(Task([pickled], [done]))
            return done
        member = _Member(self)
        with self._lock:
            self._check_open()
            self._members[member] = pickled
        return member

    def begin(self, scorings: Sequence[Any]) -> None:
        """A group is whole: where the function takes lists it is called with those of its samples that wait, in this order.
        Others begin when a worker is free, whatever group they are of."""
        with self._lock:
            group = [(one, self._members.pop(one)) for one in scorings if one in self._members]
        if group:
            members, requests = zip(*group, strict=True)
            self._put(Task(requests, members, whose=called_with(self.spec.name, len(group))))

    def forsake(self, member: "_Member") -> None:
        """A reward is wanted before its group is whole, as the group never will be."""
        for one in self._taken([member]):
            one.set_result(Reward(value=None, reason=InvalidReason.UNFINISHED, detail="its group was never whole"))

    def _taken(self, members: Iterable["_Member"]) -> list["_Member"]:
        """Those of some samples that still waited, and wait no more."""
        with self._lock:
            return [member for member in list(members) if self._members.pop(member, None) is not None]

    def _put(self, task: Task) -> None:
        for future in task.futures:
            future.set_running_or_notify_cancel()
        if not self._queue.put(task):
            task.end(CancelledError())
            self._check_open()

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the reward pool is closed") from self._fault

    def take_counts(self) -> dict[str, float]:
        """Nothing is counted here."""
        return {}

    def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score samples, of one group where the function takes lists, and wait for all of them; rewards come in the order of
        the requests."""
        futures = [self.submit(request) for request in requests]
        self.begin(futures)
        return [future.result() for future in futures]


class _Member(Future[Reward]):
    """A sample whose function takes lists.

    Args:
        pool: where it waits for the others of its group.
    """

    def __init__(self, pool: RewardPool) -> None:
        super().__init__()
        self._pool = pool

    def result(self, timeout: float | None = None) -> Reward:
        self._pool.forsake(self)
        return super().result(timeout)
