"""Measured time and memory of a step.

Owns: the clock of phases, peak memory. Refuses to know: what a phase does. Always holds: a second belongs to one phase
only (an inner phase's time is not its outer phase's), so the phases of a step never add up to more than the step.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshloom.observe.peaks import WHOLE, PeakWatch


class PhaseClock:
    """Seconds spent in each phase since the last ``take``.

    Args:
        on_phase: called with the name of the innermost phase whenever that changes, with none outside of all phases.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self, *, on_phase: Callable[[str | None], None] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_phase, self._now = on_phase, now
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``; phases may be nested and may raise."""
        self._settle()
        self._stack.append(name)
        self._announce()
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()
            self._announce()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last ``take``; counting goes on."""
        self._settle()
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, in order of first entry; counting starts anew. A phase that is still
        open goes on in the new count."""
        self._settle()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _settle(self) -> None:
        now = self._now()
        if self._stack:
            name = self._stack[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def _announce(self) -> None:
        if self._on_phase is not None:
            self._on_phase(self._stack[-1] if self._stack else None)


def peak_memory() -> int:
    """Most bytes held so far: allocated on the current GPU where this process uses one, else resident in the process."""
    device = peak_device_memory()
    return peak_host_memory() if device is None else device


def peak_host_memory() -> int:
    """Most resident bytes of this process so far. The system reports KiB on Linux and bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_memory() -> int | None:
    """Most bytes allocated on the current GPU so far; none if this process uses no GPU. Never imports torch itself."""
    peak = WHOLE.look()
    return None if peak is None else peak.allocated


def take_peak_device_memory() -> int | None:
    """Most bytes allocated on the current GPU since the last call; none if this process uses no GPU."""
    peak = _BOUNDARY.take()
    return None if peak is None else peak.allocated


_BOUNDARY = PeakWatch()
"""Since the last ``take_peak_device_memory``."""
