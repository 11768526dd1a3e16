"""Noticing that a worker has failed, finding the first cause, and ending everything.

Owns: what was noticed, the limits of patience, the closer look at who failed, the end of all workers. Refuses to know: what
calls mean. Always holds: one failure ends the run once: all workers are gone before any call is told; silence is only held
against a worker while this process itself was awake.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshloom.config.errors import RunFault, UserError
from meshloom.fabric.channel import ChannelClosed
from meshloom.fabric.faults import Cause, Evidence, Look, WorkerFault, first_cause
from meshloom.fabric.processes import is_stopped
from meshloom.fabric.site import Node, Peer, Site
from meshloom.fabric.stacks import waits_in

if TYPE_CHECKING:
    from meshloom.fabric.workers import Workers

_TICK_S = 0.1
_ASLEEP_S = 2.0
"""A tick that comes so late tells that this process was held; what others sent meanwhile is yet to be read."""
_LOOK_S = 6.0
_MOST_LOOKS = 16
_END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long what is borne.

    Args:
        lost_s: seconds without a heartbeat after which a node, or a worker whose process is held by a signal, is lost.
        silent_s: seconds without a heartbeat that a worker is given whose process runs: code in C may keep Python from
            sending any.
        start_s: seconds in which a worker must have started and made its host.
        collective_s: seconds that torch.distributed gives a collective operation; a call's own deadline comes first.
        grace_s: seconds between asking workers to end and killing them.
    """

    lost_s: float = 5.0
    silent_s: float = 120.0
    start_s: float = 600.0
    collective_s: float = 86400.0
    grace_s: float = 2.0


