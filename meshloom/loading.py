"""While PyTorch and what stands on it are imported: seconds in which a run has neither begun nor said anything.

Owns: a word about it on a terminal, and Ctrl-C meanwhile. Refuses to know: what is imported. Always holds: nothing of a run is
there yet, so the process ends at once; an exception in the midst of an import of PyTorch would abort it with words of C++.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""The exit code of Ctrl-C."""


@contextmanager
def loading() -> Iterator[None]:
    """Around imports that take seconds, before anything is begun that has to be ended."""
    if sys.stderr.isatty():
        with suppress(OSError):
            print("loading PyTorch", file=sys.stderr)
    # Who ignores Ctrl-C, as a worker of a run does, or has a handler of their own keeps it.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # only the main thread may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)
