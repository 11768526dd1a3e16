"""The text of a shell script, as far as it says which command starts verl and with which words.

Owns: branches, loops, functions, assignments, and which statements are launches. Refuses to know: how a text falls into
statements (``shell_text``), which of the launches is meant (``launches``), what overrides mean. Always holds: nothing is run; a
branch is taken only where its condition follows from the text, and a variable that hangs on another condition has no value;
what a subshell or another shell assigns stays in it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, pairwise

from meshloom.config.verl.launches import Found, Launch
from meshloom.config.verl.other_shells import (
    asked_for_each,
    documents_in,
    given_to_shell,
    read_by_shell,
    without_redirections,
)
from meshloom.config.verl.shell_branches import ASKS, ASSIGNMENT, WITHOUT_VALUE, Frame, goes_on, holds, joined
from meshloom.config.verl.shell_changes import array_of, changes, set_array
from meshloom.config.verl.shell_text import Body, Document, body_of, function_of, plain, statements
from meshloom.config.verl.shell_words import DECLARES, NO_WORDS, Scope

_ARM = re.compile(r"\(?\s*([^()\s][^()]*)\)\s*(.*)", re.DOTALL)
_DEEPEST = 12
"""Functions and shells within each other that are followed."""


def read_script(text: str, is_launch: Callable[[Sequence[str]], bool], is_override: Callable[[str], bool]) -> Found:
    """Read a text.

    Args:
        text: of the script.
        is_launch: whether words start a program of verl's.
        is_override: whether a word is an override or an option of verl.

    Raises:
        ValueError: if a quote or bracket is not closed.
    """
    reader = _Reader(Found(), _Names(is_launch, is_override), Scope())
    reader.read(text)
    reader.found.scope, reader.found.end = reader.scope, reader.found.end if reader.ended else 0
    return reader.found


@dataclass
class _Names:
    """What all readers of a text know.

    Args:
        is_launch: whether words start a program of verl's.
        is_override: whether a word is an override or an option of verl.
        functions: that were defined.
        documents: here-documents.
        files: that the text writes, with what stands in them.
    """

    is_launch: Callable[[Sequence[str]], bool]
    is_override: Callable[[str], bool]
    functions: dict[str, Body] = field(default_factory=dict)
    documents: list[Document] = field(default_factory=list)
    files: dict[str, Document] = field(default_factory=dict)


class _Reader:
    """Reads statements one after the other.

    In a branch of which nobody knows whether it is taken, statements are read as if it were: a launch in it has the values that
    are given there. Behind it, what it has changed is not known.
    """

    def __init__(self, found: Found, names: _Names, scope: Scope) -> None:
        self.found, self.names, self.scope = found, names, scope
        self.frames: list[Frame] = []
        self.depth, self.line, self.called = 0, 1, 0
        self.is_sure = True
        self.last: bool | None = True
        self.ended = self.exited = self.is_fed = self.is_aside = self.passes_on = False
        self.locals: list[tuple[str, dict[str, Scope]]] = []

    def read(self, text: str, line: int = 1) -> None:
        before = self.line
        found = statements(plain(text, self.names.documents, line), line)
        for statement, after in pairwise(chain(found, [None])):
            if self.ended or statement is None:
                break
            self.line = statement.line
            self.is_fed, self.is_aside = statement.sign == "|", after is not None and after.sign in ("|", "&")
            self.take(statement.sign, statement.text)
        self.line = before

    def take(self, sign: str, statement: str) -> None:
        if self.frames and sign.startswith((";;", ";&")):
            self.frames[-1].before_arm = True
        statement = self._arm(statement)
        keyword, _, rest = statement.partition(" ")
        keyword, *more = keyword.split() or [""]
        rest = " ".join([*more, rest]).strip() if more else rest
        if keyword in ("if", "elif"):
            self._open(keyword)
            self._condition("\n", rest)
        elif keyword in ("then", "else", "do", "time", "nohup"):
            self._inner(keyword)
            self.take(sign, rest.strip()) if rest.strip() else None
        elif keyword in ("for", "select"):
            self._for(rest)
        elif keyword in ("while", "until"):
            self._while(rest, is_until=keyword == "until")
        elif keyword == "case":
            self._case(rest)
        elif keyword in ("fi", "done", "esac"):
            self._end_branches() if self.frames else None
        elif self.frames and self.frames[-1].in_condition:
            self._condition(sign, statement)
        elif statement:
            self._run(sign, statement)

    def _open(self, keyword: str) -> None:
        if keyword == "if" or not self.frames:
            self._enter(Frame("if"))
        else:
            self._next_branch()
        self.frames[-1].in_condition = True

    def _enter(self, frame: Frame) -> None:
        frame.outside, frame.is_fed = self.scope.copy(), self.is_fed
        self.frames.append(frame)

    def _next_branch(self) -> None:
        self._leave_branch()
        self.frames[-1].next()

    def _leave_branch(self) -> None:
        """Take back what a branch has changed of which nobody knows whether it is taken."""
        frame = self.frames[-1]
        if frame.before is not None:
            frame.changed |= self.scope.take_back(frame.before)
            frame.before = None

    def _end_branches(self) -> None:
        self._leave_branch()
        frame = self.frames.pop()
        for name in frame.changed:
            self.scope.forget(name)
        self.scope.take_back(frame.outside) if frame.is_fed or self.is_aside else None

    def _condition(self, sign: str, statement: str) -> None:
        frame = self.frames[-1]
        self._look_for_launch(statement)
        frame.value = joined(frame.value, sign, self._test(statement))

    def _look_for_launch(self, condition: str) -> None:
        """A program may be started where a condition stands."""
        condition = condition.removeprefix("!").strip()
        if self._is_carried_out() is False:
            return
        if (body := body_of(condition, self.line)) is not None:
            self._body(body) if body.is_subshell else None
            return
        words = self.scope.words(condition)
        if self.names.is_launch(words) or words[:1] and words[0] in self.names.functions:
            self._take_words(words)

    def _inner(self, keyword: str) -> None:
        if self.frames and keyword == "then":
            self.frames[-1].in_condition = False
        elif self.frames and keyword == "else":
            self._next_branch()
        elif self.frames and keyword == "do":
            self.frames[-1].begin_loop()
        self.last = True

    def _for(self, rest: str) -> None:
        """A loop over words: one word is the variable's value, several leave it without one."""
        name, _, written = rest.strip().partition(" ")
        name = name.lstrip("(").partition("=")[0].strip()
        words = self.scope.words(written.strip().removeprefix("in").strip())
        one = len(words) == 1 and not WITHOUT_VALUE.search(words[0]) and not re.search(r"[{*?]", words[0])
        if one and name.isidentifier() and self._is_carried_out():
            self.scope.assign(name, words[0])
        else:
            self.scope.unknown.add(name)
        values = ", ".join(words) if words and not rest.lstrip().startswith("(") else rest.strip()
        none = not words and written.strip().startswith("in") and not NO_WORDS.search(written)
        self._enter(Frame("loop", value=not none, subject="" if one else name, values=values))

    def _while(self, rest: str, *, is_until: bool) -> None:
        """A loop that goes on as long as its condition holds; one over arguments has none, as a text is given without any."""
        reads_arguments = self.scope.arguments is None and re.search(r"\$#|\$\{#\}|^getopts", rest) is not None
        self._enter(Frame("loop", True, reads_arguments, in_condition=True, is_until=is_until))
        self._condition("\n", rest)

    def _case(self, rest: str) -> None:
        subject, _, first = re.sub(r"\sin(\s|$)", "\0", f"{rest} ", count=1).partition("\0")
        frame = Frame("case", value=False, subject="".join(self.scope.words(subject)), before_arm=True)
        self._enter(frame)
        self.take("\n", first.strip()) if first.strip() else None

    def _arm(self, statement: str) -> str:
        """What stands behind the pattern of a ``case``."""
        frame = self.frames[-1] if self.frames else None
        match = _ARM.fullmatch(statement)
        if frame is None or frame.kind != "case" or not frame.before_arm or match is None:
            return statement
        frame.before_arm = False
        self._next_branch()
        patterns = [self.scope.text(one.strip()) for one in match[1].split("|")]
        known = not WITHOUT_VALUE.search(frame.subject)
        frame.value = any(fnmatchcase(frame.subject, one) for one in patterns) if known else None
        return match[2]

    def _is_carried_out(self) -> bool | None:
        branches = [frame.branch() for frame in self.frames]
        return False if False in branches else None if None in branches else True

    def _run(self, sign: str, statement: str) -> None:
        """Take one statement, if it is carried out."""
        branch, known = self._is_carried_out(), True
        if sign in ("&&", "||"):
            wanted = self.last if sign == "&&" else None if self.last is None else not self.last
            branch, known = False if wanted is False else branch, wanted is not None
        if branch is False:
            return
        for frame in self.frames:
            if frame.branch() is None and frame.before is None:
                frame.before = self.scope.copy()
        if any(frame.kind == "loop" for frame in self.frames) and goes_on(statement):
            known = False  # nobody knows how often
        outside, ended, exited = self.scope.copy(), self.ended, self.exited
        self.last = self._status(statement) if known else self._guess(statement)
        if self.is_fed or self.is_aside:  # in a process of its own
            self.scope.take_back(outside)
            self.ended, self.exited = ended, exited

    def _guess(self, statement: str) -> None:
        """Carry out a statement of which nobody knows whether it is carried out: what it changes is not known behind it."""
        before, is_sure = self.scope.copy(), self.is_sure
        self.is_sure = False
        self._status(statement)
        self.is_sure = is_sure
        for name in self.scope.take_back(before):
            self.scope.forget(name)

    def _status(self, statement: str) -> bool | None:
        """Carry a statement out; whether it succeeds, as far as it matters here."""
        if (defined := function_of(statement, self.line)) is not None:
            self.names.functions[defined[0]] = self.found.uncalled[defined[0]] = defined[1]
            return True
        if (body := body_of(statement, self.line)) is not None:
            self._body(body)
            return True
        if changes(self.scope, statement):
            return None
        if match := array_of(statement):
            self._declare(match[1].strip(), [match[2]]) if match[1] else None
            set_array(self.scope, match)
            return True
        status = self._test(statement)
        self.passes_on = self.scope.arguments is None and NO_WORDS.search(statement) is not None
        return self._take_words(self.scope.words(statement)) if status is None else status

    def _body(self, body: Body) -> None:
        """A group or a subshell; an end of the subshell is its own."""
        scope = self.scope.copy() if body.is_subshell else self.scope
        self._within(scope, body.inside, body.line, is_own=body.is_subshell)

    def _within(self, scope: Scope, text: str, line: int, *, is_own: bool = False, is_call: bool = False) -> None:
        """Read a text within this one.

        Args:
            scope: its variables.
            text: that is read.
            line: of the script on which it begins.
            is_own: whether its end does not end this text.
            is_call: whether it is a function that is called here.
        """
        if self.depth >= _DEEPEST:
            return
        reader = _Reader(self.found, self.names, scope)
        reader.frames = [frame for frame in self.frames if frame.kind == "loop"]
        reader.depth, reader.locals = self.depth + 1, self.locals
        reader.called = self.called or (self.line if is_call else 0)
        reader.is_sure = self.is_sure and self._is_carried_out() is True
        reader.read(text, line)
        self.ended = self.ended or (reader.ended and not is_own)
        self.exited = self.exited or (reader.exited and not is_own)

    def _take_words(self, words: list[str]) -> bool | None:
        """Whether the statement succeeds, as far as it matters here."""
        names = [word for word in words if word not in DECLARES and not word.startswith("-")]
        matches = [ASSIGNMENT.fullmatch(word) for word in names]
        if words[:1] and words[0] in DECLARES:
            self._declare(words[0], [word.partition("=")[0].rstrip("+") for word in names])
        plainly = words[:1] and words[0] not in DECLARES and any(self.names.is_override(word) for word in words)
        if names and all(matches) and not plainly:
            for match in filter(None, matches):
                self._set(match)
            return True
        if words[:1] in (["echo"], ["printf"]):
            return True
        if words[:1] in (["exit"], ["return"]):
            loops = any(frame.kind == "loop" for frame in self.frames)  # which may end before
            ends = self.is_sure and self._is_carried_out() is True and not loops
            self.ended, self.exited = self.ended or ends, self.exited or (ends and words[0] == "exit")
            self.found.end = self.line if ends else self.found.end
        elif words[:1] == ["shift"]:
            count = int(words[1]) if words[1:] and words[1].isdecimal() else 1
            self.scope.arguments = None if self.scope.arguments is None else self.scope.arguments[count:]
        elif words[:2] == ["set", "--"]:
            self.scope.arguments = words[2:]
        elif words[:1] == ["set"] and ("-a" in words or "allexport" in words):
            self.scope.exports_all = True
        elif self._read_elsewhere(words):
            return None
        else:
            self._plain_words(without_redirections(words))
        return None if words and words[0] in ASKS else True

    def _plain_words(self, words: list[str]) -> None:
        if self.names.is_launch(words):
            self._launch(words)
        elif words and all(self.names.is_override(word) for word in words):
            self.found.overrides.append(words)

    def _launch(self, words: list[str]) -> None:
        """Note a launch, with the loops that change it from one time to the next."""
        loops = [frame for frame in self.frames if frame.kind == "loop" and frame.subject]
        named = [frame for frame in loops if any(re.search(rf"\$\{{?{frame.subject}\b", word) for word in words)]
        each = [f"{frame.subject}: {frame.values}" for frame in named] or asked_for_each(words)
        self.found.launches.append(Launch(words, self.line, self.scope.copy(), "; ".join(each), self.called))

    def _read_elsewhere(self, words: list[str]) -> bool:
        """Whether words start something that is in the text too, and is read: a function, ``eval``, another shell, a file."""
        before = [word for word in words if not ASSIGNMENT.fullmatch(word)]
        place = words.index(before[0]) if before else len(words)
        if before and before[0] in self.names.functions and before == words[place:]:
            outside = self.scope.copy()
            for match in filter(None, map(ASSIGNMENT.fullmatch, words[:place])):
                self._set(match)
            self._call(before[0], without_redirections(before[1:]) or (None if self.passes_on else []))
            for word in words[:place]:
                self.scope.take(word.partition("=")[0].rstrip("+"), outside)
            return True
        if before[:1] == ["eval"]:
            self._within(self.scope, " ".join(before[1:]), self.line)
            return True
        documents_in(words, self.names.documents, self.names.files, self.scope)
        name = before[1].removeprefix("./") if before[:1] in (["source"], ["."]) and before[1:] else ""
        if (sourced := self.names.files.get(name)) is not None:
            self._within(self.scope, sourced.text, sourced.line)
            return True
        launches = len(self.found.launches)
        for text in [*given_to_shell(words), *read_by_shell(words, self.names.documents, self.names.files, self.scope)]:
            scope = self.scope.of_child(text.arguments, words[:place], is_elsewhere=text.is_elsewhere)
            self._within(scope, text.text, text.line or self.line, is_own=True)
        return len(self.found.launches) > launches

    def _call(self, name: str, arguments: list[str] | None) -> None:
        """A function, with its arguments, none if they are not known; what it calls local ends with it."""
        body = self.names.functions[name]
        self.found.uncalled.pop(name, None)
        if [called for called, _ in self.locals].count(name) > 1:
            return  # what calls itself several times would be followed for minutes
        before, self.scope.arguments = self.scope.arguments, arguments
        self.locals.append((name, {}))
        scope = self.scope.copy() if body.is_subshell else self.scope
        self._within(scope, body.inside, body.line, is_own=body.is_subshell, is_call=True)
        self.ended = self.exited
        for local, kept in self.locals.pop()[1].items():
            self.scope.take(local, kept)
        self.scope.arguments = before

    def _declare(self, word: str, names: Sequence[str]) -> None:
        """Note names that are exported, and those that end with the function."""
        if word == "export":
            self.scope.exported.update(names)
        elif word in ("local", "declare", "typeset") and self.locals:
            for name in names:
                self.locals[-1][1].setdefault(name, self.scope.copy())

    def _set(self, match: re.Match[str]) -> None:
        name, adds, value = match[1], match[2], match[3]
        if not (adds and name in self.scope.unknown):
            self.scope.assign(name, (self.scope.variables.get(name, "") if adds else "") + value)

    def _test(self, statement: str) -> bool | None:
        """Whether a condition holds; none if that does not follow from the text."""
        statement, negated = statement.removeprefix("!").strip(), statement.startswith("!")
        body = body_of(statement, self.line)
        value: bool | None = None
        if body is None:
            value = holds(self.scope.words(statement))
        elif not body.is_subshell:
            for inner in statements(body.inside, self.line):
                value = joined(value, inner.sign, self._test(inner.text)) if inner.text else value
        return value if value is None or not negated else not value
