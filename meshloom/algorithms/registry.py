"""Algorithms by name.

Owns: the table a setting's name is looked up in. Always holds: a name stands for one thing, and an unknown name is a user
error that lists the known ones.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from meshloom.algorithms.own import OwnFunction
from meshloom.config.errors import UserError
from meshloom.config.own import OwnName

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A table of algorithms of one kind.

    Args:
        kind: what its entries are, for messages, such as ``policy loss``.
        setting: the setting that names an entry, for messages, such as ``algorithm.policy_loss``.
        wrap: makes an entry of a name ``file.py:function`` and that function.
    """

    def __init__(self, kind: str, setting: str, wrap: Callable[[str, OwnFunction], T]) -> None:
        self.kind, self.setting, self._wrap = kind, setting, wrap
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Enter ``entry`` under ``name``.

        Raises:
            ValueError: if the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def find(self, name: str) -> T:
        """The entry called ``name``, or one of a function of the user's own.

        Raises:
            UserError: if there is none; it says the nearest name and all names. As ``own.OwnFunction``.
        """
        if OwnName.of(name) is not None:
            return self._wrap(name, OwnFunction(name, self.setting))
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=1)
        fix = (f"did you mean {near[0]}? " if near else "") + "known: " + ", ".join(sorted(self._entries))
        raise UserError(f"no {self.kind} is called {name!r}", where=self.setting, fix=fix)

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
