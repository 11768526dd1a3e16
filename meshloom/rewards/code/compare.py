"""Whether what a program gave is what was wanted.

Always holds: both sides are text or JSON values that were made outside of the program; a number is close enough within the
tolerance, everything else must be equal.
"""

import math
from typing import Any

_LONGEST_NUMBER = 400
"""Characters of a number that is read as one; the longest that can be written without an exponent has fewer."""


def same_output(found: str, wanted: str, tolerance: float) -> bool:
    """Lines without white space at their ends, without blank lines at the end; numbers with a point within the tolerance."""
    ours, theirs = _lines(found), _lines(wanted)
    if ours == theirs:
        return True
    if len(ours) != len(theirs):
        return False
    return all(_same_line(mine, other, tolerance) for mine, other in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(found: str, wanted: str, tolerance: float) -> bool:
    ours, theirs = found.split(), wanted.split()
    if len(ours) != len(theirs):
        return False
    return all(mine == other or _close_text(mine, other, tolerance) for mine, other in zip(ours, theirs, strict=True))


def _close_text(found: str, wanted: str, tolerance: float) -> bool:
    """Two numbers, the wanted one written with a point or an exponent."""
    if not tolerance or len(found) > _LONGEST_NUMBER or not any(sign in wanted for sign in ".eE"):
        return False
    try:
        return _close(float(found), float(wanted), tolerance)
    except ValueError:
        return False


def _close(found: float, wanted: float, tolerance: float) -> bool:
    if math.isnan(wanted):
        return math.isnan(found)
    return found == wanted or math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)


def same_value(found: Any, wanted: Any, tolerance: float) -> bool:
    """JSON values: lists and objects part by part; true is not 1; a number that is wanted with a point within the tolerance."""
    if isinstance(wanted, bool) or isinstance(found, bool) or wanted is None or isinstance(wanted, str):
        return type(found) is type(wanted) and found == wanted
    if isinstance(wanted, int | float):
        if not isinstance(found, int | float):
            return False
        if isinstance(wanted, int):
            return found == wanted  # Python compares integers and floats exactly
        try:
            return _close(float(found), float(wanted), tolerance)
        except OverflowError:
            return False
    if isinstance(wanted, list):
        same_length = isinstance(found, list) and len(found) == len(wanted)
        return same_length and all(same_value(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        return False
    return all(same_value(found[key], value, tolerance) for key, value in wanted.items())
