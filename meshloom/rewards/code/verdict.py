"""What a run of a program means for a test.

Owns: the reasons, and how the end of a run becomes one. Refuses to know: how programs are run. Always holds: a reason is the
program's own fault; where the sandbox is at fault there is no verdict at all.
"""

import signal
from dataclasses import dataclass
from enum import StrEnum

from meshloom.rewards.sandbox.client import Outcome


class Verdict(StrEnum):
    """Why a sample has the reward it has: the first test that failed decides."""

    PASSED = "passed"
    """All tests that were run."""
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    """It raised, was killed by a signal of its own making, or could not be compiled."""
    TIME_LIMIT = "time_limit"
    """Processor seconds, seconds, or the time of all tests of the sample."""
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    PROCESS_LIMIT = "process_limit"
    FILE_LIMIT = "file_limit"
    """Its folder is full, a file too large, or too many are open."""
    FORBIDDEN = "forbidden"
    """It asked for the network, for files outside its folder, or for a system call that is denied."""
    NO_PROGRAM = "no_program"
    """The response has no program."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one test, and what was seen."""

    verdict: Verdict
    detail: str = ""


_STOPPED = {
    "cpu": (Verdict.TIME_LIMIT, "its processor time was used up"),
    "wall": (Verdict.TIME_LIMIT, "it did not end in time"),
    "memory": (Verdict.MEMORY_LIMIT, "its processes together held too much memory"),
    "processes": (Verdict.PROCESS_LIMIT, "it started too many processes"),
    "disk": (Verdict.FILE_LIMIT, "its folder was full"),
}
_ERRORS = (
    (Verdict.MEMORY_LIMIT, ("MemoryError",)),
    (Verdict.PROCESS_LIMIT, ("[Errno 11]", "can't start new thread")),
    (Verdict.FILE_LIMIT, ("[Errno 24]", "[Errno 27]", "[Errno 28]")),
    (Verdict.FORBIDDEN, ("[Errno 101]", "[Errno 1]", "[Errno 13]", "[Errno 30]")),
)
"""The kernel's errors by which a bound shows itself in a program that does not catch them."""


def failure(outcome: Outcome) -> Finding | None:
    """Why a run failed by itself, whatever it answered; nothing if it ended well."""
    ending = outcome.ending
    if outcome.overflow:
        return Finding(verdict=Verdict.OUTPUT_LIMIT, detail="it printed too much")
    if ending.stopped:
        verdict, detail = _STOPPED[ending.stopped]
        return Finding(verdict=verdict, detail=detail)
    if ending.signal is not None:
        if ending.signal == signal.SIGXCPU:
            return Finding(verdict=Verdict.TIME_LIMIT, detail="its processor time was used up")
        return Finding(verdict=Verdict.RUNTIME_ERROR, detail=f"killed by {_signal_name(ending.signal)}")
    if ending.exit_code == 0:
        return None
    last = outcome.complaint.splitlines()[-1] if outcome.complaint else f"exit code {ending.exit_code}"
    verdict = next((one for one, signs in _ERRORS if any(sign in last for sign in signs)), Verdict.RUNTIME_ERROR)
    return Finding(verdict=verdict, detail=last)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
