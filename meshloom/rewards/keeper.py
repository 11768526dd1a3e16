"""The thread that keeps one worker process: feeds it, times it, has it killed and replaced.

Owns: deadlines, and what a failure costs. Refuses to know: how processes are started or killed (``killable``). Always holds: a
call's time begins when the one before it in the same worker is answered; a call is charged with a failure only where no other
one can be to blame; calls that were not reached go back to the front of the queue.

A call is of one sample, or of all samples of a group where the function takes lists.
"""

import json
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any

from meshloom.killable.pool import START_DEADLINE_S, Keeper
from meshloom.killable.process import Guardian, Worker, WorkerDied, WorkerLate
from meshloom.rewards.function import FunctionSpec
from meshloom.rewards.outcome import InvalidReason, Reward

_MAX_BATCH = 64
_BATCH_S = 0.004
"""A batch holds about as much work as this: cheap calls share a message, slow ones go one by one."""
_IDLE_S = 0.5
"""How often what a worker prints is read while it is asked nothing."""
_MAX_LEFTOVERS = 16
"""A worker in which functions left more threads, processes and tasks than this is replaced."""


@dataclass(eq=False)
class Task:
    """A call on its way.

    Args:
        requests: of its samples, pickled.
        futures: where their rewards are delivered.
        whose: what stands in front of why it failed.
        alone: it failed where an earlier call may be to blame, and runs again as the first of a fresh worker.
    """

    requests: Sequence[bytes]
    futures: Sequence["Future[Reward]"]
    whose: str = ""
    alone: bool = False

    def deliver(self, rewards: Sequence[Reward]) -> None:
        for future, reward in zip(self.futures, rewards, strict=True):
            future.set_result(reward)

    def end(self, error: BaseException) -> None:
        for future in self.futures:
            future.set_exception(error)


class TaskQueue:
    """Calls that wait, shared by all keepers.

    Args:
        num_takers: keepers; none takes more than its share, so that the last calls are spread.
    """

    def __init__(self, num_takers: int) -> None:
        self._num_takers = num_takers
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, task: Task) -> bool:
        """Add a call at the end; false if the queue is closed."""
        with self._changed:
            if not self.closed:
                self._tasks.append(task)
                self._changed.notify()
            return not self.closed

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Return calls to the front. After the queue was closed they are cancelled."""
        with self._changed:
            self._tasks.extendleft(reversed(tasks))
            self._changed.notify_all()
            if self.closed:
                self._end_all(CancelledError())

    def take(self, most: int, wait_s: float | None = None) -> list[Task]:
        """Wait for calls and take up to ``most``; none if none came in this time, or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self.closed, wait_s)
            if self.closed or not self._tasks:
                return []
            taken = [self._tasks.popleft()]
            share = min(most, math.ceil((len(self._tasks) + 1) / self._num_takers))
            while not taken[0].alone and len(taken) < share and not self._tasks[0].alone:
                taken.append(self._tasks.popleft())
            return taken

    def close(self, error: BaseException) -> None:
        """Take and give no more; the calls that wait end with ``error``."""
        with self._changed:
            self.closed = True
            self._end_all(error)
            self._changed.notify_all()

    def _end_all(self, error: BaseException) -> None:
        while self._tasks:
            self._tasks.popleft().end(error)


class RewardWorker(Worker):
    """A process that reward functions run in."""

    module = "rewards.worker"
    called, setting, loading = "the reward function", "reward.function", "while it loads the function"

    def __init__(
        self,
        spec: FunctionSpec,
        guardian: Guardian,
        abandoned: Callable[[], bool] = lambda: False,
        hear: Callable[[Mapping[str, Any]], None] = lambda about: None,
    ) -> None:
        self.keeps_output = spec.path is not None  # our own functions say what there is to say in words of their own
        super().__init__(spec, guardian, abandoned)
        self._hear = hear

    def load(self, deadline_s: float) -> None:
        """As ``Worker.load``; ``hear`` is told how the function is called."""
        super().load(deadline_s)
        self._hear(self.about)


