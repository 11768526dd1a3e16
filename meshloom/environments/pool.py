"""Many episodes' environments side by side, in processes that can be killed.

Owns: worker processes of environments and tools, which episode is in which, deadlines, what a death costs. Refuses to know:
engines, templates, tokens. Always holds: each call gets exactly one answer or fault; a call that raises, hangs, dies or breaks
its process costs its own episode only: other episodes of that process are repeated in a fresh one, turn by turn, and go on if
every answer is what it was. Tools have no state, so nothing is repeated for them, and a late or deadly one is an answer.

All episodes of a process take turns in it; ``workers`` bounds how many calls run at one time.
"""

import json
import os
import pickle
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.config.errors import UserError
from meshloom.environments.protocol import Answer, Fault, FaultReason, Task, ToolCount, Turn
from meshloom.environments.tools import failed
from meshloom.environments.user_code import read_code
from meshloom.environments.worker import WorkerSetup
from meshloom.killable.pool import START_DEADLINE_S, Keeper, Pool
from meshloom.killable.process import Guardian, Worker, WorkerDied, WorkerLate

Reply = Answer | Fault


class EnvironmentWorker(Worker):
    """A process that environments or tools run in."""

    module = "environments.worker"
    called, setting, loading = "the environment", "environment", "while it is loaded"


def worker_setup(settings: EnvironmentSettings) -> WorkerSetup:
    """What workers load. Reads the user's files and runs nothing.

    Raises:
        UserError: if a file cannot be read.
    """
    named = {
        "environment.tools": settings.tools,
        "environment.gym": (settings.gym,),
        "environment.custom": (settings.custom,),
    }
    codes = tuple(read_code(place, setting) for setting, places in named.items() for place in places if place)
    return WorkerSetup(settings=settings, codes=codes)


def tool_schemas(settings: EnvironmentSettings, deadline_s: float = START_DEADLINE_S) -> list[dict[str, Any]]:
    """JSON schemas of the tools, made in a process of their own; empty for other environments.

    Args:
        settings: of the environment.
        deadline_s: seconds that the tools may take to be loaded, and as many again for the schemas.

    Raises:
        UserError: if a tool cannot be loaded or has no schema.
    """
    if not settings.tools:
        return []
    guardian = Guardian()
    worker = EnvironmentWorker(worker_setup(settings), guardian)
    try:
        worker.load(deadline_s)
        worker.send(pickle.dumps(("schemas", 0, None)), deadline_s)
        found = json.loads(worker.receive(time.monotonic() + deadline_s))
    except (WorkerDied, WorkerLate) as error:
        raise UserError("the process of the tools ends", where="environment.tools", why=str(error) or "late") from error
    finally:
        worker.kill()
        guardian.close()
    if isinstance(found, dict):
        raise UserError(found.pop("what"), **found)
    return found


@dataclass(eq=False)
class Episode:
    """An episode as the pool knows it.

    Args:
        number: of the episode, unique in the pool.
        keeper: whose process it is in; none for tools.
        process: number of the process in which its environment is; −1 before the first.
        told: calls so far and the lines that answered them, to be repeated should the process die.
    """

    number: int
    keeper: "_Keeper | None"
    process: int = -1
    told: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    episode: Episode
    verb: str
    argument: Any
    future: "Future[Reply]" = field(default_factory=Future)


