"""The controller's end: where attendants and workers call in, and what they say.

Owns: the listening socket, the connections, who is on which node. Refuses to know: how attendants are started (``local``,
``torchrun``, ``slurm``, ``hostfile``), what workers do. Always holds: only who knows the run's secret is heard; when the site
closes, every attendant has been told the exit code and why.
"""

import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from meshloom.config.errors import RunFault, UserError
from meshloom.fabric.channel import Channel, ChannelClosed, listen, new_secret
from meshloom.fabric.seats import Seat
from meshloom.fabric.wire import Blob

_LOOK_S = 0.05
_END_S = 10.0


@dataclass(eq=False)
class Peer:
    """A process that has called in.

    Args:
        hello: how it introduced itself.
        channel: to it.
        heard_at: when it was last heard, on the monotonic clock.
        lost: whether the connection has ended.
    """

    hello: dict[str, Any]
    channel: Channel
    heard_at: float
    lost: bool = False

    def send(self, message: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send it a message.

        Raises:
            ChannelClosed: if it is gone.
        """
        self.channel.send(message, blobs)


@dataclass(eq=False)
class Node:
    """An attendant and the seats it minds."""

    name: str
    attendant: Peer
    seats: tuple[Seat, ...]
    stopped: frozenset[int] = field(default=frozenset())
    is_here: bool = False
    """On the controller's machine, started by it."""

    @property
    def host(self) -> str:
        """The machine's own name."""
        return str(self.attendant.hello["host"])


class Listener(Protocol):
    """Who is told what comes in; called from the thread of each connection."""

    def heard(self, peer: Peer, message: dict[str, Any], blobs: list[bytearray]) -> None:
        """A message came."""

    def lost(self, peer: Peer, reason: str) -> None:
        """The connection ended."""


class Site(ABC):
    """Attendants on all nodes of a run; a context manager that holds them.

    Args:
        host: address to listen on; all interfaces where it is empty.
        start_deadline_s: seconds in which all attendants must have called in.
    """

    def __init__(self, *, host: str = "", start_deadline_s: float = 300.0) -> None:
        self.nodes: tuple[Node, ...] = ()
        self.exit_code = 0
        """Of the attendants, where the run ends without an error."""
        self.is_failing = False
        """Something has been noticed that ends the run: who wants it to stop need not say so, nor keep it from telling why."""
        self._secret = new_secret()
        self._socket = listen(host)
        self._start_deadline_s = start_deadline_s
        self._attendants: list[Peer] = []
        self._greeted = threading.Condition()
        self._listener: Listener | None = None
        self._ended = False
        self._was_terminated = False
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    @property
    def seats(self) -> tuple[Seat, ...]:
        """All seats, by rank; known once the site is open."""
        return tuple(sorted((seat for node in self.nodes for seat in node.seats), key=lambda seat: seat.rank))

    @abstractmethod
    def _start(self) -> None:
        """Bring attendants to call in."""

    @abstractmethod
    def _seated(self, attendants: Sequence[Peer]) -> tuple[Node, ...] | None:
        """Nodes, once all attendants that are awaited have called in; none before.

        Raises:
            UserError: if they are not those that are awaited.
        """

    def _check(self) -> None:  # noqa: B027
        """Look whether attendants can still come.

        Raises:
            UserError: if one has ended.
        """

    def _missing(self, attendants: Sequence[Peer]) -> str:
        """Who has not called in, for a message."""
        return f"{len(attendants)} have"

    def _closed(self) -> None:  # noqa: B027
        """Clean up what ``_start`` began."""

    def __enter__(self) -> Self:
        try:
            self._start()
            self._await()
        except BaseException as error:
            self.finish(*ending_of(error))
            raise
        return self

    def _await(self) -> None:
        until = time.monotonic() + self._start_deadline_s
        while True:
            with self._greeted:
                self._greeted.wait(_LOOK_S)
                nodes = self._seated(self._attendants)
                missing = self._missing(self._attendants)
            if nodes is not None:
                self.nodes = nodes
                return
            self._check()
            if time.monotonic() > until:
                waited = f"not all nodes have called in within {self._start_deadline_s:g} s"
                raise RunFault(waited, why=missing, fix="start the run on every node, and let nodes reach this one")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code, text = ending_of(error)
        self.finish(self.exit_code if error is None else code, text)

    def launch(self, listener: Listener, logs: Path, modules: Sequence[str]) -> None:
        """Start the workers of all seats; what they and the attendants say goes to ``listener``.

        Args:
            listener: is told what comes in.
            logs: folder of the workers' log files.
            modules: that all workers import.
        """
        self._listener = listener
        one_node = len({node.seats[0].node_index for node in self.nodes}) == 1
        for node in self.nodes:
            local_size = sum(seat.node_index == node.seats[0].node_index for seat in self.seats)
            seats = [asdict(seat) for seat in node.seats]
            places = {"logs": str(logs.absolute()), "one_node": one_node, "local_size": local_size, "modules": modules}
            node.attendant.send({"kind": "launch", "seats": seats, **places})

    def abandon(self, node: Node) -> None:
        """Give up a node that does not answer. Should it live, its attendant and workers end as they lose the connection."""
        node.attendant.channel.close()

    def finish(self, code: int, text: str = "") -> None:
        """Let every attendant exit with a code, and print a text; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        for peer in self._attendants:
            with suppress(ChannelClosed):
                peer.send({"kind": "end", "code": code, "text": text})
        until = time.monotonic() + _END_S
        while time.monotonic() < until and not all(peer.lost for peer in self._attendants):
            time.sleep(_LOOK_S)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        for peer in self._attendants:
            peer.channel.close()
        self._closed()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), name="peer", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        """Hear one connection until it ends."""
        try:
            channel = Channel(link, self._secret, calls=False)
            hello, _ = channel.receive()
        except ChannelClosed:
            return
        peer = Peer(hello, channel, time.monotonic())
        if hello["role"] == "attendant":
            with self._greeted:
                self._attendants.append(peer)
                self._greeted.notify_all()
        elif self._listener is not None:
            self._listener.heard(peer, hello, [])
        reason = "what it sent was not understood"
        try:
            while True:
                message, blobs = channel.receive()
                peer.heard_at = time.monotonic()
                if message["kind"] == "terminated":
                    self._terminated()
                elif self._listener is not None:
                    self._listener.heard(peer, message, blobs)
        except ChannelClosed as error:
            reason = str(error)
        finally:
            peer.lost = True
            channel.close()
            if self._listener is not None and not self._ended:
                self._listener.lost(peer, reason)

    def _terminated(self) -> None:
        """A scheduler wants the run to end: once, however many of its processes it has told."""
        with self._greeted:
            first, self._was_terminated = not self._was_terminated, True
        if first and not self.is_failing and not self._ended:
            os.kill(os.getpid(), signal.SIGTERM)


def ending_of(error: BaseException | None) -> tuple[int, str]:
    """Exit code and message of a run that ends with an error, or without one."""
    if error is None:
        return 0, ""
    if isinstance(error, UserError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    return 1, f"the controller failed: {type(error).__name__}: {error}"
