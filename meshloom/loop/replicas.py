"""The engine on many devices: its replicas behind the protocol of one engine.

Owns: which replica answers which request, the turns of a replica, completions as they stream back. Refuses to know: rewards,
texts, how a worker generates. Always holds: a request's samples are made by one replica; a replica generates for one caller
at a time, in the order of the calls, and never while weights are moved; what a sample is follows from its seed and prompt,
so it does not matter which replica makes it.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshloom.fabric.workers import Workers
from meshloom.rollout.feed import RequestFeed, with_largest
from meshloom.rollout.protocol import Completion, Request
from meshloom.rollout.requests import check_requests, kv_tokens

_ANSWER_S = 300.0
"""Seconds that a replica may take to answer, beyond a generation's deadline."""


class Turns:
    """Who may use a replica: one at a time, in the order of asking; who moves weights goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = False

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return len(self._waiting)

    @contextmanager
    def turn(self, *, first: bool = False) -> Iterator[None]:
        """Wait for a turn, and have it inside."""
        ticket = object()
        with self._changed:
            self._waiting.appendleft(ticket) if first else self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: not self._taken and self._waiting[0] is ticket)
                self._taken = True
            finally:
                self._waiting.remove(ticket)
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()


@dataclass
class Replica:
    """One replica of the engine.

    Args:
        ranks: of its devices; the first one tells what it generated.
        waiting_tokens: most tokens that were asked of it and are not finished.
    """

    ranks: tuple[int, ...]
    turns: Turns = field(default_factory=Turns)
    waiting_tokens: int = 0


@dataclass(frozen=True)
class _End:
    """A replica has told everything; or what went wrong with it."""

    error: Exception | None = None


@dataclass(frozen=True)
class _More:
    """More requests have come, or no more will."""


class _Share:
    """What a replica has yet to generate for one caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._at_work = False

    def add(self, requests: Sequence[Request]) -> bool:
        """Add to it; whether somebody must begin with it."""
        with self._lock:
            self._requests += requests
            begins, self._at_work = not self._at_work, True
            return begins

    def goes_on(self) -> bool:
        """Whether there is something left; who is told that there is not has stopped."""
        with self._lock:
            self._at_work = bool(self._requests)
            return self._at_work

    def take(self) -> list[Request]:
        """All of it."""
        with self._lock:
            taken, self._requests = self._requests, []
            return taken


_Told = queue.SimpleQueue["list[Completion] | _End | _More"]


