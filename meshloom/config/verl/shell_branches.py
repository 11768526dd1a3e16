"""Branches of a shell script, and whether their conditions hold, as far as its text says so.

Owns: ``[ … ]``, ``[[ … ]]``, ``test``, ``true`` and ``false``; which branch of several is taken. Refuses to know: what hangs on
them. Always holds: what hangs on the machine, or on a variable without a value, is not known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from meshloom.config.verl.shell_words import Scope

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
WITHOUT_VALUE = re.compile(r"\$|`")
ASKS = (
    "[",
    "[[",
    "test",
    "command",
    "which",
    "type",
    "hash",
    "grep",
    "ls",
    "pgrep",
    "curl",
    "ping",
    "nc",
    "nvidia-smi",
)
"""Commands that are carried out to see whether they succeed."""


@dataclass
class Frame:
    """A branching that is not at its end.

    Args:
        kind: ``if``, ``case``, ``loop`` or ``group``.
        value: whether this branch is taken; none if that is not known.
        was_taken: whether one before it was.
        in_condition: between ``if`` and ``then``.
        subject: what ``case`` compares; the variable of a loop.
        before_arm: whether a pattern of ``case`` comes next.
        values: of a loop's variable, as they are written.
        is_until: whether it is a loop that ends once its condition holds.
        is_fed: whether it reads from a pipe, and so is a process of its own.
        outside: the variables in front of it.
        before: the variables in front of a branch of which nobody knows whether it is taken, while it is read.
        changed: names that such branches have changed.
    """

    kind: str
    value: bool | None = None
    was_taken: bool | None = False
    in_condition: bool = False
    subject: str = ""
    before_arm: bool = False
    values: str = ""
    is_until: bool = False
    is_fed: bool = False
    outside: Scope = field(default_factory=Scope)
    before: Scope | None = None
    changed: set[str] = field(default_factory=set)

    def branch(self) -> bool | None:
        """Whether its statements are carried out."""
        if self.was_taken is True or self.value is False:
            return False
        return self.value if self.was_taken is False else None

    def begin_loop(self) -> None:
        """Leave the condition of a loop, whose statements are carried out unless it ends the loop at once."""
        if self.in_condition:
            self.value = self.value is None or self.value is not self.is_until
        self.in_condition = False

    def next(self) -> None:
        """Leave a branch for the next one."""
        taken = self.branch()
        self.was_taken = True if taken or self.was_taken else None if taken is None else self.was_taken
        self.value = True


def goes_on(statement: str) -> bool:
    """Whether an assignment reads what it writes, so that its value hangs on how often it is made."""
    match = ASSIGNMENT.fullmatch(re.sub(r"^(?:export|local|declare)\s+", "", statement))
    return match is not None and (
        bool(match[2]) or ("$" in match[3] and re.search(rf"\b{match[1]}\b", match[3]) is not None)
    )


def joined(before: bool | None, sign: str, value: bool | None) -> bool | None:
    """Whether two conditions hold together, or one of them."""
    if sign == "&&":
        return False if False in (before, value) else None if None in (before, value) else True
    if sign == "||":
        return True if True in (before, value) else None if None in (before, value) else False
    return value


def holds(words: list[str]) -> bool | None:
    """Whether the words of a command are a condition that holds; none if that does not follow from them."""
    if words in (["true"], [":"]):
        return True
    if words == ["false"]:
        return False
    if words[:1] not in (["["], ["[["], ["test"]):
        return None
    words = words[1 : None if words[0] == "test" else -1]
    for sign in ("||", "&&"):
        if sign in words:
            place = words.index(sign)
            return joined(holds(["test", *words[:place]]), sign, holds(["test", *words[place + 1 :]]))
    if any(WITHOUT_VALUE.search(word) for word in words):
        return None
    if words[:1] == ["!"]:
        value = holds(["test", *words[1:]])
        return value if value is None else not value
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    return _compares(*words) if len(words) == 3 else None


_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
}


def _compares(left: str, sign: str, right: str) -> bool | None:
    if sign in ("=", "==", "!="):
        return fnmatchcase(left, right) == (sign != "!=")
    if sign in _NUMBERS and re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
        return _NUMBERS[sign](int(left), int(right))
    return None
