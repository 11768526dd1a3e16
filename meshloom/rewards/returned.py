"""What a reward function returned, as outcomes.

Owns: which values are numbers, and what is said of others. Refuses to know: processes, how a function is called. Always holds:
what is no finite number is invalid with a reason that shows it; a list that is not as long as the group gives no sample a
reward; a value of a list that is none costs its own sample.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, SupportsFloat

from meshloom.killable.serving import error_text
from meshloom.rewards.forms import Loaded
from meshloom.rewards.outcome import InvalidReason

DETAIL_CHARACTERS = 2000
"""Bound on the text that explains an invalid reward."""
_MAX_PARTS = 64
_SHOWN = 200

Outcome = tuple[float | None, InvalidReason | None, str, dict[str, float]]
"""A value, or the reason why there is none; a detail; parts."""


def read_value(returned: Any) -> Outcome:
    """What a function returned for one sample: a number, or a dict with ``score``. Whatever its own types raise comes out."""
    parts: dict[str, float] = {}
    score, remark = returned, ""
    if isinstance(returned, Mapping):
        if "score" not in returned:
            names = ", ".join(map(str, list(returned)[:10]))
            return None, InvalidReason.NOT_A_NUMBER, bounded(f"a dict without 'score'; its keys: {names}"), {}
        score = returned["score"]
        remark = bounded(returned["remark"]) if isinstance(returned.get("remark"), str) else ""
        numbers = {bounded(str(key), 100): _number(value) for key, value in returned.items() if key != "score"}
        parts = {name: number for name, number in list(numbers.items())[:_MAX_PARTS] if number is not None}
    value = _number(score)
    if value is None:
        hint = " (a function without a return?)" if returned is None else ""
        return None, InvalidReason.NOT_A_NUMBER, bounded(f"{type(score).__name__}: {score!r}{hint}"), parts
    return value, None, remark, parts


def read_list(returned: Any, count: int, function: Loaded) -> list[Outcome]:
    """What a function returned for the samples of a group. Whatever its own types raise comes out.

    Args:
        returned: a list of values, or anything else that can be gone through.
        count: samples that it was called with.
        function: that returned it.
    """
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        hint = " (a function without a return?)" if returned is None else ""
        shown = f"{type(returned).__name__}: {returned!r:.{_SHOWN}}{hint}"
        why = f"returned no list of {count} values but {shown}"
        return [(None, InvalidReason.BAD_LIST, bounded(f"{function.name} {why}"), {})] * count
    values = list(islice(returned, count + 1))
    if len(values) != count:
        found = _length(returned) or (f"more than {count}" if len(values) > count else str(len(values)))
        why = f"{function.name} returned a list of {found} for {count} {'sample' if count == 1 else 'samples'}"
        return [(None, InvalidReason.BAD_LIST, bounded(why), {})] * count
    return [_of_list(value, at, count, function) for at, value in enumerate(values)]


def _of_list(value: Any, at: int, count: int, function: Loaded) -> Outcome:
    if value is None and function.may_skip:
        return None, InvalidReason.NOT_APPLICABLE, f"{function.name} returned None", {}
    try:
        number, reason, detail, parts = read_value(value)
    except Exception as error:  # a type of the user's may raise anything when it is asked for a number
        number, reason, detail, parts = None, InvalidReason.RAISED, error_text(error), {}
    if reason is not None:
        detail = bounded(f"{function.name}, value {at + 1} of {count}: {detail}")
    return number, reason, detail, parts


def _length(returned: Iterable[Any]) -> str:
    """How long a list is; empty where it does not say."""
    try:
        return str(len(returned))  # type: ignore[arg-type]
    except TypeError:
        return ""


def invalid(reason: InvalidReason, detail: str, function: Loaded, count: int) -> Outcome:
    """A call that gave nothing; that of a group says whose call it was."""
    whose = called_with(function.name, count) if function.takes_groups else ""
    return None, reason, bounded(whose + detail), {}


def called_with(name: str, count: int) -> str:
    """What stands in front of why the call of a group failed."""
    return f"{name}, called with {count} {'sample' if count == 1 else 'samples'}: "


def _number(value: Any) -> float | None:
    """A finite number, or nothing. Strings are no numbers."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def bounded(text: str, limit: int = DETAIL_CHARACTERS) -> str:
    """Text that any file can hold: no lone surrogates, no more than ``limit`` characters."""
    text = text[: limit + 1].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"
