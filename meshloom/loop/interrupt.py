"""Stopping a run from the keyboard or by a scheduler.

Owns: SIGINT and SIGTERM while a run is on. Always holds: the first signal asks for a stop at the next boundary, where the
run is saved; the second stops now, and what was saved before is untouched. Several SIGTERM at once are one: service managers
and schedulers may tell every process of a run, and attendants pass theirs on.
"""

import _thread
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_AT_ONCE_S = 3.0
NOTICE = "stopping after this step, then saving; Ctrl-C again stops at once without saving"


class Interrupt:
    """Context that turns signals into a wish to stop.

    Args:
        notice: called with a sentence for the user at the first signal, in a thread of its own.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.wanted = False
        self._notice = notice
        self._before: dict[int, Any] = {}
        self._wanted_at = 0.0

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:
                # Only the main thread may set handlers; in another thread the run is stopped by its caller.
                break
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            if number == signal.SIGTERM and time.monotonic() - self._wanted_at < _AT_ONCE_S:
                return
            raise KeyboardInterrupt
        self.wanted, self._wanted_at = True, time.monotonic()
        # The main thread may be inside the very stream the notice goes to, which it cannot enter twice. ``threading`` has a
        # lock of the same kind.
        _thread.start_new_thread(self._notice, (NOTICE,))