class RemoteEngine:
    """Replicas of an engine, one engine to its caller.

    Args:
        workers: of the run.
        replicas: ranks of each.
        vocabulary: tokens of the model.
        move_weights: brings the trainer's weights, now of the given version, to all replicas.
        takes_turns: whether its devices train as well, so that it has to make room for that.
    """

    def __init__(
        self,
        workers: Workers,
        replicas: Sequence[Sequence[int]],
        *,
        vocabulary: int,
        move_weights: Callable[[int], None],
        takes_turns: bool,
    ) -> None:
        self.version = 0
        self.memory: dict[int, dict[str, float]] = {}
        """What each rank told of its memory when it last generated."""
        self._workers, self._vocabulary = workers, vocabulary
        self._move_weights, self._takes_turns = move_weights, takes_turns
        self._replicas = [Replica(tuple(ranks)) for ranks in replicas]
        self._spreading = threading.Lock()
        self._checked = 0

    def generate(
        self, requests: Sequence[Request], *, deadline_s: float, feed: RequestFeed | None = None
    ) -> Iterator[Completion]:
        """Yield each sample as it finishes on any replica. The deadline counts from when a replica begins.

        A replica that generates hears nothing until it is done: what a feed brings meanwhile is its next call.

        Raises:
            UserError: if a request can never fit a replica's cache.
            ValueError: if a request is malformed.
            WorkerFault: if a worker fails.
        """
        check_requests(requests, vocabulary=self._vocabulary, can_decode=True)
        longest = max(with_largest(requests, feed), key=kv_tokens, default=None)
        if longest is not None and kv_tokens(longest) > self._checked:
            self._on_all("check_request", {"request": longest})
            self._checked = kv_tokens(longest)
        return self._generate(requests, deadline_s, feed)

    def abort(self, request_id: int) -> None:
        """Not offered: a replica that generates hears nothing until it is done."""
        raise NotImplementedError(f"request {request_id} cannot be aborted on another device")

    def load_weights(self, version: int) -> None:
        """Move the trainer's weights to every replica, once none of them generates."""
        with ExitStack() as turns:
            for replica in self._replicas:
                turns.enter_context(replica.turns.turn(first=True))
            self._move_weights(version)
        self.version = version

    def sleep(self) -> None:
        """Make room for training, where it is on the same devices."""
        if self._takes_turns:
            self._on_all("sleep", {})

    def wake(self) -> None:
        """Take the room back."""
        if self._takes_turns:
            self._on_all("wake", {})

    def _on_all(self, verb: str, arguments: dict[str, Any]) -> None:
        ranks = [rank for replica in self._replicas for rank in replica.ranks]
        self._workers.call(verb, arguments, ranks=ranks, phase="generate", deadline_s=_ANSWER_S)

    def _generate(
        self, requests: Sequence[Request], deadline_s: float, feed: RequestFeed | None
    ) -> Iterator[Completion]:
        told: _Told = queue.SimpleQueue()
        shares: dict[int, _Share] = {}
        until = time.monotonic() + deadline_s
        running = self._give(requests, shares, deadline_s, told)
        if feed is not None:
            feed.listen(lambda: told.put(_More()))
        while running or (feed is not None and not feed.is_exhausted):
            try:
                found = told.get(timeout=None if running else max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(found, list):
                yield from found
            elif isinstance(found, _More):
                later = feed.take()
                check_requests(later, vocabulary=self._vocabulary, can_decode=True)
                running += self._give(later, shares, max(0.0, until - time.monotonic()), told)
            elif found.error is not None:
                raise found.error
            else:
                running -= 1

    def _give(self, requests: Sequence[Request], shares: "dict[int, _Share]", deadline_s: float, told: "_Told") -> int:
        """Add requests to the shares of replicas; how many begin with theirs, which were not at work."""
        begun = 0
        for replica, added in self.spread(requests):
            share = shares.setdefault(replica.ranks[0], _Share())
            if share.add(added):
                begun += 1
                run = partial(self._run, replica, share, deadline_s, told)
                name = f"generation on rank {replica.ranks[0]}"
                threading.Thread(target=run, name=name, daemon=True).start()
        return begun

    def spread(self, requests: Sequence[Request]) -> list[tuple[Replica, list[Request]]]:
        """Each request to the replica that has least to do, by the most tokens that it may yet generate; the largest first.
        What is spread counts as work of its replica until that has told its end."""
        order = sorted(range(len(requests)), key=lambda i: (-_tokens(requests[i]), i))
        shares: dict[int, list[int]] = {}
        with self._spreading:
            for i in order:
                number = min(range(len(self._replicas)), key=lambda n: (self._replicas[n].waiting_tokens, n))
                self._replicas[number].waiting_tokens += _tokens(requests[i])
                shares.setdefault(number, []).append(i)
        return [(self._replicas[n], [requests[i] for i in sorted(share)]) for n, share in sorted(shares.items())]

    def _run(self, replica: Replica, share: "_Share", deadline_s: float, told: "_Told") -> None:
        """Let a replica generate what its share has, as often as there is something, and hand on what it tells."""
        error: Exception | None = None
        until = time.monotonic() + deadline_s
        first = True
        while error is None and share.goes_on():
            requests: list[Request] = []
            try:
                with replica.turns.turn():
                    requests = share.take()
                    left_s = deadline_s if first else max(0.0, until - time.monotonic())
                    self._call(replica, requests, left_s, told)
            except Exception as caught:  # told to the caller's thread, which raises it
                error = caught
            first = False
            with self._spreading:
                replica.waiting_tokens -= sum(map(_tokens, requests))
        told.put(_End(error))

    def _call(
        self,
        replica: Replica,
        requests: list[Request],
        deadline_s: float,
        told: "_Told",
    ) -> None:
        call = self._workers.submit(
            "generate",
            {"requests": requests, "deadline_s": deadline_s},
            ranks=replica.ranks,
            phase="generate",
            deadline_s=deadline_s + _ANSWER_S,
        )
        for _, completions in call.events():
            told.put(completions.each())
        self.memory |= dict(zip(replica.ranks, call.result(), strict=True))


def _tokens(request: Request) -> int:
    """Most tokens that a request may take: its prompt once, and every sample to its end."""
    return len(request.prompt_ids) + len(request.seeds) * request.params.max_tokens
