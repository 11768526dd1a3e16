"""The engine on many devices: its replicas behind the protocol of one engine.

Owns: which replica answers which request, the turns of a replica, completions as they stream back. Refuses to know: rewards,
texts, how a worker generates. Always holds: a request's samples are made by one replica; a replica generates for one caller
at a time, in the order of the calls, and never while weights are moved; what a sample is follows from its seed and prompt,
so it does not matter which replica makes it.

What a feed brings joins the generation that the replica is in, unless somebody else waits for that replica: then it is the
replica's next one. A replica that has nothing to do waits for more, and keeps what it has computed, as long as nobody else
wants it and there is nothing to take over; what was on its way to a generation that has ended begins another one.

A replica that has done its share of a call takes over what another one has not begun, as long as nobody else wants it: it asks
for the last half of those requests, and the other gives back, between two rounds of its steps, those that it has not begun.
"""

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from meshloom.fabric.workers import Workers
from meshloom.loop.jobs import End, Job, More, Replica
from meshloom.loop.shares import Share, most_tokens
from meshloom.rollout.feed import RequestFeed, with_largest
from meshloom.rollout.protocol import Completion, PromptCount, Request
from meshloom.rollout.requests import check_requests, kv_tokens

_ANSWER_S = 300.0
"""Seconds that a replica may take to answer, beyond a generation's deadline."""
_MORE_TO_DO, _MORE_TURNS = 2, 8
"""How much more to do than another a replica may have that has the beginning of a request: so many times as much, and so many
requests like it besides, which its passes take with them for little."""
_BACK_S, _LOOK_S = 10.0, 0.05
"""Seconds to wait for requests that were asked back, and between looks at who wants the replica that waits."""


_NOBODY: Mapping[int, Replica] = {}


