"""The workers of a run, as the controller sees them: calls, results, and the end of all when one fails.

Owns: which call each rank is in, and starting and closing the workers. Refuses to know: what verbs do, how processes are
started (``site``), how failures are noticed (``watch``). Always holds: calls reach every rank in one order; after a failure
every call ends with the same error, and no worker is left.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshloom.config.errors import UserError
from meshloom.fabric.calls import Call
from meshloom.fabric.channel import ChannelClosed
from meshloom.fabric.faults import Cause, Evidence, error_of
from meshloom.fabric.seats import Seat
from meshloom.fabric.site import Peer, Site
from meshloom.fabric.watch import Patience, Watch
from meshloom.fabric.wire import Blob, decode, encode

Arguments = Mapping[str, Any] | Sequence[Mapping[str, Any]]
_NOTHING: Mapping[str, Any] = {}
_LEAVE_S = 10.0


class Workers:
    """One worker a seat, each with a host object; a context manager.

    Args:
        host: import path of the host's class, ``module:Class``. A worker makes it with its seat and the settings, after
            torch.distributed is set up.
        settings: keyword arguments of the host, the same for all or one mapping a rank.
        site: that is open.
        logs: folder of the workers' log files.
        roles: what each rank is for, for messages.
        collectives: set up torch.distributed. Hosts that exchange nothing among themselves start faster without.
        patience: how long silence is borne.
    """

    def __init__(
        self,
        host: str,
        settings: Arguments = _NOTHING,
        *,
        site: Site,
        logs: Path,
        roles: Mapping[int, str] | None = None,
        collectives: bool = True,
        patience: Patience | None = None,
    ) -> None:
        self._host, self._settings, self._site, self._logs = host, settings, site, logs
        self.seats: tuple[Seat, ...] = site.seats
        self._collectives, self.patience = collectives, patience or Patience()
        self.peers: dict[int, Peer] = {}
        self._waiting: dict[int, deque[Call]] = {seat.rank: deque() for seat in self.seats}
        self._last: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._order = threading.Lock()
        self._closing = False
        self._deaf = False
        self._left: set[int] = set()
        self.watch = Watch(self, site, roles or {})

    def __enter__(self) -> Self:
        shared = ["torch", "torch.distributed"] if self._collectives else []
        self._site.launch(self, self._logs, [*shared, self._host.partition(":")[0]])
        self.watch.start()
        try:
            self._begin()
        except BaseException:
            self.close(at_once=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def _begin(self) -> None:
        """Let every worker make its host."""
        written = _written(self._settings, len(self.seats))
        call = self._new_call([seat.rank for seat in self.seats], "", "start", self.patience.start_s)
        while missing := [rank for rank in call.ranks if rank not in self.peers]:
            with self._lock:
                self._lock.wait(0.05)
            self.watch.raise_fault()
            if call.began_at is not None and time.monotonic() > call.began_at + call.deadline_s:
                self._notice(Cause.LATE, missing[0], f"did not start within {call.deadline_s:g} s")
                call.result()
        deadline_s = self.patience.collective_s if self._collectives else None
        reached_at = {peer.channel.own_host for peer in self.peers.values()} - {"127.0.0.1"}
        message = {"kind": "begin", "host": self._host, "collective_deadline_s": deadline_s}
        message["address"] = min(reached_at, default="")
        self._send(call, message, "settings", written)
        call.result()

    def call(
        self,
        verb: str,
        arguments: Arguments = _NOTHING,
        *,
        ranks: Sequence[int] | None = None,
        phase: str,
        deadline_s: float,
    ) -> list[Any]:
        """Call a verb and wait for its results.

        Args:
            verb: name of the method.
            arguments: keyword arguments, the same for all ranks or one mapping a rank.
            ranks: that are called; all where none are named.
            phase: of the step, for messages.
            deadline_s: seconds it may take, counted from when all its ranks have done what they were called for before.

        Returns:
            What the verb returned, in the order of ``ranks``.

        Raises:
            WorkerFault: if a worker failed or the deadline passed; everything was ended.
            UserError: that a verb raised; everything was ended.
        """
        return self.submit(verb, arguments, ranks=ranks, phase=phase, deadline_s=deadline_s).result()

    def submit(
        self,
        verb: str,
        arguments: Arguments = _NOTHING,
        *,
        ranks: Sequence[int] | None = None,
        phase: str,
        deadline_s: float,
    ) -> Call:
        """Begin a call, and return while it runs; arguments as for ``call``."""
        chosen = [seat.rank for seat in self.seats] if ranks is None else list(ranks)
        written = _written(arguments, len(chosen))
        with self._order:
            self._require_open()
            call = self._new_call(chosen, verb, phase, deadline_s)
            # What ends every call may have gone through them just before this one was among them.
            self._require_open()
            self._send(call, {"kind": "call", "verb": verb}, "arguments", written)
        return call

    def _require_open(self) -> None:
        self.watch.raise_fault()
        if self._closing:
            raise RuntimeError("the workers are closed")

    def note(self, note: str, arguments: Mapping[str, Any], *, ranks: Sequence[int]) -> None:
        """Tell ranks something that the verb they are in may want to know; nothing is answered.

        Args:
            note: name of the host's method.
            arguments: its keyword arguments.
            ranks: that are told.
        """
        header, blobs = encode(dict(arguments))
        try:
            for rank in ranks:
                self.peers[rank].send({"kind": "note", "note": note, "arguments": header}, blobs)
        except ChannelClosed:
            return  # the watch notices, and ends every call

    def _new_call(self, ranks: Sequence[int], verb: str, phase: str, deadline_s: float) -> Call:
        call = Call(next(self._numbers), tuple(ranks), verb, phase, deadline_s)
        if len(set(call.ranks)) != len(call.ranks) or not set(call.ranks) <= set(self._waiting):
            raise ValueError(f"ranks {list(call.ranks)} are not different ranks of 0 to {len(self.seats) - 1}")
        with self._lock:
            for rank in call.ranks:
                self._waiting[rank].append(call)
            self._note_begun(call)
        return call

    def _note_begun(self, call: Call) -> None:
        if call.began_at is None and all(self._waiting[rank][0] is call for rank in call.unfinished):
            call.began_at = time.monotonic()

    def _send(self, call: Call, message: dict[str, Any], name: str, written: Sequence[tuple[Any, list[Blob]]]) -> None:
        try:
            for rank, (header, blobs) in zip(call.ranks, written, strict=True):
                self.peers[rank].send({**message, "call": call.number, name: header}, blobs)
        except ChannelClosed:
            return  # the watch notices, and ends the call

    def running(self) -> list[Call]:
        """Calls that all their ranks are in."""
        with self._lock:
            calls = {id(call): call for queue in self._waiting.values() for call in list(queue)[:1]}
        return [call for call in calls.values() if call.began_at is not None]

    def call_of(self, rank: int) -> tuple[Call | None, bool]:
        """The call that a rank is in, or was in last, and whether it is in it."""
        with self._lock:
            queue = self._waiting[rank]
            return (queue[0], True) if queue else (self._last.get(rank), False)

    def heard(self, peer: Peer, message: dict[str, Any], blobs: list[bytearray]) -> None:
        """A message came, from a worker or an attendant."""
        kind = message["kind"]
        if peer.hello["role"] == "attendant":
            if kind == "died" and self._closing:
                with self._lock:
                    self._left.add(message["rank"])
                    self._lock.notify_all()
            else:
                self.watch.heard(peer, message)
            return
        rank = int(peer.hello["rank"])
        match kind:
            case "hello":
                with self._lock:
                    self.peers[rank] = peer
                    self._lock.notify_all()
            case "store":
                self._join(message)
            case "ready" | "event" | "result":
                self._take(rank, message, blobs)
            case "error":
                self._take_error(rank, message)

    def lost(self, peer: Peer, reason: str) -> None:
        """A connection ended."""
        if self._closing:
            return
        if peer.hello["role"] == "attendant":
            self.watch.node_lost(peer, "was lost with its node: the connection ended")
        else:
            self._notice(Cause.DISCONNECTED, int(peer.hello["rank"]), f"has lost its connection: {reason}")

    def _join(self, place: dict[str, Any]) -> None:
        for seat in self.seats[1:]:
            try:
                self.peers[seat.rank].send({"kind": "join", "host": place["host"], "port": place["port"]})
            except ChannelClosed:
                continue  # the watch notices

    def _take(self, rank: int, message: dict[str, Any], blobs: list[bytearray]) -> None:
        with self._lock:
            waiting = () if self._deaf else tuple(self._waiting[rank])
        call = next((one for one in waiting if one.number == message["call"]), None)
        if call is None:
            return
        try:
            value = decode(message["value"], blobs) if "value" in message else None
        except (ValueError, TypeError, KeyError, ImportError) as error:
            self._notice(Cause.RAISED, rank, f"sent what cannot be read: {error}")
            return
        if message["kind"] == "event":
            call.take_event(rank, value)
            return
        with self._lock:
            if self._deaf:
                return
            self._waiting[rank].remove(call)
            self._last[rank] = call
            call.take_result(rank, value)
            if self._waiting[rank]:
                self._note_begun(self._waiting[rank][0])

    def _take_error(self, rank: int, message: dict[str, Any]) -> None:
        cause = Cause.COLLECTIVE if message["collective"] else Cause.RAISED
        error = error_of(message["user_error"]) if message["user_error"] else None
        self._notice(cause, rank, f"raised {message['text']}", detail=message["traceback"], error=error)

    def _notice(self, cause: Cause, rank: int, text: str, *, detail: str = "", error: UserError | None = None) -> None:
        self.watch.notice(Evidence(cause, rank, text, time.monotonic(), detail, error))

    def ends_with(self, code: int) -> None:
        """Let the processes that a launcher has started exit with this code, if the run ends without an error."""
        self._site.exit_code = code

    def raise_fault(self) -> None:
        """Raise the error that ended the workers, if one has."""
        self.watch.raise_fault()

    def on_failure(self, end: Callable[[], None]) -> None:
        """Have something else ended when a worker has failed: what the controller may wait for beside calls."""
        self.watch.on_failure(end)

    def stop_hearing(self) -> None:
        """Take no more results: the workers have failed."""
        with self._lock:
            self._deaf = True

    def fail(self, error: BaseException) -> None:
        """End every call with an error."""
        with self._lock:
            calls = {id(call): call for queue in self._waiting.values() for call in queue}
        for call in calls.values():
            call.fail(error)

    def close(self, *, at_once: bool = False) -> None:
        """End all workers; a second call does nothing.

        Args:
            at_once: do not wait for them to leave by themselves.
        """
        if self._closing:
            return
        self._closing = True
        if not at_once and not self.watch.failed:
            self._let_leave()
        self.watch.close()
        self.fail(RuntimeError("the workers are closed"))

    def _let_leave(self) -> None:
        for peer in self.peers.values():
            try:
                peer.send({"kind": "end"})
            except ChannelClosed:
                continue
        until = time.monotonic() + _LEAVE_S
        with self._lock:
            while len(self._left) < len(self.peers) and time.monotonic() < until:
                self._lock.wait(0.1)


def _written(arguments: Arguments, count: int) -> list[tuple[Any, list[Blob]]]:
    """Arguments for so many ranks, ready to be sent; what is the same for all is written once."""
    if isinstance(arguments, Mapping):
        return [encode(dict(arguments))] * count
    if len(arguments) != count:
        raise ValueError(f"arguments for {len(arguments)} ranks, but {count} are called")
    return [encode(dict(one)) for one in arguments]
