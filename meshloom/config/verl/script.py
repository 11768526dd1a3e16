"""The text of a shell script, as far as it says which command starts verl and with which words.

Owns: statements, branches, assignments, and which statement is the launch. Refuses to know: what overrides mean. Always holds:
nothing is run; a branch is taken only where its condition follows from the text, and a variable that hangs on another condition
has no value.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from meshloom.config.verl.shell_words import DECLARES, Scope, behind, behind_bracket

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(
    r"(?:(?:export|local|declare|readonly|typeset)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=\((.*)\)", re.DOTALL
)
_HEREDOC = re.compile(r"<<-?\s*(['\"\\]?)(\w+)\1")
_ARM = re.compile(r"\(?([^()\s][^()]*)\)\s*(.*)", re.DOTALL)
_CONTINUED = re.compile(r"\\[ \t]*\n")
"""The end of a line that goes on; blanks behind the backslash are forgiven."""
_OPERATORS = re.compile(r"&&|\|\||;;&?|[;&|\n]")
_WITHOUT_VALUE = re.compile(r"\$|`")
_CHANGING = re.compile(r"(let\s|\()|(?:read|unset|mapfile|readarray|getopts)\s")
"""What changes variables besides assignments: arithmetic, and commands."""
_COUNTED = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")
_REDIRECTION = re.compile(r"(\d|&)?(>>?|<)(&?\S*)")


@dataclass
class Found:
    """What a text has.

    Args:
        scope: its variables at the end.
        launches: the words of each statement that starts a program of verl's.
        overrides: statements that are nothing but overrides: all there is where no program is named, and else lost behind a
            line that ends the launch.
    """

    scope: Scope = field(default_factory=Scope)
    launches: list[list[str]] = field(default_factory=list)
    overrides: list[list[str]] = field(default_factory=list)


@dataclass
class _Frame:
    """A branching that is not at its end.

    Args:
        kind: ``if``, ``case`` or ``loop``.
        value: whether this branch is taken; none if that is not known.
        was_taken: whether one before it was.
        in_condition: between ``if`` and ``then``.
        subject: what ``case`` compares.
    """

    kind: str
    value: bool | None = None
    was_taken: bool | None = False
    in_condition: bool = False
    subject: str = ""

    def branch(self) -> bool | None:
        """Whether its statements are carried out."""
        if self.was_taken is True or self.value is False:
            return False
        return self.value if self.was_taken is False else None

    def next(self) -> None:
        """Leave a branch for the next one."""
        taken = self.branch()
        self.was_taken = True if taken or self.was_taken else None if taken is None else self.was_taken
        self.value = True


def read_script(text: str, is_launch: Callable[[Sequence[str]], bool], is_override: Callable[[str], bool]) -> Found:
    """Read a text.

    Args:
        text: of the script.
        is_launch: whether words start a program of verl's.
        is_override: whether a word is an override or an option of verl.

    Raises:
        ValueError: if a quote or bracket is not closed.
    """
    reader = _Reader(is_launch, is_override)
    reader.read(text)
    return reader.found


def _plain(text: str) -> str:
    """A text without comments, continued lines and what is fed to programs."""
    kept: list[str] = []
    place, ends = 0, list[str]()
    while place < len(text):
        here = text[place]
        if here == "\n" and ends:
            place += 1
            while ends:
                place = _behind_heredoc(text, place, ends.pop(0))
            kept.append("\n")
            continue
        if here == "#" and (place == 0 or text[place - 1].isspace() or text[place - 1] in ";&|("):
            line = text.find("\n", place)
            place = len(text) if line < 0 else line
            continue
        if match := _CONTINUED.match(text, place):
            kept.append(" ")
            place = match.end()
            continue
        if text.startswith("<<", place) and not text.startswith("<<<", place):
            ends += [match[2]] if (match := _HEREDOC.match(text, place)) else []
        end = behind(text, place)
        kept.append(text[place:end])
        place = end
    return "".join(kept)


def _behind_heredoc(text: str, place: int, end: str) -> int:
    found = re.compile(rf"^\s*{re.escape(end)}[ \t]*$", re.MULTILINE).search(text, place)
    return len(text) if found is None else min(found.end() + 1, len(text))


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Each simple command, with the sign in front of it."""
    place = start = 0
    sign = "\n"
    while place < len(text):
        if text[place] == "{" and _begins_group(text, start, place):
            place = behind_bracket(text, place)
            continue
        match = _OPERATORS.match(text, place)
        if match and not _inside(text, start, place, match[0]):
            yield sign, text[start:place].strip()
            sign, place = match[0], match.end()
            start = place
        elif text[place] == "(" and text[place - 1 : place] == "=":
            place = behind_bracket(text, place)
        else:
            place = behind(text, place)
    yield sign, text[start:].strip()


