"""Which settings verl has.

Owns: the names of ``keys.yaml``, from verl's releases 0.4 to 0.9. Refuses to know: what they mean. Always holds: a name
that verl does not have is told apart from one that has no counterpart here.
"""

import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from meshloom.config import yaml_text


class KnownKeys:
    """All keys of one kind of verl's trainers.

    Args:
        table: ``open``: groups that take any names; ``closed``: groups with their names.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self._open = tuple(table["open"].split())
        self.closed = {
            f"{group}.{name}".lstrip(".")
            for entry in table["closed"]
            for group in entry["groups"]
            for name in entry["names"].split()
        }
        self.groups = {above for key in (*self.closed, *self._open) for above in _above(key)} | {*self._open}

    def __contains__(self, key: str) -> bool:
        return key in self.closed or self.is_open(key)

    def is_open(self, key: str) -> bool:
        """Whether a key is, or is in, a group that takes any names."""
        return any(key == group or key.startswith(f"{group}.") for group in self._open)

    def nearest(self, key: str, count: int = 3) -> list[str]:
        """Keys that a wrong one may mean, best first: similar names in its group, the same name elsewhere, similar keys."""
        group, _, last = key.rpartition(".")
        siblings = {known.rpartition(".")[2]: known for known in self.closed if known.rpartition(".")[0] == group}
        near = [siblings[name] for name in difflib.get_close_matches(last, siblings, n=count, cutoff=0.7)]
        same = sorted(known for known in self.closed if known.rpartition(".")[2] == last)
        same.sort(key=lambda known: -difflib.SequenceMatcher(None, key, known).ratio())
        far = difflib.get_close_matches(key, self.closed, n=count, cutoff=0.6)
        far = [one for one in far if difflib.SequenceMatcher(None, last, one.rpartition(".")[2]).ratio() > 0.7]
        found = [*near, *same] or far
        return list(dict.fromkeys(found))[:count]


def _above(key: str) -> Iterator[str]:
    while key := key.rpartition(".")[0]:
        yield key


@cache
def known_keys(kind: str) -> KnownKeys:
    """The keys of verl's reinforcement learning (``rl``) or supervised (``sft``) trainers."""
    text = Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")
    return KnownKeys(yaml_text.read(text).data[kind])
