"""What a host object offers to the controller.

Owns: the marks on public methods, and what a running verb may tell before it returns. Refuses to know: processes. Always
holds: only a marked method can be called from outside; verbs run one after the other, notes beside them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from meshloom.fabric.dispatch import Collect, Dispatch, from_all, replicate

F = TypeVar("F", bound=Callable[..., Any])
_MARK, _NOTE_MARK = "__meshloom_verb__", "__meshloom_note__"


@dataclass(frozen=True)
class Verb:
    """How a verb's arguments go to the ranks of a group, and how one value is made of their results."""

    dispatch: Dispatch = replicate
    collect: Collect = from_all


def verb(*, dispatch: Dispatch = replicate, collect: Collect = from_all) -> Callable[[F], F]:
    """Mark a public method as a verb.

    Args:
        dispatch: how a group's call gives each rank its arguments.
        collect: how a group's call makes one value of the ranks' results.
    """

    def mark(method: F) -> F:
        setattr(method, _MARK, Verb(dispatch, collect))
        return method

    return mark


def verbs_of(kind: type) -> dict[str, Verb]:
    """The verbs of a class by name, inherited ones included."""
    found: dict[str, Verb] = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            declared = vars(member).get(_MARK) if callable(member) and hasattr(member, "__dict__") else None
            if isinstance(declared, Verb):
                found[name] = declared
            elif name in found and callable(member) is False:
                del found[name]
    return found


def note(method: F) -> F:
    """Mark a public method as a note: called as it comes, on another thread than the verb that runs, without an answer."""
    setattr(method, _NOTE_MARK, True)
    return method


def takes_note(kind: type, name: str) -> bool:
    """Whether a class has a note of a name."""
    return any(_NOTE_MARK in vars(vars(base)[name]) for base in kind.__mro__ if callable(vars(base).get(name)))


class _Running(threading.local):
    tell: Callable[[Any], None] | None = None


_running = _Running()


def emit(value: Any) -> None:
    """Send a value to the controller from within a verb, before it returns; ``Call.events`` yields it there.

    Outside of a verb it does nothing, so that code which emits also runs in one process.
    """
    teller()(value)


def teller() -> Callable[[Any], None]:
    """What ``emit`` does in the verb that runs, for a thread that the verb waits for."""
    return _running.tell or _tell_nobody


def _tell_nobody(value: Any) -> None:
    pass


class telling:  # noqa: N801
    """Within the block, ``emit`` of this thread goes to ``tell``."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        _running.tell = self._tell

    def __exit__(self, *_: object) -> None:
        _running.tell = None
