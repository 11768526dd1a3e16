"""What a process prints, kept within bounds and cut where its calls end.

Owns: both ends of the pipe that is its standard output and standard error: the mark behind each call, and the text between two
of them. Refuses to know: what is called. Always holds: a process that prints without end costs neither disk nor memory; its
answers do not wait for what it prints; a text is no longer than ``HEAD_BYTES + TAIL_BYTES`` and a word about what was left out.
"""

import os
import sys
from collections import deque
from contextlib import suppress

HEAD_BYTES, TAIL_BYTES = 1500, 500
"""Of a call's text, what is kept of its beginning and of its end."""
_END = b"\0\x1eend of a call\x1e\0"
_CHUNK = 2**16
_MOST_CHUNKS = 64
"""Read at once, so that a process that prints without end holds nobody up."""


class Printing:
    """The end of the process that prints. What is called may put other things in place of ``sys.stdout``, or of its file: then
    calls are not told apart, and nothing else changes."""

    def __init__(self) -> None:
        self._pipe = _identity(1)
        for stream in (sys.stdout, sys.stderr):
            # A line that was printed is there even if the process is killed in the next moment, and no character is refused.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]

    def end_call(self) -> None:
        """What was printed so far is of the call that ends now."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # whatever was put in its place may raise anything
                stream.flush()
        with suppress(OSError):
            if _identity(1) == self._pipe:
                os.write(1, _END)


def _identity(descriptor: int) -> tuple[int, int]:
    state = os.fstat(descriptor)
    return state.st_dev, state.st_ino


class _Text:
    """Bytes, of which the first and the last are kept."""

    def __init__(self) -> None:
        self._head, self._tail, self._count = bytearray(), b"", 0

    def add(self, data: bytes) -> None:
        room = HEAD_BYTES - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-TAIL_BYTES:]
        self._count += len(data)

    def __str__(self) -> str:
        left_out = self._count - len(self._head) - len(self._tail)
        between = f"\n… {left_out:,} bytes left out …\n".encode() if left_out else b""
        return (bytes(self._head) + between + self._tail).decode("utf-8", "replace").rstrip()


class Output:
    """The end that reads; whoever holds it reads whenever something is there.

    Args:
        descriptor: of the pipe, which this closes.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._is_open = True
        self._rest = b""
        """Read last: an end of a call may begin in it."""
        self._text = _Text()
        self._whole: deque[str] = deque()

    def drain(self) -> bool:
        """Read what is there; false once nothing can come any more."""
        for _ in range(_MOST_CHUNKS):
            if not self._read():
                break
        return self._is_open

    def take(self) -> str:
        """What the first call printed that was not taken yet: up to its end, or all there is where it has not ended."""
        for _ in range(_MOST_CHUNKS):
            if self._whole or not self._read():
                break
        if self._whole:
            return self._whole.popleft()
        self._text.add(self._rest)
        text, self._text, self._rest = str(self._text), _Text(), b""
        return text

    def close(self) -> None:
        """Read what is left, and no more. May be called twice."""
        if self._is_open:
            self.drain()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self._is_open, self.descriptor = False, -1

    def _read(self) -> bool:
        """Read once; false if nothing is there."""
        if not self._is_open:
            return False
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._is_open = False
            return False
        *ended, rest = (self._rest + chunk).split(_END)
        for part in ended:
            self._text.add(part)
            self._whole.append(str(self._text))
            self._text = _Text()
        keep = max(0, len(rest) - len(_END) + 1)
        self._text.add(rest[:keep])
        self._rest = rest[keep:]
        return True
