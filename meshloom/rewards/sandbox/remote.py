"""Objects of a program, used by tests that run in another process.

Owns: the talk between both, and which values cross as copies. Refuses to know: what is tested. Always holds: only plain values
cross (none, booleans, numbers, text, bytes, lists, tuples, sets, dicts); their comparison happens where the tests are, so that
no object of the program can claim to equal anything. All other objects stay and are named by a number.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

_HEADER = struct.Struct(">I")
_MESSAGE_BYTES = 2**24
_ITEMS = 100_000
"""How much of an endless iterator is read."""
_LARGE = 100_000
"""Of a number, or of parts of a value: from here on an answer may be what makes the tests long."""
_TOLD_S = 0.1


class ProgramGone(Exception):
    """The program's process has ended, or does not speak as it should."""


class CannotCross(Exception):
    """The tests pass something that no message can hold: the tests do not fit, whatever the program is."""


class RemoteError(Exception):
    """An exception of the program whose class the tests do not know."""


def send(channel: int, message: Any) -> None:
    data = json.dumps(message).encode()
    if len(data) > _MESSAGE_BYTES:
        raise ValueError(f"a value of more than {_MESSAGE_BYTES} bytes")
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(channel, view) :]


def receive(channel: int) -> Any:
    """The next message.

    Raises:
        EOFError: if the other end has closed.
        ValueError: if it is none.
    """
    size = _HEADER.unpack(_exactly(channel, _HEADER.size))[0]
    if size > _MESSAGE_BYTES:
        raise ValueError("a message that is too long")
    return json.loads(_exactly(channel, size))


