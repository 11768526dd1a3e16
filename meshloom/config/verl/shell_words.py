"""What bash makes of a piece of text: quotes, variables, defaults, arrays.

Owns: words and their values, without running anything. Refuses to know: which statements run (``script``), what a verl command
is. Always holds: what has no value here is kept as it stands, so that it can be named; nothing is looked up outside the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from meshloom.config.verl.shell_arithmetic import computed

_CASE = re.compile(r"case\s.*?\sesac\b", re.DOTALL)
"""Its patterns end with brackets that none opens."""
_CLOSING = {"(": ")", "{": "}"}
_NAME = re.compile(r"\w+|[@*#?$!-]")
_PARAMETER = re.compile(r"(\w+)(?:\[([@*]|\d+)\])?(:?[-=+?]|##?|%%?|,,?|\^\^?)?(.*)", re.DOTALL)
_LENGTH = re.compile(r"#(\w+)(\[[@*]\])?")
_ASSIGNS = re.compile(r"[A-Za-z_]\w*\+?=")
NO_WORDS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")
DECLARES = ("export", "local", "declare", "readonly", "typeset")
"""Words in front of assignments."""


def behind(text: str, place: int) -> int:
    """The place behind what begins at ``place``: a quoted text, a substitution, an escaped or a plain character.

    Raises:
        ValueError: if it is not closed.
    """
    here = text[place]
    if here == "\\":
        return min(place + 2, len(text))
    if here in "'`":
        return _found(text, here, place + 1) + 1
    if here == '"':
        return _behind_quoted(text, place + 1)
    if (here == "$" and text[place + 1 : place + 2] in ("(", "{")) or text[place : place + 2] in ("<(", ">("):
        return behind_bracket(text, place + 1)
    return place + 1


def behind_bracket(text: str, place: int) -> int:
    """The place behind the bracket that closes the one at ``place``.

    Raises:
        ValueError: if none does.
    """
    opening, closing, depth = text[place], _CLOSING[text[place]], 0
    while place < len(text):
        if (
            opening == "("
            and (match := _CASE.match(text, place))
            and text[place - 1 : place] in (" ", "\t", "\n", ";", "(")
        ):
            place = match.end()
            continue
        if opening == "(" and text[place] == "#" and text[place - 1] in " \t\n;(":
            place += len(text[place:].partition("\n")[0])
            continue
        depth += (text[place] == opening) - (text[place] == closing)
        place = behind(text, place)
        if not depth:
            return place
    raise ValueError(f"the bracket {opening} is not closed")


def _behind_quoted(text: str, place: int) -> int:
    while place < len(text) and text[place] != '"':
        place = place + 1 if text[place] == "'" else behind(text, place)
    if place >= len(text):
        raise ValueError('a quote " is not closed')
    return place + 1


def _found(text: str, what: str, place: int) -> int:
    end = text.find(what, place)
    if end < 0:
        raise ValueError(f"the quote {what} in front of {text[place : place + 40].strip()!r} is not closed")
    return end


@dataclass
class Scope:
    """The variables of a text.

    Args:
        variables: with a value.
        arrays: the words of each.
        unknown: names whose value depends on something that is not known here.
        exported: names that other programs see.
        exports_all: whether they see all.
        arguments: of the text or of a function; none if they are not known.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    exports_all: bool = False
    arguments: list[str] | None = None

    def copy(self) -> "Scope":
        """The same variables, whose changes stay in it."""
        arguments = None if self.arguments is None else [*self.arguments]
        return Scope(
            dict(self.variables), dict(self.arrays), set(self.unknown), set(self.exported), self.exports_all, arguments
        )

    def of_child(self, arguments: list[str], in_front: Sequence[str], *, is_elsewhere: bool) -> "Scope":
        """What another shell has of it.

        Args:
            arguments: of that shell.
            in_front: assignments that are made for it.
            is_elsewhere: whether it is on another machine, which has nothing of it.
        """
        names = set() if is_elsewhere else set(self.variables) if self.exports_all else self.exported
        child = Scope(exported=set(names), arguments=arguments or None)
        child.variables = {name: value for name, value in self.variables.items() if name in names}
        child.unknown = self.unknown & names
        for name, _, value in (word.partition("=") for word in in_front):
            child.assign(name, value)
        return child

    def assign(self, name: str, value: str) -> None:
        """Give a variable a value."""
        self.variables[name] = value
        self.arrays.pop(name, None)
        self.unknown.discard(name)

    def forget(self, name: str) -> None:
        """Let a variable have no value that is known."""
        self.unknown.add(name)
        self.variables.pop(name, None)
        self.arrays.pop(name, None)

    def take_back(self, before: "Scope") -> set[str]:
        """Be as a scope was before; the names that have changed since."""
        found = set(self.unknown ^ before.unknown)
        for own, its in ((self.variables, before.variables), (self.arrays, before.arrays)):
            found |= {name for name in {*own, *its} if own.get(name) != its.get(name)}
        same_arguments = self.arguments == before.arguments
        vars(self).update(vars(before.copy()))
        self.arguments = self.arguments if same_arguments else None
        return found

    def take(self, name: str, other: "Scope") -> None:
        """Let a variable be what it is in another scope."""
        for own, its in ((self.variables, other.variables), (self.arrays, other.arrays)):
            own.pop(name, None)
            own.update({name: its[name]} if name in its else {})  # type: ignore[dict-item]
        self.unknown.discard(name)
        self.unknown |= other.unknown & {name}

    def document(self, text: str) -> str:
        """A here-document with the values of variables in it."""
        return _Words(text, self, splits=False).document()

    def words(self, text: str) -> list[str]:
        """The words of a statement.

        Raises:
            ValueError: if a quote or bracket is not closed.
        """
        return _Words(text, self, splits=True).read()

    def text(self, text: str) -> str:
        """A text as one word, blanks included."""
        return "".join(_Words(text, self, splits=False).read())

    def substituted(self, raw: str) -> str | list[str] | None:
        """The value of ``$A``, ``${A…}``, ``$(…)`` or ``$((…))``; words of an array; none if it has no value here."""
        if NO_WORDS.fullmatch(raw):
            first = int(match[1]) - 1 if (match := re.search(r":(\d+)", raw)) else 0
            return [] if self.arguments is None else self.arguments[max(0, first) :]
        if raw.startswith("$(("):
            return self._arithmetic(raw[3:-2])
        if raw.startswith("${"):
            return self._parameter(raw[2:-1])
        if raw.startswith(("$(", "`")):
            return self._command(raw.strip("`") if raw.startswith("`") else raw[2:-1])
        return self._value(raw[1:])

    def _value(self, name: str) -> str | None:
        if name in self.unknown:
            return None
        if self.arguments is not None and (name == "#" or (name.isdecimal() and name != "0")):
            arguments = self.arguments
            return str(len(arguments)) if name == "#" else (arguments[int(name) - 1 :] or [""])[0]
        if name in self.arrays:
            return next(iter(self.arrays[name]), "")
        return self.variables.get(name, {"HOME": "~", "PWD": "."}.get(name))

    def _array(self, name: str, index: str) -> str | list[str] | None:
        if name in self.unknown:
            return None
        found = self.arrays.get(name, [])
        if index.isdigit():
            return found[int(index)] if int(index) < len(found) else None
        return self.variables.get("IFS", " ")[:1].join(found) if index == "*" else list(found)

    def _parameter(self, inside: str) -> str | list[str] | None:
        if match := _LENGTH.fullmatch(inside):
            found = self._array(match[1], "@") if match[2] else self._value(match[1])
            return None if found is None else str(len(found))
        match = _PARAMETER.fullmatch(inside)
        if match is None or (match[4] and not match[3]):
            return None
        name, index, sign, rest = match[1], match[2], match[3] or "", match[4]
        value = self._array(name, index) if index else self._value(name)
        if not sign or isinstance(value, list) or name in self.unknown:
            return value
        if sign[-1] in "-=":
            if value is not None and (value or ":" not in sign):
                return value
            default = self.text(rest)
            if sign[-1] == "=":
                self.assign(name, default)
            return default
        if sign[-1] == "+":
            return self.text(rest) if value else ""
        if value is None or sign[-1] == "?":
            return value
        return _changed(value, sign, self.text(rest))

    def _command(self, inside: str) -> str | None:
        if inside.lstrip().startswith("#"):
            return ""
        words = self.words(inside)
        if words == ["pwd"]:
            return "."
        if (
            words[:1] == ["echo"]
            and not re.search(r"[|;&<>$`]", " ".join(words))
            and words[1:2] not in (["-n"], ["-e"])
        ):
            return " ".join(words[1:])
        if len(words) == 2 and words[0] in ("basename", "dirname") and "$" not in words[1]:
            path = PurePosixPath(words[1])
            return path.name if words[0] == "basename" else str(path.parent)
        return None

    def _arithmetic(self, inside: str) -> str | None:
        inside = self.text(inside)
        names = {name: self._value(name) for name in re.findall(r"[A-Za-z_]\w*", inside)}
        if None in names.values():
            return None
        text = re.sub(r"[A-Za-z_]\w*", lambda match: f"({names[match[0]]})", inside)
        return computed(text)


