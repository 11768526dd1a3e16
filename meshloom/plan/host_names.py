"""Lists of host names, short: ``gpu[01-16,20]`` for seventeen names, as SLURM writes them.

Owns: expanding and folding. Always holds: what ``fold`` wrote, ``expand`` reads back in the same order.
"""

import re
from collections.abc import Iterable, Iterator

_BRACKETS = re.compile(r"^([^\[\]]*)\[([0-9,-]+)\]([^\[\]]*)$")
_MOST = 1 << 20


def expand(text: str) -> tuple[str, ...]:
    """Names that a text stands for; a text without brackets is one name.

    Raises:
        ValueError: if the brackets hold something else than numbers and ranges of numbers.
    """
    if "[" not in text and "]" not in text:
        return (text,)
    found = _BRACKETS.match(text)
    if found is None:
        raise ValueError(f"{text} is no list of names; one looks like node[1-4,7]")
    before, inside, after = found.groups()
    return tuple(f"{before}{number}{after}" for part in inside.split(",") for number in _numbers(part, text))


def _numbers(part: str, text: str) -> Iterator[str]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if found is None:
        raise ValueError(f"{part!r} in {text} is neither a number nor a range such as 1-4")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < first + _MOST:
        raise ValueError(f"the range {part} in {text} is empty or too long")
    return (f"{number:0{len(found[1])}d}" for number in range(first, last + 1))


def fold(names: Iterable[str]) -> list[str]:
    """The same names in the same order, neighbours that only count on as one text."""
    folded: list[str] = []
    group: list[tuple[str, str, str]] = []
    for name in names:
        parts = _parts(name)
        if group and not _follows(group[-1], parts):
            folded.append(_written(group))
            group = []
        group.append(parts)
    return [*folded, _written(group)] if group else []


def _parts(name: str) -> tuple[str, str, str]:
    """A name around its last number."""
    found = re.fullmatch(r"(.*?)([0-9]+)(\D*)", name)
    return (found[1], found[2], found[3]) if found else (name, "", "")


def _follows(last: tuple[str, str, str], after: tuple[str, str, str]) -> bool:
    same = last[0] == after[0] and last[2] == after[2] and bool(last[1]) and bool(after[1])
    return same and after[1] == f"{int(last[1]) + 1:0{len(last[1])}d}"


def _written(group: list[tuple[str, str, str]]) -> str:
    before, first, after = group[0]
    if len(group) == 1:
        return f"{before}{first}{after}"
    # A range keeps the width of its first number, so that 9 and 10 fold to 9-10, and 09 and 10 to 09-10.
    return f"{before}[{first}-{group[-1][1]}]{after}"