class RewardKeeper(Keeper[RewardWorker]):
    """Keeps one worker until the queue is closed.

    Args:
        queue: where calls come from.
        start: starts a worker process.
        deadline_s: seconds a call may take.
        start_deadline_s: seconds a worker may take to load the function.
        report: called once with nothing when the first worker is ready, or with the error that ended this keeper.
    """

    def __init__(
        self,
        queue: TaskQueue,
        start: Callable[[], RewardWorker],
        *,
        deadline_s: float,
        start_deadline_s: float = START_DEADLINE_S,
        report: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(start, report, lambda: queue.closed, name="reward-keeper", start_deadline_s=start_deadline_s)
        self._queue, self._deadline_s, self._cost_s = queue, deadline_s, _BATCH_S

    def work(self) -> None:
        while not self._queue.closed:
            most = max(1, min(_MAX_BATCH, int(_BATCH_S / self._cost_s)))
            reads = self._worker is not None and self._worker.keeps_output
            if tasks := self._queue.take(most, _IDLE_S if reads else None):
                self._serve(tasks)
            elif self._worker is not None:
                self._worker.read_output()

    def _serve(self, tasks: list[Task]) -> None:
        """Score a batch, or as much of it as the worker survives."""
        if tasks[0].alone and self._worker is not None and self._worker.answered:
            self.drop_worker()
        done, sent = 0, False
        try:
            worker = self.ready_worker()
            worker.send(pickle.dumps([task.requests for task in tasks]), self._deadline_s)
            sent = True
            for task in tasks:
                began = time.monotonic()
                rewards = [_answer(worker, began + self._deadline_s) for _ in task.requests]
                worker.answered += 1
                done += 1
                task.deliver(rewards)
                self._cost_s = 0.8 * self._cost_s + 0.2 * max(time.monotonic() - began, 1e-6)
        except WorkerLate:
            late = f"no result after {self._deadline_s:g} s; its process was killed"
            self._fail(tasks[done:], InvalidReason.DEADLINE, late, sent)
        except WorkerDied as death:
            self._fail(tasks[done:], InvalidReason.DIED, str(death), sent)
        except BaseException:
            self._queue.put_back(tasks[done:])
            raise
        else:
            if worker.leftovers > _MAX_LEFTOVERS:
                self.drop_worker()

    def _fail(self, tasks: list[Task], reason: InvalidReason, detail: str, sent: bool) -> None:
        """The worker failed at the first of ``tasks``: charge it, or try it again alone where others may be to blame."""
        worker = self._worker
        self.drop_worker()
        used = worker is not None and (worker.leftovers or reason is InvalidReason.DIED)
        if self._queue.closed or ((used or not sent) and not tasks[0].alone):
            tasks[0].alone = True
            self._queue.put_back(tasks)
        else:
            self._queue.put_back(tasks[1:])
            failed = Reward(value=None, reason=reason, detail=tasks[0].whose + detail)
            printed = worker.printed() if worker is not None else ""
            tasks[0].deliver([replace(failed, printed=printed), *[failed] * (len(tasks[0].requests) - 1)])
        self._cost_s = _BATCH_S


def _answer(worker: RewardWorker, until: float) -> Reward:
    """What the worker says of the next sample, by a time of the monotonic clock.

    Raises:
        WorkerLate, WorkerDied: if it says nothing.
    """
    reward, worker.leftovers = _read_answer(worker.receive(until))
    printed = worker.printed()
    return replace(reward, printed=printed) if printed else reward


def _read_answer(line: bytes) -> tuple[Reward, int]:
    """The worker's line. What does not follow the protocol was written by the function itself."""
    try:
        value, reason, detail, parts, leftovers = json.loads(line)
        reward = Reward(
            value=None if reason else float(value),
            reason=InvalidReason(reason) if reason else None,
            detail=str(detail),
            parts={str(name): float(part) for name, part in parts.items()},
        )
        if reward.value is not None and not math.isfinite(reward.value):
            raise ValueError("not finite")
        return reward, int(leftovers)
    except (ValueError, TypeError, AttributeError) as error:
        raise WorkerDied("the reward function wrote into the channel of its process") from error
