"""Messages over a socket, between processes that know the run's secret.

Owns: opening, proving and framing a connection. Refuses to know: what messages mean. Always holds: nothing of a message is
looked at before both ends have proved that they know the secret; a message arrives whole or not at all; sending from several
threads never mixes two messages.

A message is a JSON object, and the bytes of its tensors behind it: sizes first, then the JSON text, then each blob.
"""

import hmac
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from meshloom.fabric.wire import Blob

_SIZES = struct.Struct(">II")
_BLOB = struct.Struct(">Q")
_NONCE_BYTES = 32
_PROOF_DEADLINE_S = 20.0
_MAX_TEXT_BYTES = 2**31
_MAX_BLOBS = 2**20
_CHUNK_BYTES = 2**26
_TCP_INFO = struct.Struct("8x13I")
"""The beginning of <linux/tcp.h>'s tcp_info."""
_UNACKED, _LAST_ACK_RECEIVED_MS = 4, 12
_MOST_PIECES = 512
"""Pieces handed to the system at once; it takes 1,024."""


class ChannelClosed(Exception):
    """The other end is gone, or does not know the secret."""


def new_secret() -> bytes:
    """A secret for one run."""
    return os.urandom(32)


def listen(host: str = "") -> socket.socket:
    """A listening socket on a free port; on all interfaces unless a host is named."""
    return socket.create_server((host, 0), backlog=1024)


def connect(host: str, port: int, secret: bytes, *, deadline_s: float = 30.0) -> "Channel":
    """A proved connection.

    Raises:
        ChannelClosed: if nobody listens there, or the other end does not know the secret.
    """
    try:
        link = socket.create_connection((host, port), timeout=deadline_s)
    except OSError as error:
        raise ChannelClosed(f"no connection to {host}:{port}: {error}") from error
    return Channel(link, secret, calls=True)


class Channel:
    """One end of a connection.

    Args:
        link: a connected socket; it is closed if the other end proves nothing.
        secret: of the run.
        calls: whether this end asked for the connection.

    Raises:
        ChannelClosed: if the other end does not know the secret.
    """

    def __init__(self, link: socket.socket, secret: bytes, *, calls: bool) -> None:
        self._link = link
        self._lock = threading.Lock()
        self.peer_host = str(link.getpeername()[0])
        self.own_host = str(link.getsockname()[0])
        try:
            link.settimeout(_PROOF_DEADLINE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._prove(secret, calls)
            link.settimeout(None)
        except OSError as error:
            link.close()
            raise ChannelClosed(str(error)) from error
        except ChannelClosed:
            link.close()
            raise

    def _prove(self, secret: bytes, calls: bool) -> None:
        """Each end sends a number used once, and answers the other's with what only the secret gives."""
        own = os.urandom(_NONCE_BYTES)
        self._link.sendall(own)
        other = bytes(self._read(bytearray(_NONCE_BYTES)))
        caller, called = (own, other) if calls else (other, own)

        def proof(role: bytes) -> bytes:
            return hmac.digest(secret, role + caller + called, "sha256")

        # The caller proves first: who listens tells a stranger nothing.
        if calls:
            self._link.sendall(proof(b"caller"))
        answer = bytes(self._read(bytearray(32)))
        if not hmac.compare_digest(answer, proof(b"called" if calls else b"caller")):
            raise ChannelClosed("the other end does not know the secret of this run")
        if not calls:
            self._link.sendall(proof(b"called"))

    def send(self, message: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send a message; blobs are sent from where they are.

        Raises:
            ChannelClosed: if the other end is gone.
        """
        text = json.dumps(message).encode()
        sizes = b"".join(_BLOB.pack(len(blob)) for blob in blobs)
        pieces = [memoryview(_SIZES.pack(len(text), len(blobs)) + sizes + text), *map(memoryview, blobs)]
        with self._lock:
            try:
                self._send_all([piece for piece in pieces if len(piece)])
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def _send_all(self, pieces: list[memoryview]) -> None:
        first = 0
        while first < len(pieces):
            sent = self._link.sendmsg(pieces[first : first + _MOST_PIECES])
            while first < len(pieces) and sent >= len(pieces[first]):
                sent -= len(pieces[first])
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def receive(self) -> tuple[dict[str, Any], list[bytearray]]:
        """Wait for the next message, and the bytes behind it.

        Raises:
            ChannelClosed: if the other end is gone, or what it sends is no message.
        """
        try:
            text_bytes, num_blobs = _SIZES.unpack(self._read(bytearray(_SIZES.size)))
            if text_bytes > _MAX_TEXT_BYTES or num_blobs > _MAX_BLOBS:
                raise ChannelClosed("the other end sends no messages")
            sizes = self._read(bytearray(_BLOB.size * num_blobs))
            message = json.loads(self._read(bytearray(text_bytes)))
            return message, [self._read(bytearray(size)) for (size,) in _BLOB.iter_unpack(sizes)]
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def _read(self, into: bytearray) -> bytearray:
        view, done = memoryview(into), 0
        while done < len(into):
            count = self._link.recv_into(view[done : done + _CHUNK_BYTES])
            if not count:
                raise ChannelClosed("the other end closed the connection")
            done += count
        return into

    def unanswered_s(self) -> float:
        """Seconds for which the other end's system has not confirmed what was sent; 0 if nothing is on its way.

        A process that is held does not read, but its system confirms: only a machine or a network that is lost does not.
        """
        if sys.platform != "linux":
            return 0.0
        try:
            told = self._link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return 0.0  # it is closed, which whoever receives sees
        fields = _TCP_INFO.unpack(told)
        return fields[_LAST_ACK_RECEIVED_MS] / 1000 if fields[_UNACKED] else 0.0

    def close(self) -> None:
        """End the connection; whoever sends or receives on it is woken. A second call does nothing."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