def _changed(value: str, sign: str, pattern: str) -> str:
    """A value in other letters, or without the end that fits a pattern."""
    if sign[0] in ",^":
        change = str.lower if sign[0] == "," else str.upper
        return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
    places = range(len(value) + 1)
    if sign[0] == "#":
        cuts = [place for place in places if fnmatchcase(value[:place], pattern)]
        return value[(max(cuts) if len(sign) == 2 else min(cuts)) :] if cuts else value
    cuts = [place for place in places if fnmatchcase(value[place:], pattern)]
    return value[: (min(cuts) if len(sign) == 2 else max(cuts))] if cuts else value


class _Words:
    """Reads words from the left.

    Args:
        splits: whether blanks end a word, and unquoted values fall apart at theirs.
    """

    def __init__(self, text: str, scope: Scope, *, splits: bool) -> None:
        self.text, self.scope, self.splits = text, scope, splits
        self.place, self.found = 0, list[str]()
        self.word: str | None = None

    def read(self) -> list[str]:
        while self.place < len(self.text):
            here = self.text[self.place]
            if here.isspace() and self.splits:
                self._end()
                self.place += 1
            elif here == "'":
                self._add(self._taken()[1:-1])
            elif here == '"':
                self._quoted()
            elif here == "\\":
                self._add(self._taken()[1:].replace("\n", ""))
            elif here in "$`":
                self._substitute(quoted=False)
            else:
                self._add(self._taken())
        self._end()
        return self.found

    def _taken(self) -> str:
        start, self.place = self.place, behind(self.text, self.place)
        return self.text[start : self.place]

    def _add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def _end(self) -> None:
        if self.word is not None:
            self.found.append(self.word)
        self.word = None

    def document(self) -> str:
        """The text of a here-document, in which quotes are characters."""
        self._inside(len(self.text), escaped="$`\\")
        return self.word or ""

    def _quoted(self) -> None:
        end, before = behind(self.text, self.place) - 1, self.word
        self.place += 1
        self._add("")
        is_none = self._inside(end, escaped='"$`\\')
        self.place = end + 1
        if is_none and before is None and not self.word:
            self.word = None

    def _inside(self, end: int, *, escaped: str) -> bool:
        """Whether something up to a place stands for no words at all."""
        is_none = False
        while self.place < end:
            here = self.text[self.place]
            if here in "$`":
                is_none |= self._substitute(quoted=True)
            elif here == "\\":
                found = self._taken()
                self._add("" if found == "\\\n" else found[1:] if found[1:] in escaped else found)
            else:
                self._add(here)
                self.place += 1
        return is_none

    def _substitute(self, *, quoted: bool) -> bool:
        """Whether it stands for no words at all."""
        raw = self._raw()
        value = self.scope.substituted(raw)
        if isinstance(value, list):
            self._add_several(value)
        elif value is None or quoted or not self._splits_values() or "$(" in value or "`" in value:
            self._add(raw if value is None else value)
        else:
            self._add_several(value.split() if value.strip() == value else ["", *value.split(), ""])
        return value == []

    def _raw(self) -> str:
        """The substitution at the place; a dollar alone stays a character."""
        if self.text[self.place] == "$" and self.text[self.place + 1 : self.place + 2] not in ("(", "{"):
            match = _NAME.match(self.text, self.place + 1)
            start, self.place = self.place, match.end() if match else self.place + 1
            return self.text[start : self.place]
        return self._taken()

    def _add_several(self, words: list[str]) -> None:
        for number, word in enumerate(words):
            self._end() if number else None
            self._add(word) if word else None

    def _splits_values(self) -> bool:
        """Whether a value falls apart at its blanks: not that of an assignment, nor one within ``[[ … ]]``."""
        return self.splits and not self._assigns() and (self.found[:1] != ["[["] or "]]" in self.found)

    def _assigns(self) -> bool:
        """Whether the word is an assignment."""
        before = all(_ASSIGNS.match(word) or word in DECLARES for word in self.found)
        return before and _ASSIGNS.match(self.word or "") is not None
