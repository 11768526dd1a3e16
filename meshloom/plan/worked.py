"""Derivations with their numbers: ``60 × 12`` for ``prompts per step × samples per prompt``.

Owns: putting values into formulas. Always holds: a formula in which nothing has a known value is left out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshloom.plan.ledger import LedgerLine

_REPEATED = re.compile(r"(\d[\d,.]*) \(\1\)")
"""A number after the same number, where the formula brings its own."""
_COMPLETE = ("time", "assumptions")
"""Sections whose formulas have their numbers; their words and names are parts of phases, not numbers of the plan."""
_EITHER = re.compile(r"\d+ or \d+")


def worked(lines: Sequence[LedgerLine], settings: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The formula of each derived line with the values of what it names, by section and name.

    Args:
        lines: of the plan.
        settings: values by their dotted paths.
    """
    values = {line.name: line.value for line in lines if line.section not in _COMPLETE} | dict(settings)
    texts = {name: text for name, value in values.items() if (text := _text(value))}
    names = "|".join(re.escape(name) for name in sorted(texts, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.])(?<!\d )(?:{names})(?![\w.])")
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        if line.section in _COMPLETE:
            continue
        formula, count = pattern.subn(lambda match: texts[match[0]], line.formula) if texts else (line.formula, 0)
        if count and any(sign in formula for sign in "×÷+⌈"):
            found[line.section, line.name] = _REPEATED.sub(r"\1", formula)
    return found


def _text(value: Any) -> str:
    """A number in words' place; empty for what is none."""
    if isinstance(value, str):
        return f"({value})" if _EITHER.fullmatch(value) else ""
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else ""