def _begins_group(text: str, start: int, place: int) -> bool:
    """Whether a bracket stands where a command could, and is no part of a word."""
    return text[place + 1 : place + 2].isspace() and text[start:place].split() in (
        [],
        ["if"],
        ["elif"],
        ["then"],
        ["!"],
    )


def _inside(text: str, start: int, place: int, sign: str) -> bool:
    """Whether a sign is a part of a redirection, of ``[[ … ]]`` or of a pattern of ``case``."""
    if sign in ("&", "|") and (text[place - 1 : place] == ">" or text[place + 1 : place + 2] == ">"):
        return True
    patterns = [one.split() for one in text[start:place].split("|")]
    if sign == "|" and re.match(r"\|[^()\n;&$`]*\)", text[place:]) and all(len(words) == 1 for words in patterns):
        return True
    before = text[start:place].split()
    return sign in ("&&", "||") and "[[" in before and "]]" not in before


class _Reader:
    def __init__(self, is_launch: Callable[[Sequence[str]], bool], is_override: Callable[[str], bool]) -> None:
        self.found = Found()
        self.scope = self.found.scope
        self.is_launch, self.is_override = is_launch, is_override
        self.frames: list[_Frame] = []
        self.last: bool | None = True

    def read(self, text: str) -> None:
        for sign, statement in _statements(_plain(text)):
            self.take(sign, statement)

    def take(self, sign: str, statement: str) -> None:
        statement = self._arm(statement)
        keyword, _, rest = statement.partition(" ")
        keyword, *more = keyword.split() or [""]
        rest = " ".join([*more, rest]).strip() if more else rest
        if keyword in ("if", "elif"):
            self._open(keyword)
            self._condition("\n", rest)
        elif keyword in ("then", "else", "do", "time", "nohup"):
            self._inner(keyword)
            self.take(sign, rest) if rest else None
        elif keyword in ("for", "while", "until", "select"):
            self._loop(rest)
        elif keyword == "case":
            self._case(rest)
        elif keyword in ("fi", "done", "esac"):
            self.frames.pop() if self.frames else None
        elif self.frames and self.frames[-1].in_condition:
            self._condition(sign, statement)
        elif statement:
            self._run(sign, statement.removeprefix("(").strip())

    def _open(self, keyword: str) -> None:
        if keyword == "if" or not self.frames:
            self.frames.append(_Frame("if"))
        else:
            self.frames[-1].next()
        self.frames[-1].in_condition = True

    def _condition(self, sign: str, statement: str) -> None:
        frame, words = self.frames[-1], self.scope.words(statement)
        if self.is_launch(words):
            self.found.launches.append(words)
        frame.value = _joined(frame.value, sign, self._test(statement))

    def _inner(self, keyword: str) -> None:
        if self.frames and keyword == "then":
            self.frames[-1].in_condition = False
        elif self.frames and keyword == "else":
            self.frames[-1].next()
        self.last = True

    def _loop(self, rest: str) -> None:
        name = rest.partition(" ")[0]
        self.scope.unknown.add(name)
        self.frames.append(_Frame("loop", value=True))

    def _case(self, rest: str) -> None:
        subject, _, first = f"{rest} ".partition(" in ")
        self.frames.append(_Frame("case", value=False, subject="".join(self.scope.words(subject))))
        self.take("\n", first.strip()) if first.strip() else None

    def _arm(self, statement: str) -> str:
        """What stands behind the pattern of a ``case``."""
        frame = self.frames[-1] if self.frames else None
        match = _ARM.fullmatch(statement)
        if frame is None or frame.kind != "case" or match is None or "=(" in statement.partition(")")[0]:
            return statement
        frame.next()
        patterns = [self.scope.text(one.strip()) for one in match[1].split("|")]
        known = not _WITHOUT_VALUE.search(frame.subject)
        frame.value = any(fnmatchcase(frame.subject, one) for one in patterns) if known else None
        return match[2]

    def _is_carried_out(self) -> bool | None:
        branches = [frame.branch() for frame in self.frames]
        return False if False in branches else None if None in branches else True

    def _run(self, sign: str, statement: str) -> None:
        """Take one statement, if it is carried out."""
        does = self._is_carried_out()
        if sign in ("&&", "||"):
            wanted = self.last if sign == "&&" else None if self.last is None else not self.last
            does = False if wanted is False else None if wanted is None else does
        if does is False:
            return
        if statement.startswith("{") and statement.endswith("}"):
            self.frames.append(_Frame("group", value=does))
            self.read(statement[1:-1])
            self.frames.pop()
            return
        if any(frame.kind == "loop" for frame in self.frames) and _goes_on(statement):
            does = None  # nobody knows how often
        if match := _CHANGING.match(statement):
            self._change(statement, is_arithmetic=match[1] is not None, known=does is True)
            status: bool | None = None
        elif match := _ARRAY.fullmatch(statement):
            self._set_array(match, known=does is True)
            status = True
        elif (status := self._test(statement)) is None:
            status = self._take_words(self.scope.words(statement), known=does is True)
        self.last = status if does is True else None

    def _take_words(self, words: list[str], *, known: bool) -> bool | None:
        """Whether the statement succeeds, as far as it matters here."""
        names = [word for word in words if word not in DECLARES and not word.startswith("-")]
        matches = [_ASSIGNMENT.fullmatch(word) for word in names]
        plain = words[:1] and words[0] not in DECLARES and any(self.is_override(word) for word in words)
        if names and all(matches) and not plain:
            for match in filter(None, matches):
                self._set(match, known=known)
            return True
        words = _without_redirections(words)
        inner = next((word for flag, word in zip(words, words[1:], strict=False) if re.fullmatch("-l?i?c", flag)), "")
        if len(inner.split()) > 1 and self.is_launch(inner.split()):
            self.read(inner)
        elif self.is_launch(words):
            self.found.launches.append(words)
        elif words and all(self.is_override(word) for word in words):
            self.found.overrides.append(words)
        return None if words[:1] in (["grep"], ["command"], ["["], ["[["], ["test"]) else True

    def _set(self, match: re.Match[str], *, known: bool) -> None:
        name, adds, value = match[1], match[2], match[3]
        if known and not (adds and name in self.scope.unknown):
            self.scope.variables[name] = (self.scope.variables.get(name, "") if adds else "") + value
            self.scope.unknown.discard(name)
        elif not known and (adds or self.scope.variables.get(name) != value):
            self.scope.unknown.add(name)
            self.scope.variables.pop(name, None)

    def _change(self, statement: str, *, is_arithmetic: bool, known: bool) -> None:
        found = re.findall(_COUNTED, statement) if is_arithmetic else [(name, "") for name in statement.split()[1:]]
        for name in filter(str.isidentifier, map("".join, found)):
            self.scope.variables.pop(name, None)
            self.scope.arrays.pop(name, None)
            if not (known and statement.startswith("unset")):
                self.scope.unknown.add(name)

    def _set_array(self, match: re.Match[str], *, known: bool) -> None:
        name, adds, words = match[1], match[2], self.scope.words(match[3])
        if not known:
            self.scope.unknown.add(name)
            return
        self.scope.arrays[name] = [*(self.scope.arrays.get(name, []) if adds else []), *words]
        self.scope.unknown -= set() if adds else {name}

    def _test(self, statement: str) -> bool | None:
        """Whether a condition holds; none if that does not follow from the text."""
        statement, negated = statement.removeprefix("!").strip(), statement.startswith("!")
        if statement.startswith("{") and statement.endswith("}"):
            value = None
            for sign, inner in _statements(statement[1:-1]):
                value = _joined(value, sign, self._test(inner)) if inner else value
        else:
            value = _holds(self.scope.words(statement))
        return value if value is None or not negated else not value


def _goes_on(statement: str) -> bool:
    """Whether an assignment reads what it writes, so that its value hangs on how often it is made."""
    match = _ASSIGNMENT.fullmatch(re.sub(r"^(?:export|local|declare)\s+", "", statement))
    return match is not None and (
        bool(match[2]) or ("$" in match[3] and re.search(rf"\b{match[1]}\b", match[3]) is not None)
    )


def _joined(before: bool | None, sign: str, value: bool | None) -> bool | None:
    """Whether two conditions hold together, or one of them."""
    if sign == "&&":
        return False if False in (before, value) else None if None in (before, value) else True
    if sign == "||":
        return True if True in (before, value) else None if None in (before, value) else False
    return value


def _holds(words: list[str]) -> bool | None:
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
            return _joined(_holds(["test", *words[:place]]), sign, _holds(["test", *words[place + 1 :]]))
    if any(_WITHOUT_VALUE.search(word) for word in words):
        return None
    if words[:1] == ["!"]:
        value = _holds(["test", *words[1:]])
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


def _without_redirections(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skips = False
    for word in words:
        match = _REDIRECTION.fullmatch(word)
        if match is None and not skips:
            kept.append(word)
        skips = match is not None and not match[3]
    return kept