class EnvironmentPool(Pool["_Keeper"]):
    """Worker processes of environments. Calls without an answer end with a fault when it is closed.

    Args:
        settings: what to run, the number of workers and the deadline of a call.

    Raises:
        UserError: if there is no such environment, or it cannot be loaded.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.is_tools = bool(settings.tools)
        self._setup = worker_setup(settings)
        super().__init__()
        self._numbers = count()
        self._closed = False
        self._lock = threading.Lock()
        shared: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        keepers = [
            _Keeper(self, shared if self.is_tools else queue.SimpleQueue())
            for _ in range(settings.workers or len(os.sched_getaffinity(0)))
        ]
        self.start(keepers)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def refuse(self, fault: BaseException | None) -> None:
        with self._lock:
            self._closed = True
        for keeper in self._keepers:
            keeper.queue.put(None)

    def open(self) -> Episode:
        """A new episode, in the process that has the fewest."""
        if self.is_tools:
            return Episode(next(self._numbers), None)
        with self._lock:
            keeper = min(self._keepers, key=lambda keeper: keeper.num_episodes)
            keeper.num_episodes += 1
        return Episode(next(self._numbers), keeper)

    def reset(self, episode: Episode, task: Task) -> "Future[Reply]":
        """Begin an episode."""
        return self._submit(episode, "reset", task)

    def step(self, episode: Episode, turn: Turn) -> "Future[Reply]":
        """Answer a turn."""
        return self._submit(episode, "step", turn)

    def use_tools(self, episode: Episode, text: str, calls_before: int) -> "Future[Reply]":
        """Carry out the calls of a turn."""
        return self._submit(episode, "tools", (text, calls_before))

    def end(self, episode: Episode) -> None:
        """The episode is over; its environment is closed when its process has time."""
        if episode.keeper is None:
            return
        with self._lock:
            episode.keeper.num_episodes -= 1
        with suppress(RuntimeError):  # who is closed has no environments
            self._submit(episode, "close", None)

    def _submit(self, episode: Episode, verb: str, argument: Any) -> "Future[Reply]":
        call = _Call(episode, verb, argument)
        with self._lock:  # a call that came after the keepers have gone would never be answered
            if self._closed:
                raise RuntimeError("the environments are closed") from self._fault
            (episode.keeper or self._keepers[0]).queue.put(call)
        return call.future

    def start_worker(self) -> EnvironmentWorker:
        """A process that will load everything."""
        return EnvironmentWorker(self._setup, self._guardian, lambda: self._closed)


class _Keeper(Keeper[EnvironmentWorker]):
    """Keeps one worker process: gives it calls, times them, has it killed and replaced.

    Args:
        pool: whose it is.
        calls: where they come from: its own, or the queue that all keepers share.
    """

    def __init__(self, pool: EnvironmentPool, calls: "queue.SimpleQueue[_Call | None]") -> None:
        super().__init__(pool.start_worker, pool.report, lambda: pool.is_closed, name="environment-keeper")
        self.queue, self.num_episodes = calls, 0
        self._is_tools, self._deadline_s = pool.is_tools, pool.settings.step_deadline_s

    def work(self) -> None:
        while (call := self.queue.get()) is not None:
            try:
                reply = self._carry_out(call)
            except BaseException as error:
                call.future.set_result(Fault(FaultReason.DIED, str(error)))
                raise
            call.future.set_result(reply)

    def leave(self) -> None:
        """Calls that nobody will carry out get a fault. What tells other keepers of the end stays for them."""
        ends = 0
        with suppress(queue.Empty):
            while True:
                call = self.queue.get_nowait()  # another keeper may take what was there a moment ago
                if call is None:
                    ends += 1
                else:
                    call.future.set_result(Fault(FaultReason.DIED, "the environments were closed"))
        for _ in range(ends):
            self.queue.put(None)

    def _carry_out(self, call: _Call) -> Reply:
        """A call's reply. A death where others may be to blame is tried again, with this episode alone in a fresh process."""
        if call.verb == "close" and (self._worker is None or call.episode.process != self.num_started):
            return Answer(done=True)  # its environment is gone already
        used = self._worker is not None and self._worker.answered > 0
        reply = self._attempt(call)
        if isinstance(reply, Fault) and reply.reason is FaultReason.DIED and used and call.verb != "close":
            reply = self._attempt(call)
        if isinstance(reply, Fault) and self._is_tools and reply.reason is not FaultReason.RAISED:
            return failed(reply.detail)
        return reply

    def _attempt(self, call: _Call) -> Reply:
        episode, worker = call.episode, self.ready_worker()
        if call.verb == "step" and episode.process != self.num_started:
            fault = self._repeat(worker, episode)
            if fault is not None:
                return fault
        message = pickle.dumps((call.verb, episode.number, call.argument))
        line = self._ask(worker, message)
        if isinstance(line, Fault):
            return line
        if call.verb in ("reset", "step"):
            episode.process = self.num_started
            episode.told.append((message, line))
        return _reply(line)

    def _repeat(self, worker: EnvironmentWorker, episode: Episode) -> Fault | None:
        """Bring an episode to where it was, in this process."""
        for message, line in episode.told:
            again = self._ask(worker, message)
            if isinstance(again, Fault):
                return again
            if again != line:
                self.drop_worker()
                return Fault(FaultReason.NOT_REPEATABLE, f"{line[:200]!r} became {again[:200]!r}")
        episode.process = self.num_started
        return None

    def _ask(self, worker: EnvironmentWorker, message: bytes) -> bytes | Fault:
        try:
            worker.send(message, self._deadline_s)
            line = worker.receive(time.monotonic() + self._deadline_s)
        except WorkerLate:
            self.drop_worker()
            return Fault(FaultReason.DEADLINE, f"no answer after {self._deadline_s:g} s; the process was killed")
        except WorkerDied as death:
            self.drop_worker()
            return Fault(FaultReason.DIED, str(death))
        worker.answered += 1
        return line


def _reply(line: bytes) -> Reply:
    """A worker's line. What does not follow the protocol was written by the environment itself."""
    try:
        found = json.loads(line)
        if "fault" in found:
            return Fault(FaultReason.RAISED, str(found["fault"]))
        return Answer(
            messages=tuple(found["messages"]),
            reward=None if found["reward"] is None else float(found["reward"]),
            done=bool(found["done"]),
            numbers={str(name): float(value) for name, value in found["numbers"].items()},
            tools=ToolCount(**found["tools"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Fault(FaultReason.RAISED, f"the environment wrote into the channel of its process: {error}")
