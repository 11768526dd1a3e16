"""What a run of test code says: about the program, or about the tests themselves.

Owns: reading what the checker wrote, and when its end is the row's fault. Refuses to know: how tests are run. Always holds:
what a program can bring about in the checker counts against the program; what any program would meet raises ``ValueError``.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.rewards.sandbox.client import Outcome, SandboxFault


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a checker wrote.

    Args:
        total: all tests; test code that failed outside of a test, or did not come to its end, is one more.
        passed: tests that passed.
        first: the first trouble.
        done: whether the checker came to its end.
        waited_s: seconds it waited for the program, to a tenth.
        large: whether an answer was so large that it may be what made the tests long.
    """

    total: int
    passed: int
    first: str
    done: bool
    waited_s: float
    large: bool


def read_verdicts(checked: Outcome, prompt: str | None) -> Told:
    """What a checker wrote.

    Args:
        checked: its run.
        prompt: what the program was asked for; none: not known.

    Raises:
        ValueError: if the tests themselves are broken.
    """
    total, passed, num_stopped, first = None, 0, 0, ""
    seen: dict[str, Any] = {}
    for line in _lines(checked.answer):
        if "fault" in line:
            raise ValueError(line["fault"])
        if "missing" in line and prompt is not None and not re.search(rf"\b{re.escape(line['missing'])}\b", prompt):
            raise ValueError(
                f"the tests use {line['missing']}, which they do not define and the prompt does not mention"
            )
        total = line.get("tests", total)
        passed += bool(line.get("ok"))
        num_stopped += "stopped" in line
        first = first or line.get("detail") or line.get("stopped") or ""
        seen |= line
    if total is None:
        raise SandboxFault(f"the tests were not begun: {checked.complaint[-300:] or checked.ending}")
    if total == 0:
        raise ValueError("the test code has no assert at its top, no check and no test case")
    done = "done" in seen
    return Told(
        total=total + (num_stopped if done else 1),
        passed=passed,
        first=first or "not all tests were reached",
        done=done,
        waited_s=seen.get("waited_s", 0.0),
        large="large" in seen,
    )


def refuse_heavy_tests(ran: Outcome, checked: Outcome, told: Told) -> None:
    """Refuse tests that passed a bound by themselves, while the program did little.

    Raises:
        ValueError: if so. Not after a large answer, by which a program could bring that about.
    """
    ending = checked.ending
    own_s = ending.wall_s - told.waited_s
    if told.large:
        return
    if "wall" in (ran.ending.stopped, ending.stopped) or ending.stopped == "cpu":
        if own_s > max(told.waited_s, ran.ending.cpu_s):
            raise ValueError(f"the tests themselves took {own_s:.1f} of the {ending.wall_s:.1f} s there are")
    elif not told.done and (ending.stopped or ending.signal is not None or checked.overflow):
        how = "they printed too much" if checked.overflow else ending.stopped or f"signal {ending.signal}"
        raise ValueError(f"the tests themselves were ended: {how}")


def _lines(data: bytes) -> Iterator[Mapping[str, Any]]:
    for line in data.split(b"\n"):
        if line:
            yield json.loads(line)
