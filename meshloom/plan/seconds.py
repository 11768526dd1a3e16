"""Seconds of a phase and what they are made of: the records of the time ledger.

Owns: what is said of a phase. Refuses to know: any formula. Always holds: a phase's seconds are the sum of its parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.residency import Phase

UNMEASURED = "; over devices: nothing of this has been measured"
"""Said of parts in which devices wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """A part of a phase.

    Args:
        name: what takes them.
        seconds: how many.
        formula: how they follow.
        over_devices: whether devices wait for each other in it, which the constants of one device say little about.
    """

    name: str
    seconds: float
    formula: str
    over_devices: bool = False


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """A phase of a step.

    Args:
        phase: which.
        role: that it is of.
        parts: that add up to it.
    """

    phase: Phase
    role: str
    parts: tuple[Seconds, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def lines(self) -> Iterator[LedgerLine]:
        """The phase, and its parts."""
        yield _line(f"{self.role}: {self.phase}", self.seconds, self._bound())
        for part in self.parts:
            formula = part.formula + (UNMEASURED if part.over_devices else "")
            yield _line(f"{self.role}: {self.phase}: {part.name}", part.seconds, formula)

    def _bound(self) -> str:
        """What the phase is made of, and what takes most of it."""
        if not self.seconds:
            return "nothing to do"
        most = max(self.parts, key=lambda part: part.seconds)
        names = " + ".join(part.name for part in self.parts)
        return f"{most.seconds / self.seconds:.0%} are {most.name}; {names}"


def _line(name: str, value: float, formula: str) -> LedgerLine:
    return LedgerLine(section="time", name=name, value=round(value, 6), formula=formula, source=DERIVED, unit="s")