def _exactly(channel: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(channel, min(size - len(data), 2**16))
        if not chunk:
            raise EOFError("the other end has closed")
        data += chunk
    return bytes(data)


def pack(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value as JSON that keeps types; ``other`` gives what stands for an object that does not cross."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if kind is list:
        return [pack(one, other) for one in value]
    for tag, plain in (("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, plain):
            return {tag: [pack(one, other) for one in value]}
    if isinstance(value, dict):
        return {"d": [[pack(key, other), pack(one, other)] for key, one in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bool | int | float | str | list):  # of a class of the program's own
        plain_kind = next(base for base in (bool, int, float, str, list) if isinstance(value, base))
        return pack(plain_kind(value), other)
    if callable(item := getattr(kind, "item", None)) and getattr(value, "ndim", 1) == 0:  # a number of numpy
        return pack(item(value), other)
    return other(value)


def unpack(data: Any, other: Callable[[Any], Any]) -> Any:
    """What ``pack`` made, as plain values again."""
    if isinstance(data, list):
        return [unpack(one, other) for one in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    if tag == "d":
        return {unpack(key, other): unpack(one, other) for key, one in content}
    if tag in "tsz" and tag:
        return {"t": tuple, "s": set, "z": frozenset}[tag](unpack(one, other) for one in content)
    if tag == "f":
        return float(content)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "c":
        return complex(float(content[0]), float(content[1]))
    return other(data)


class Served:
    """The program's side: does what is asked, until the channel closes.

    Args:
        names: the program's global names.
        channel: descriptor.
        find: finds the function that is tested.
    """

    def __init__(self, names: dict[str, Any], channel: int, find: Callable[[dict[str, Any], str], Any]) -> None:
        self._names, self._channel, self._find = names, channel, find
        self._objects: list[Any] = []

    def until_closed(self) -> None:
        while True:
            try:
                request = receive(self._channel)
            except EOFError:
                return
            try:
                answer = ["value", *self._answer(request)]
                send(self._channel, answer)
            except Exception as error:
                send(self._channel, ["error", type(error).__name__, str(error)[:500]])

    def _answer(self, request: list[Any]) -> tuple[Any, Any]:
        """The packed result, and the arguments as the call left them."""
        verb, subject, *rest = request
        if verb == "has":
            return [name for name in subject if name in self._names], None
        if verb == "find":
            return self._pack(self._find(self._names, subject)), None
        target, arguments = self._objects[subject], [self._unpack(one) for one in rest]
        if verb == "call":
            positional, named = arguments
            result = target(*positional, **named)
            return self._pack(result), self._pack(positional)
        if verb == "iterate":
            return self._pack([one for one, _ in zip(target, range(_ITEMS), strict=False)]), None
        verbs: dict[str, Callable[..., Any]] = {
            "attribute": getattr,
            "set": setattr,
            "item": lambda holder, key: holder[key],
            "length": len,
            "text": str,
            "truth": bool,
        }
        return self._pack(verbs[verb](target, *arguments)), None

    def _pack(self, value: Any) -> Any:
        return pack(value, self._keep)

    def _keep(self, value: Any) -> dict[str, int]:
        self._objects.append(value)
        return {"h": len(self._objects) - 1}

    def _unpack(self, data: Any) -> Any:
        return unpack(data, lambda one: self._objects[one["h"]])


class Program:
    """The tests' side of the channel.

    Args:
        channel: descriptor.
        errors: classes of exceptions that the tests know.
        tell: told ``waited_s`` as it grows, and ``large`` once, so that it is known however the tests end.
    """

    def __init__(self, channel: int, errors: dict[str, type[BaseException]], tell: Callable[..., None]) -> None:
        self._channel, self._errors, self._tell = channel, errors, tell
        self._told_s = 0.0
        self.waited_s, self.large, self.fault = 0.0, False, ""
        """Seconds spent on answers; whether one was large; why the tests do not fit any program."""

    def ask(self, verb: str, subject: Any, *arguments: Any) -> Any:
        """Ask, and wait for the answer.

        Raises:
            ProgramGone: if the program has ended or answers nonsense; else what the program raised.
        """
        packed = [pack(one, self._number) for one in arguments]
        began = monotonic()
        try:
            send(self._channel, [verb, subject, *packed])
            kind, first, second = receive(self._channel)
            if not self.large and _is_large((first, second)):
                self.note_large()
            value, after = (None, None) if kind == "error" else (self._unpack(first), self._unpack(second))
        except (EOFError, ValueError, OSError, RecursionError, KeyError, TypeError) as error:
            raise ProgramGone(f"the program gave no answer: {error}") from error
        finally:
            self._note_wait(monotonic() - began)
        if kind == "error":
            raise self._errors.get(str(first), RemoteError)(str(second))
        if verb == "call" and isinstance(after, list):
            _take_over(arguments[0], after)
        return value

    def has(self, names: list[str]) -> list[str]:
        found = self.ask("has", names)
        return [name for name in found if name in names]

    def find(self, name: str) -> Any:
        return self.ask("find", name)

    def note_large(self) -> None:
        """From now on answers may be what makes the tests long."""
        if not self.large:
            self.large = True
            self._tell(large=True)

    def _note_wait(self, seconds: float) -> None:
        self.waited_s += seconds
        if self.waited_s > self._told_s + _TOLD_S:
            self._told_s = self.waited_s
            self._tell(waited_s=self.waited_s)

    def _unpack(self, data: Any) -> Any:
        return unpack(data, self._remote)

    def _remote(self, data: Any) -> "Remote":
        return Remote(self, int(data["h"]))

    def _number(self, value: Any) -> dict[str, int]:
        if isinstance(value, Remote):
            return {"h": value._number}
        self.fault = f"the tests pass a {type(value).__name__}, which cannot cross to the program"
        raise CannotCross(self.fault)


def _is_large(answer: Any) -> bool:
    """Whether a packed value has a great number in it, or many parts."""
    left, num_parts = [answer], 0
    while left:
        part = left.pop()
        num_parts += len(part) if isinstance(part, str | list | tuple | dict) else 1
        if num_parts > _LARGE or isinstance(part, int | float) and abs(part) > _LARGE:
            return True
        left += part if isinstance(part, list | tuple) else part.values() if isinstance(part, dict) else ()
    return False


def _take_over(before: Any, after: list[Any]) -> None:
    """What a call changed in its arguments, changed in the tests' own."""
    for mine, theirs in zip(before, after, strict=False):
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif isinstance(mine, dict) and isinstance(theirs, dict) or isinstance(mine, set) and isinstance(theirs, set):
            mine.clear()
            mine.update(theirs)  # type: ignore[arg-type]


class Remote:
    """An object of the program. Equal only to itself. Python's special names are never the program's."""

    __slots__ = ("_number", "_program")

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask("call", self._number, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith(
            "__"
        ):  # by these numpy and others take what they are told for memory
            raise AttributeError(f"an object of the program has no {name} here")
        return self._program.ask("attribute", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("set", self._number, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("item", self._number, key)

    def __len__(self) -> int:
        return self._program.ask("length", self._number)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("iterate", self._number))

    def __str__(self) -> str:
        return self._program.ask("text", self._number)

    def __bool__(self) -> bool:
        return self._program.ask("truth", self._number) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)
