"""Rewards of the GPU benchmarks, one function each for every side: in verl's form, which ours takes too.

Where a run is told of a gate (``gpu_together.py``), its first rewards wait there.
"""

import os
import re
import time
from pathlib import Path

GATE = "BENCH_GATE"
"""Variable with the file that is waited for; ``.reached`` beside it says that somebody waits."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def spread(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_: object
) -> float:
    """1 for the right number, and a tenth of the share of small letters, so that texts of random weights differ."""
    letters = sum(character.islower() for character in solution_str) / max(1, len(solution_str))
    return last_number("", solution_str, ground_truth) + 0.1 * letters


def last_number(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_: object
) -> float:
    """1 if the last number of the text is the right one."""
    pass_gate()
    found = _NUMBER.findall(solution_str)
    return float(bool(found) and found[-1] == str(ground_truth))


def pass_gate() -> None:
    """Wait until the gate is open, if there is one."""
    if (gate := os.environ.get(GATE)) and not Path(gate).exists():
        Path(f"{gate}.reached").touch()
        while not Path(gate).exists():
            time.sleep(0.2)
