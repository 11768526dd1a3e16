"""Peaks of a GPU's memory, for any number of watchers that begin anew at moments of their own.

Owns: torch's count of the most bytes, which there is one of. Refuses to know: phases' order, who watches. Always holds: whoever
takes a peak begins its own count anew and nobody else's; without a GPU in use there are no peaks; torch is never imported here.
"""

import sys
from dataclasses import dataclass
from typing import Any

from meshloom.observe.names import MEMORY_PHASES


@dataclass(frozen=True)
class Peak:
    """Most bytes at once.

    Args:
        allocated: of tensors.
        reserved: that the allocator held for them, free pieces among them.
    """

    allocated: int = 0
    reserved: int = 0

    def __or__(self, other: "Peak") -> "Peak":
        return Peak(max(self.allocated, other.allocated), max(self.reserved, other.reserved))


class PeakWatch:
    """The peak on the current GPU since this watch was made or taken."""

    def __init__(self) -> None:
        self._most = Peak()
        _watches.append(self)

    def look(self) -> Peak | None:
        """The peak so far; none if this process uses no GPU."""
        cuda = _cuda()
        if cuda is None:
            return None
        now = Peak(int(cuda.max_memory_allocated()), int(cuda.max_memory_reserved()))
        for watch in _watches:
            watch._most |= now
        cuda.reset_peak_memory_stats()
        return self._most

    def take(self) -> Peak | None:
        """The peak so far, and begin anew from what is held now; none if this process uses no GPU."""
        most = self.look()
        self._most = Peak()
        return most

    def close(self) -> None:
        """Watch no more."""
        _watches.remove(self)


_watches: list[PeakWatch] = []
WHOLE = PeakWatch()
"""Of the process, never taken."""


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


class PhaseMemory:
    """The peak of each phase since the last ``take``.

    Args:
        watch: what measures; a GPU's by default.
    """

    def __init__(self, watch: PeakWatch | None = None) -> None:
        self._watch = PeakWatch() if watch is None else watch
        self._phase: str | None = None
        self._peaks: dict[str, Peak] = {}

    def enter(self, phase: str | None) -> None:
        """Another phase begins, or none: what was held until now belongs to the one before."""
        self._settle()
        self._phase = phase

    def take(self) -> dict[str, float]:
        """Peaks of ``MEMORY_PHASES`` as metrics, ``peak_memory_bytes/PHASE`` and ``reserved_memory_bytes/PHASE``; counting
        begins anew."""
        self._settle()
        peaks = {phase: self._peaks[phase] for phase in MEMORY_PHASES if phase in self._peaks}
        self._peaks = {}
        allocated = {f"peak_memory_bytes/{phase}": float(peak.allocated) for phase, peak in peaks.items()}
        return allocated | {f"reserved_memory_bytes/{phase}": float(peak.reserved) for phase, peak in peaks.items()}

    def close(self) -> None:
        """Measure no more."""
        self._watch.close()

    def _settle(self) -> None:
        peak = self._watch.take()
        if peak is not None and self._phase is not None:
            self._peaks[self._phase] = self._peaks.get(self._phase, Peak()) | peak