class RemoteEngine:
    """Replicas of an engine, one engine to its caller.

    Args:
        workers: of the run.
        replicas: ranks of each.
        vocabulary: tokens of the model.
        move_weights: brings the trainer's weights, now of the given version, to all replicas.
        takes_turns: whether its devices train as well, so that it has to make room for that.
        slots: samples that a replica generates at once, if its cache has room; 0 if that is not known.
    """

    def __init__(
        self,
        workers: Workers,
        replicas: Sequence[Sequence[int]],
        *,
        vocabulary: int,
        move_weights: Callable[[int], None],
        takes_turns: bool,
        slots: int = 0,
    ) -> None:
        self.version = 0
        self.memory: dict[int, dict[str, float]] = {}
        """What each rank told of its memory when it last generated."""
        self._prompts = PromptCount()
        self._workers, self._vocabulary = workers, vocabulary
        self._move_weights, self._takes_turns, self._slots = move_weights, takes_turns, slots
        self._replicas = [Replica(tuple(ranks)) for ranks in replicas]
        self._spreading = threading.Lock()
        self._numbers = itertools.count()
        self._shares: set[Share] = set()
        # One whose iterator nobody ever began ends with it.
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._checked = 0

    def generate(
        self, requests: Sequence[Request], *, deadline_s: float, feed: RequestFeed | None = None
    ) -> Iterator[Completion]:
        """Yield each sample as it finishes on any replica. The deadline counts from when a replica begins.

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
        job = Job(deadline_s, feed)
        job.takes(requests)
        with self._spreading:
            self._jobs.add(job)
        return self._generate(job, requests)

    def abort(self, request_id: int) -> None:
        """End a request's unfinished samples, between two rounds of its replica's steps: they come with
        ``FinishReason.ABORTED``. One that is on its way to a replica ends when it is there."""
        begun: list[Share] = []
        with self._spreading:
            for job in [job for job in self._jobs if job.has(request_id)]:
                job.aborted.add(request_id)
                found = [share for share in job.shares if request_id in share.requests]
                for share in found:
                    share.aborted.add(request_id)
                begun += [share for share in found if share.number is not None]
        for share in begun:
            self._tell(share, [request_id], only_unbegun=False)

    def take_prompts(self) -> PromptCount:
        """Tokens of prompts of the generations that have ended since the last call."""
        with self._spreading:
            taken, self._prompts = self._prompts, PromptCount()
        return taken

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

    def _generate(self, job: Job, requests: Sequence[Request]) -> Iterator[Completion]:
        job.until = time.monotonic() + job.deadline_s
        running = self._give(job, requests)
        if job.feed is not None:
            job.feed.listen(lambda: job.told.put(More()))
        try:
            yield from self._told(job, running)
        finally:
            self._let_go(job)
            with self._spreading:
                self._jobs.discard(job)

    def _told(self, job: Job, running: int) -> Iterator[Completion]:
        """What replicas tell until all have ended and no more comes; ``running``: how many generate."""
        feed = job.feed
        while running or (feed is not None and not feed.is_exhausted):
            try:
                found = job.told.get(timeout=None if running else max(0.0, job.until - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(found, list):
                yield from found
            elif isinstance(found, More):
                with self._spreading:
                    later = feed.take()
                    job.takes(later)
                check_requests(later, vocabulary=self._vocabulary, can_decode=True)
                running += self._give(job, later, until=job.until)
                if feed.is_exhausted:
                    self._let_go(job)
            elif found.error is not None:
                raise found.error
            else:
                running -= 1

    def _give(self, job: Job, requests: Sequence[Request], until: float | None = None) -> int:
        """Give requests to replicas; how many begin, which were not at work."""
        begun = 0
        for replica, added in self.spread(requests, job.made_by):
            rank = replica.ranks[0]
            with self._spreading:
                share = None if replica.turns.waiting else job.running.get(rank)
                if share is None:
                    self._add(job, replica, added, until)
                else:
                    job.give(share, added)
                begins = rank not in job.at_work
                job.at_work.add(rank)
            if share is not None:
                self._bring(share, added)
            if begins:
                begun += 1
                run, name = partial(self._run, job, replica), f"generation on rank {rank}"
                threading.Thread(target=run, name=name, daemon=True).start()
        return begun

    def _bring(self, share: Share, requests: Sequence[Request]) -> None:
        """Have requests join what a replica generates; those that were aborted meanwhile are so once they are there."""
        self._workers.note("bring_requests", {"number": share.number, "requests": requests}, ranks=share.ranks)
        with self._spreading:
            aborted = sorted(share.aborted.intersection(request.id for request in requests))
        if aborted:
            self._tell(share, aborted, only_unbegun=False)

    def _add(self, job: Job, replica: Replica, requests: Sequence[Request], until: float | None) -> None:
        """Add to what a replica has yet to begin. Its work is counted already."""
        share = job.pending.get(replica.ranks[0])
        if share is None:
            share = job.pending[replica.ranks[0]] = self._new_share(job, replica, until)
        job.give(share, requests)

    def _new_share(self, job: Job, replica: Replica, until: float | None) -> Share:
        share = Share(replica.ranks, until)
        self._shares.add(share)
        job.shares.append(share)
        return share

    def spread(
        self, requests: Sequence[Request], made_by: Mapping[int, Replica] = _NOBODY
    ) -> list[tuple[Replica, list[Request]]]:
        """Each request to the replica that has least to do, by the most tokens that it may yet generate; the largest first.
        What goes on from a request goes to the replica that made it, unless that has far more to do. What is spread counts as
        work of its replica until that has told its end."""
        order = sorted(range(len(requests)), key=lambda i: (-most_tokens(requests[i]), i))
        shares: dict[int, list[int]] = {}
        with self._spreading:
            for i in order:
                number = self._choose(requests[i], made_by)
                self._replicas[number].waiting_tokens += most_tokens(requests[i])
                shares.setdefault(number, []).append(i)
        return [(self._replicas[n], [requests[i] for i in sorted(share)]) for n, share in sorted(shares.items())]

    def _choose(self, request: Request, made_by: Mapping[int, Replica]) -> int:
        """The number of a request's replica. To compute tokens takes far less than to generate as many."""
        number = min(range(len(self._replicas)), key=lambda n: (self._replicas[n].waiting_tokens, n))
        before = None if request.after is None else made_by.get(request.after)
        most = _MORE_TO_DO * self._replicas[number].waiting_tokens + _MORE_TURNS * most_tokens(request)
        return number if before is None or before.waiting_tokens > most else self._replicas.index(before)

    def _run(self, job: Job, replica: Replica) -> None:
        """Let a replica generate what it was given, as often as there is something, and then what others have not begun."""
        error: Exception | None = None
        while error is None and self._goes_on(job, replica):
            try:
                with replica.turns.turn():
                    with self._spreading:
                        share = job.pending.pop(replica.ranks[0])
                    self._run_share(job, replica, share)
                    while (more := self._take_over(job, replica)) is not None:
                        self._run_share(job, replica, more)
            except Exception as caught:  # told to the caller's thread, which raises it
                error = caught
        job.told.put(End(error))

    def _goes_on(self, job: Job, replica: Replica) -> bool:
        """Whether there is something to begin; who is told that there is not has stopped."""
        with self._spreading:
            goes_on = replica.ranks[0] in job.pending
            if not goes_on:
                job.at_work.discard(replica.ranks[0])
            return goes_on

    def _run_share(self, job: Job, replica: Replica, share: Share) -> None:
        """Let a replica generate, and hand on what it tells."""
        try:
            with self._spreading:
                share.number = next(self._numbers)
                share.until = share.until or time.monotonic() + job.deadline_s
                left_s = max(0.0, share.until - time.monotonic())
                aborted = sorted(share.aborted)
                requests, largest = list(share.requests.values()), None
                if job.feed is not None and not job.feed.is_exhausted and not replica.turns.waiting:
                    largest = job.feed.largest
                    job.running[replica.ranks[0]] = share
                    replica.turns.when_wanted = partial(self._let_go, job, replica)
            call = self._workers.submit(
                "generate",
                {"requests": requests, "deadline_s": left_s, "number": share.number, "largest": largest},
                ranks=replica.ranks,
                phase="generate",
                deadline_s=left_s + _ANSWER_S,
            )
            if aborted:
                self._tell(share, aborted, only_unbegun=False)
            for _, completions in call.events():
                job.told.put(self._sorted(job, replica, share, completions.each()))
            told = call.result()
            self.memory |= {rank: of_rank["memory"] for rank, of_rank in zip(replica.ranks, told, strict=True)}
            with self._spreading:
                self._prompts.add(*told[0]["prompts"])
        finally:
            with self._spreading:
                self._shares.discard(share)
                job.shares.remove(share)
                job.running.pop(replica.ranks[0], None)
                if late := share.left_over():
                    self._add(job, replica, late, share.until)
                replica.waiting_tokens -= share.tokens
            share.returned.put(None)

    def _sorted(self, job: Job, replica: Replica, share: Share, told: list[Completion]) -> list[Completion]:
        """What of a replica's completions is the caller's; requests that came back go to who waits for them, or begin anew."""
        with self._spreading:
            before = share.tokens
            kept, back = share.take(told)
            replica.waiting_tokens -= before - share.tokens
            job.made_by.update((each.request_id, replica) for each in kept)
            job.told_whole({each.request_id for each in kept} - share.requests.keys())
            if back and share.has_helper:
                share.returned.put(back)
            elif back:
                self._add(job, replica, back, share.until)
                replica.waiting_tokens += sum(map(most_tokens, back))
            is_idle = not share.requests and self._has_other_work(job, replica, share)
        if is_idle:
            self._let_go(job, replica)
        return kept

    def _has_other_work(self, job: Job, replica: Replica, share: Share) -> bool:
        """Whether a replica that has nothing left to do of its share could do something else of the call. What another one has
        room for has begun there: to give up for that what is kept between turns would gain nothing."""
        others = [other for other in job.shares if other is not share and other.num_samples > self._slots]
        return replica.ranks[0] in job.pending or any(other.spare() for other in others)

    def _let_go(self, job: Job, replica: Replica | None = None) -> None:
        """Have generations of a call that wait for more end once they have nothing to do: a replica's, or all."""
        with self._spreading:
            shares = [share for share in job.running.values() if replica is None or share.ranks == replica.ranks]
        for share in shares:
            self._workers.note("await_no_more", {"number": share.number}, ranks=share.ranks)

    def _take_over(self, job: Job, replica: Replica) -> Share | None:
        """What another replica has not begun of a call, for one that has its turn still; none if there is nothing."""
        with self._spreading:
            spare = {share: found for share in job.shares if not share.has_helper and (found := share.spare())}
            if not spare or self._is_wanted(job, replica):
                return None
            busiest = max(spare, key=lambda share: sum(map(most_tokens, spare[share])))
            asked = [request.id for request in spare[busiest][len(spare[busiest]) // 2 :]]
            busiest.asked_back.update(asked)
            busiest.has_helper = True
        self._tell(busiest, asked, only_unbegun=True)
        back = self._wait_for(job, busiest, replica)
        if not back:
            return None
        with self._spreading:
            found = self._new_share(job, replica, busiest.until)
            job.give(found, back)
            replica.waiting_tokens += found.tokens
        return found

    def _wait_for(self, job: Job, share: Share, replica: Replica) -> list[Request]:
        """What comes back of a share; nothing once it has ended, or somebody else wants the replica that waits."""
        until = time.monotonic() + _BACK_S
        back: list[Request] | None = []
        while not back and time.monotonic() < until and not self._is_wanted(job, replica):
            with suppress(queue.Empty):
                back = share.returned.get(timeout=_LOOK_S)
                if back is None:
                    break
        found = list(back or [])
        with self._spreading:
            share.has_helper = False
            while not share.returned.empty():
                found += share.returned.get() or []
        return found

    def _is_wanted(self, job: Job, replica: Replica) -> bool:
        """Whether there is something else for a replica that has its turn."""
        return bool(replica.turns.waiting) or replica.ranks[0] in job.pending

    def _tell(self, share: Share, request_ids: Sequence[int], *, only_unbegun: bool) -> None:
        """Say to a replica that requests are to end."""
        message = {"number": share.number, "request_ids": list(request_ids), "only_unbegun": only_unbegun}
        self._workers.note("end_requests", message, ranks=share.ranks)
