"""What is known of a failure, and which of several was the first cause.

Owns: the record of what was noticed, the choice among it, the error that a run ends with. Refuses to know: how it was noticed.
Always holds: a death, or an error of a rank's own, comes before an error in a collective operation, which tells no more than
that another rank has gone; both come before a rank that is late, which may only wait for another.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshloom.config.errors import RunFault, UserError
from meshloom.fabric.seats import Seat


class Cause(StrEnum):
    """How a worker failed."""

    DIED = "died"
    """Its process ended."""
    RAISED = "raised"
    """A verb raised an error."""
    STOPPED = "stopped"
    """Its process is held by a signal."""
    NODE_LOST = "node lost"
    """Its node's connection ended, or nothing comes from there."""
    COLLECTIVE = "collective"
    """A collective operation raised, most often since another rank has gone."""
    DISCONNECTED = "disconnected"
    """Its connection ended."""
    SILENT = "silent"
    """Its process runs, but says nothing."""
    LATE = "late"
    """A call had no result when its deadline passed."""


_TIERS = {Cause.COLLECTIVE: 1, Cause.DISCONNECTED: 1, Cause.SILENT: 2, Cause.LATE: 2}
_SETTLE_S = (0.3, 2.0, 0.0)
"""Seconds after which nothing is awaited that would tell more, for each tier."""


@dataclass(frozen=True)
class Evidence:
    """Something that was noticed.

    Args:
        cause: how the worker failed.
        rank: of the worker.
        text: what happened, to follow the rank's name: ``was killed by SIGKILL``.
        at: time of the monotonic clock.
        detail: more lines, such as a traceback.
        error: the error itself, where the user is to see it as it was raised.
    """

    cause: Cause
    rank: int
    text: str
    at: float
    detail: str = ""
    error: UserError | None = None

    @property
    def tier(self) -> int:
        """0 names a cause; 1 is likely a consequence; 2 is a wait."""
        return _TIERS.get(self.cause, 0)

    @property
    def settles_at(self) -> float:
        """When to go by this, if nothing better has been noticed."""
        return self.at + _SETTLE_S[self.tier]


def first_cause(noticed: Iterable[Evidence]) -> Evidence:
    """The first of what tells most."""
    return min(noticed, key=lambda one: (one.tier, one.at))


@dataclass(frozen=True)
class Look:
    """What a closer look at a worker showed.

    Args:
        log: its log file.
        tail: last lines of it.
        stack: frames of its main thread, innermost first.
    """

    log: str = ""
    tail: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()


class WorkerFault(RunFault):
    """A worker failed, and everything was ended.

    Args:
        evidence: the first cause.
        seat: of the worker.
        role: what the worker is for, if that is known.
        phase, verb: what it did; the verb is empty if it did nothing.
        look: its log and stack.
        others: what other ranks did, a line each.
    """

    def __init__(
        self,
        evidence: Evidence,
        seat: Seat,
        *,
        host: str = "",
        role: str = "",
        phase: str = "",
        verb: str = "",
        look: Look | None = None,
        others: tuple[str, ...] = (),
    ) -> None:
        self.cause, self.rank, self.seat, self.host = evidence.cause, evidence.rank, seat, host
        self.role, self.phase, self.verb = role, phase, verb
        self.look = look or Look()
        node = seat.node if host in ("", seat.node) else f"{seat.node} (host {host})"
        about = ", ".join(filter(None, (f"on {node}", seat.device, role)))
        where = f"phase {phase}, verb {verb}" if verb else f"phase {phase}, between calls" if phase else ""
        fix = "the run goes on from its newest checkpoint, or begins anew before the first, with --resume"
        super().__init__(
            f"rank {seat.rank} ({about}) {evidence.text}",
            where=where,
            why=_why(evidence.detail, self.look, others),
            fix=f"see {self.look.log}; {fix}" if self.look.log else fix,
        )


def _why(detail: str, look: Look, others: tuple[str, ...]) -> str:
    parts = [detail.strip()] if detail.strip() else []
    if look.stack:
        parts.append("it stands in, innermost first:\n" + _indented(look.stack))
    tail = [line for line in look.tail if line.strip() not in detail]  # a traceback is in the log too
    if tail:
        parts.append(f"last lines of {look.log}:\n" + _indented(tail))
    if others:
        parts.append("the others:\n" + _indented(others))
    return "\n".join(parts)


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def error_fields(error: UserError) -> dict[str, Any]:
    """A user's error as plain values."""
    fields = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
    return {"fields": fields, "fault": isinstance(error, RunFault)}


def error_of(written: dict[str, Any]) -> UserError:
    """The error that ``error_fields`` wrote."""
    fields = dict(written["fields"])
    kind = RunFault if written["fault"] else UserError
    return kind(fields.pop("what"), **fields)
