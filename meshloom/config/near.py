"""What a misspelt name may mean.

Owns: how names and files are compared for errors. Refuses to know: what they name.
"""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest, and others that are as near, with a space behind it; empty if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known))
    as_near = [other for other in near if _likeness(name, other) == _likeness(name, near[0])]
    return f"did you mean {' or '.join(as_near)}? " if near else ""


def nearest_first(name: str, names: Sequence[str]) -> list[str]:
    """``names`` with the one most like ``name`` first."""
    return sorted(names, key=lambda other: -_likeness(name, other))


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()


def files_near(file: Path) -> str:
    """Files like a missing one, relative to the current directory as the missing one was."""
    if not file.parent.is_dir():
        return f"there is no folder {file.parent.absolute()}; paths are relative to the current directory"
    names = sorted(entry.name for entry in file.parent.iterdir() if entry.suffix == file.suffix)
    near = difflib.get_close_matches(file.name, names, n=3, cutoff=0.4) or names[:3]
    return f"files nearby: {', '.join(str(file.parent / name) for name in near)}" if near else "give an existing file"
