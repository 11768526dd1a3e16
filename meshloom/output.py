"""Standard output and error of the command: what they cannot write must not change how a run ends.

Owns: how a user's error is told. Refuses to know: which error it is. Always holds: a character that a stream lacks ends
nothing; a full disk or a reader that has gone, of the streams themselves, leaves the exit code what it was.
"""

import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

from meshloom.config.errors import UserError


def write_anything() -> None:
    """On a terminal or into a file without Unicode, question marks for what it lacks, instead of the end of a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def ended_by(error: UserError) -> int:
    """Tell a user's error; its exit code, also where nothing can be written any more."""
    with suppress(OSError):
        _tell(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _give_up(stream)
    return error.exit_code


def _tell(error: UserError) -> None:
    """Print a user's error: in a frame on a terminal, plainly elsewhere."""
    if not sys.stderr.isatty():
        print(f"error: {error}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    panel = Panel(Text(str(error)), title="error", title_align="left", border_style="red")
    Console(stderr=True, highlight=False).print(panel)


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, such as to ``head``."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in output.poll(0))
    if gone:
        _give_up(sys.stdout)
    return gone


def _give_up(stream: TextIO) -> None:
    """What is still in its buffer would fail once more at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
