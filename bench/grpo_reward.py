"""The reward of the whole-step benchmark, the same function on both sides."""

import re

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 for the right answer; without one to compare with, 1 for a text of even length, so that groups have a spread."""
    if not ground_truth:
        return float(len(solution_str) % 2 == 0)
    found = _ANSWER.findall(solution_str)
    return float(bool(found) and found[-1].strip() == ground_truth)