class Watch:
    """Watches the workers from a thread of its own.

    Args:
        workers: that are watched.
        site: with their attendants.
        roles: what each rank is for, for messages.
    """

    def __init__(self, workers: "Workers", site: Site, roles: Mapping[int, str]) -> None:
        self._workers, self._site, self._roles = workers, site, roles
        self._evidence: list[Evidence] = []
        self._changed = threading.Condition()
        self._closed = False
        self._fault: UserError | None = None
        self._over = threading.Event()
        self._ended: set[Peer] = set()
        self._looks: dict[int, Look] = {}
        self._also_end: list[Callable[[], None]] = []
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._since = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether anything has been noticed."""
        return bool(self._evidence) or self._fault is not None

    def on_failure(self, end: Callable[[], None]) -> None:
        """Have something else ended after a failure, once all workers are gone; from the watch's thread."""
        self._also_end.append(end)

    def start(self) -> None:
        """Begin to watch."""
        self._since = time.monotonic()
        self._thread.start()

    def raise_fault(self) -> None:
        """Raise the error that ended the workers; after a failure, wait until it is known."""
        if self._evidence and not self._closed:
            self._over.wait()
        if self._fault is not None:
            raise self._fault

    def notice(self, evidence: Evidence) -> None:
        """Note what may be a failure."""
        self._site.is_failing = True
        with self._changed:
            self._evidence.append(evidence)
            self._changed.notify_all()

    def node_lost(self, peer: Peer, text: str) -> None:
        """Note that an attendant is gone."""
        for node in self._site.nodes:
            if node.attendant is peer:
                self.notice(Evidence(Cause.NODE_LOST, node.seats[0].rank, text, time.monotonic()))

    def heard(self, peer: Peer, message: dict[str, Any]) -> None:
        """A message of an attendant came."""
        match message["kind"]:
            case "died":
                self.notice(Evidence(Cause.DIED, message["rank"], message["text"], time.monotonic()))
            case "beat":
                for node in self._site.nodes:
                    if node.attendant is peer:
                        node.stopped = frozenset(message["stopped"])
            case "seen":
                with self._changed:
                    self._looks[message["id"]] = Look(message["log"], tuple(message["tail"]), tuple(message["stack"]))
                    self._changed.notify_all()
            case "ended":
                with self._changed:
                    self._ended.add(peer)
                    self._changed.notify_all()

    def close(self) -> None:
        """Stop watching and end the workers that are left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._end_all()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a thread's end would be silent, and leave its callers waiting
            self._tell(RunFault("the workers are not watched any more", why=f"{type(error).__name__}: {error}"))
        finally:
            if self._fault is not None:
                for end in self._also_end:
                    end()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(_TICK_S)
                if self._closed and not self._evidence:
                    return
            now = time.monotonic()
            if now - last > _ASLEEP_S:
                self._forgive(now)
            last = now
            self._look_for_silence(now)
            self._look_for_deadlines(now)
            with self._changed:
                settled = [one for one in self._evidence if one.settles_at <= now]
            if settled:
                self._fail()
                return

    def _forgive(self, now: float) -> None:
        self._since = now

    def _silent_s(self, peer: Peer, now: float) -> float:
        return now - max(peer.heard_at, self._since)

    def _look_for_silence(self, now: float) -> None:
        patience = self._workers.patience
        if any(one.cause in (Cause.NODE_LOST, Cause.STOPPED, Cause.SILENT) for one in self._evidence):
            return
        for node in self._site.nodes:
            if self._silent_s(node.attendant, now) > patience.lost_s and not _only_slow(node):
                text = f"was lost with its node: nothing has come from there for {patience.lost_s:g} s"
                self.node_lost(node.attendant, text)
                continue
            for seat in node.seats:
                peer = self._workers.peers.get(seat.rank)
                if peer is not None:
                    self._judge(node, seat.rank, self._silent_s(peer, now), now)

    def _judge(self, node: Node, rank: int, silent_s: float, now: float) -> None:
        patience = self._workers.patience
        if silent_s > patience.lost_s and rank in node.stopped:
            text = f"does not answer: its process has been held by a signal (SIGSTOP) for {silent_s:.0f} s"
            self.notice(Evidence(Cause.STOPPED, rank, text, now))
        elif silent_s > patience.silent_s:
            self.notice(Evidence(Cause.SILENT, rank, f"has not answered for {silent_s:.0f} s", now))

    def _look_for_deadlines(self, now: float) -> None:
        if any(one.cause is Cause.LATE for one in self._evidence):
            return
        for call in self._workers.running():
            unfinished = call.unfinished
            if unfinished and call.began_at is not None and now > call.began_at + call.deadline_s:
                text = f"had not returned when the deadline of {call.deadline_s:g} s passed"
                self.notice(Evidence(Cause.LATE, unfinished[0], text, now))

    def _fail(self) -> None:
        """Find the first cause, end everything, tell everyone."""
        with self._changed:
            cause = first_cause(self._evidence)
        self._workers.stop_hearing()  # a closer look may wake who was held
        try:
            cause, looks = self._closer_look(cause)
            self._end_all()
            self._tell(cause.error or self._fault_of(cause, looks))
        finally:
            # Whatever goes wrong here, nobody may be left waiting.
            self._tell(WorkerFault(cause, self._workers.seats[cause.rank]))

    def _tell(self, fault: UserError) -> None:
        """End every call with an error, unless one has ended them."""
        if self._fault is None:
            self._fault = fault
            self._over.set()
            self._workers.fail(fault)

    def _closer_look(self, cause: Evidence) -> tuple[Evidence, dict[int, Look]]:
        """Logs and stacks of those that matter. Of ranks that are late, the cause is one that waits in no collective."""
        waits = cause.cause in (Cause.LATE, Cause.SILENT, Cause.STOPPED)
        ranks = [cause.rank]
        if cause.cause is Cause.LATE and (call := self._workers.call_of(cause.rank)[0]) is not None:
            ranks = list(call.unfinished)[:_MOST_LOOKS]
        looks = self._look_at(ranks, stack=waits)
        if cause.cause is Cause.LATE:
            own = [rank for rank in ranks if not waits_in(list(looks[rank].stack))]
            cause = Evidence(cause.cause, (own or ranks)[0], cause.text, cause.at)
        return cause, looks

    def _look_at(self, ranks: list[int], *, stack: bool) -> dict[int, Look]:
        asked: dict[int, int] = {}
        for rank in ranks:
            node = self._node_of(rank)
            number = next(self._numbers)
            try:
                node.attendant.send({"kind": "look", "id": number, "rank": rank, "stack": stack})
                asked[rank] = number
            except ChannelClosed:
                continue
        until = time.monotonic() + _LOOK_S

        def all_seen() -> bool:
            return all(number in self._looks or self._node_of(rank).attendant.lost for rank, number in asked.items())

        with self._changed:
            self._changed.wait_for(all_seen, timeout=until - time.monotonic())
            return {rank: self._looks.get(asked.get(rank, -1), Look()) for rank in ranks}

    def _node_of(self, rank: int) -> Node:
        return next(node for node in self._site.nodes if any(seat.rank == rank for seat in node.seats))

    def _end_all(self) -> None:
        """End the workers of every node that can be reached, and wait until they are gone."""
        grace_s = self._workers.patience.grace_s
        lost = {self._node_of(one.rank).attendant for one in self._evidence if one.cause is Cause.NODE_LOST}
        reached = []
        for node in self._site.nodes:
            if node.attendant in lost:
                self._site.abandon(node)
                for seat in node.seats:
                    if (peer := self._workers.peers.get(seat.rank)) is not None:
                        peer.channel.close()
                continue
            try:
                node.attendant.send({"kind": "stop", "grace_s": grace_s})
                reached.append(node.attendant)
            except ChannelClosed:
                continue
        with self._changed:
            self._changed.wait_for(
                lambda: all(peer in self._ended or peer.lost for peer in reached), timeout=grace_s + _END_S
            )
        for peer in self._workers.peers.values():
            peer.channel.close()  # on a node that cannot be reached, this ends the worker

    def _fault_of(self, cause: Evidence, looks: Mapping[int, Look]) -> WorkerFault:
        call, is_in_it = self._workers.call_of(cause.rank)
        others = []
        for rank, look in looks.items():
            if rank != cause.rank and look.stack:
                collective = waits_in(list(look.stack))
                others.append(f"rank {rank} " + (f"waits in {collective}" if collective else f"is in {look.stack[0]}"))
        node = self._node_of(cause.rank)
        return WorkerFault(
            cause,
            self._workers.seats[cause.rank],
            host=node.host,
            role=self._roles.get(cause.rank, ""),
            phase=call.phase if call is not None else "",
            verb=(call.verb or "start") if call is not None and is_in_it else "",
            look=looks.get(cause.rank),
            others=tuple(others),
        )


def _only_slow(node: Node) -> bool:
    """Whether an attendant that is not heard is known to run: this machine may have too much to do."""
    return node.is_here and not is_stopped(int(node.attendant.hello["pid"]))
