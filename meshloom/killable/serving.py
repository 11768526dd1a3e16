"""The inside of a process that can be killed: it answers messages on its socket until the other end closes.

Owns: the loop, and the form of messages. Refuses to know: what is asked (a ``Service``), deadlines; whoever holds the other end
of the socket kills this process when one has passed. Always holds: one line for each call, in order; a child that was forked by
what is called, and comes back from it, answers nothing.

Protocol: first a setup (a pickle), answered by one line, ``{"about": …}`` or ``{"error": …}`` with the fields of a
``UserError``; then messages, each answered
by a line for each of its calls. Pickles travel towards this process only: what runs here can write to this socket, and must not
gain anything in the controller by that.
"""

import json
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from meshloom.config.errors import UserError

ResultT = TypeVar("ResultT")
_HEADER = struct.Struct(">Q")


class Service(Protocol, Generic[ResultT]):
    """What a process answers with, once it has loaded its setup."""

    def about(self) -> dict[str, Any]:
        """What the other end must know of what was loaded: JSON values."""
        ...

    def results(self, message: bytes) -> Iterator[ResultT]:
        """What the calls of a message come to; whatever called code raises is a result too."""
        ...

    def line(self, result: ResultT) -> bytes:
        """A result as it travels, without the end of the line."""
        ...


class LoadOnly:
    """A service that has done what it is for once it is loaded, and is asked nothing."""

    def about(self) -> dict[str, Any]:
        return {}

    def results(self, message: bytes) -> Iterator[None]:
        return iter(())

    def line(self, result: None) -> bytes:
        return b"{}"


def serve(descriptor: int, load: Callable[[Any], Service[Any]]) -> None:
    """Answer the setup and all messages on a socket until its other end closes.

    Args:
        descriptor: of the socket.
        load: makes a service of a setup; a ``UserError`` that it raises is told, and ends the process.
    """
    connection = socket.socket(fileno=descriptor)
    own = os.getpid()
    _adopt_orphans()
    setup = _receive(connection)
    if setup is None:
        return
    try:
        service = load(pickle.loads(setup))
    except UserError as error:
        _send(connection, json.dumps({"error": fields_of(error)}).encode())
        return
    _send(connection, json.dumps({"about": service.about()}).encode())
    while (message := _receive(connection)) is not None:
        for result in service.results(message):
            if os.getpid() != own:  # a child that called code forked has come back from it
                os._exit(0)
            _send(connection, service.line(result))


def frame(message: bytes) -> bytes:
    """A message with its length in front, as ``serve`` reads it."""
    return _HEADER.pack(len(message)) + message


def fields_of(error: UserError) -> dict[str, str]:
    """An error as it travels: what it is made of again."""
    return {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}


def error_text(error: BaseException) -> str:
    """An exception, and the line it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
    return place + "".join(traceback.format_exception_only(error)).strip()


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants on Linux, so that they can be found and killed with this process."""
    if sys.platform == "linux":
        import ctypes

        pr_set_child_subreaper = 36  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _receive(connection: socket.socket) -> bytes | None:
    """The next message that ``frame`` made; nothing if the other end closed."""
    header = _read(connection, _HEADER.size)
    return None if header is None else _read(connection, _HEADER.unpack(header)[0])


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Exactly ``size`` bytes, or nothing if the other end closed."""
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _send(connection: socket.socket, line: bytes) -> None:
    connection.sendall(line + b"\n")
