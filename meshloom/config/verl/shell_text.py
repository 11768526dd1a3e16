"""The text of a shell script cut into statements.

Owns: comments, continued lines, here-documents, and where a statement ends. Refuses to know: what a statement does, variables.
Always holds: quoted texts, groups, subshells and bodies of functions stay whole; each statement knows its line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshloom.config.verl.shell_words import behind, behind_bracket

_HEREDOC = re.compile(r"<<-?[ \t]*(?:(['\"])([^'\"\n]+)\1|(\\?)([\w.-]+))")
_CONTINUED = re.compile(r"\\[ \t]*\n")
"""The end of a line that goes on; blanks behind the backslash are forgiven."""
_OPERATORS = re.compile(r"&&|\|\||;;&?|[;&|\n]")
_HEADER = re.compile(r"\s*(?:function\s+([\w.:-]+)\s*(?:\(\s*\))?|([\w.:-]+)\s*\(\s*\))\s*")
_ARM_HEAD = re.compile(r"\s*\(?[^()\s][^()]*\)\s*")
_CASE = re.compile(r"(?:.*\s)?case\s.*\sin\s", re.DOTALL)
_JOINED = "\x1f"
"""Stands for the end of a line that ends nothing: a blank that counts as a line."""
_BEFORE_GROUP = ("if", "elif", "then", "else", "do", "while", "until", "!", "time", "nohup")
_FUNCTION = re.compile(rf"{_HEADER.pattern}([{{(].*)", re.DOTALL)


@dataclass(frozen=True)
class Statement:
    """A simple command, a group, a subshell, or a function's definition.

    Args:
        sign: in front of it: ``&&``, ``;`` and the like.
        text: of it.
        line: of the script, counted from 1.
    """

    sign: str
    text: str
    line: int


@dataclass(frozen=True)
class Document:
    """A here-document.

    Args:
        text: of it.
        expands: whether variables in it have their values.
        line: of the script on which it begins.
    """

    text: str
    expands: bool
    line: int


@dataclass(frozen=True)
class Body:
    """What stands in brackets at the place of a command.

    Args:
        inside: its text.
        line: of the script on which it begins.
        is_subshell: whether what it assigns stays in it.
        behind: what stands behind its bracket, such as redirections.
    """

    inside: str
    line: int
    is_subshell: bool
    behind: str


def plain(text: str, documents: list[Document], line: int) -> str:
    """A text without comments and continued lines; here-documents are put with the others, and their numbers in their place.

    Raises:
        ValueError: if a quote or bracket is not closed.
    """
    kept: list[str] = []
    place, open_ones = 0, list[tuple[str, bool, int]]()
    while place < len(text):
        here = text[place]
        if here == "\n" and open_ones:
            start = place
            place += 1
            for end, expands, number in open_ones:
                first = line + text.count("\n", 0, place)
                place, body = _document(text, place, end)
                documents[number] = Document(body, expands, first)
            open_ones.clear()
            kept.append("\n" + _JOINED * (text.count("\n", start, place) - 1))
            continue
        if here == "#" and (place == 0 or text[place - 1].isspace() or text[place - 1] in ";&|("):
            end_of_line = text.find("\n", place)
            place = len(text) if end_of_line < 0 else end_of_line
            continue
        if match := _CONTINUED.match(text, place):
            is_word = (
                match[0] == "\\\n" and not text[place - 1 : place].isspace() and not text[match.end() :][:1].isspace()
            )
            kept.append("" if is_word else _JOINED)
            place = match.end()
            continue
        if text.startswith("<<<", place):
            kept.append("<<<")
            place += 3
            continue
        if (match := _HEREDOC.match(text, place)) and text[place - 1 : place] != "(":
            open_ones.append((match[2] or match[4], not (match[1] or match[3]), len(documents)))
            kept.append(f"<<:{len(documents)}:")
            documents.append(Document("", expands=False, line=line))
            place = match.end()
            continue
        end = behind(text, place)
        kept.append(text[place:end])
        place = end
    return "".join(kept)


def _document(text: str, place: int, end: str) -> tuple[int, str]:
    """The place behind a here-document, and its text."""
    found = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(text, place)
    return (
        (len(text), text[place:]) if found is None else (min(found.end() + 1, len(text)), text[place : found.start()])
    )


def statements(text: str, line: int) -> Iterator[Statement]:
    """Each statement of a plain text, with the sign in front of it.

    Args:
        text: as ``plain`` has left it.
        line: of the script on which it begins.

    Raises:
        ValueError: if a quote or bracket is not closed.
    """
    place = start = 0
    sign = "\n"

    def statement() -> Statement:
        found = text[start:place]
        before = text[: start + len(found) - len(found.lstrip())]
        return Statement(sign, found.strip(), line + before.count("\n") + before.count(_JOINED))

    while place < len(text):
        if text[place] in "({" and _begins_body(text, start, place):
            place = behind_bracket(text, place)
            continue
        match = _OPERATORS.match(text, place)
        if match and not _inside(text, start, place, match[0]):
            if match[0] == "\n" and _HEADER.fullmatch(text, start, place):
                place += 1
                continue
            yield statement()
            sign, place = match[0], match.end()
            start = place
        elif text[place] == "(" and text[place - 1 : place] == "=":
            place = behind_bracket(text, place)
        else:
            place = behind(text, place)
    yield statement()


def function_of(text: str, line: int) -> tuple[str, Body] | None:
    """The name and the body of a function that a statement defines; none if it defines none."""
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return None
    body = body_of(match[3], line + text[: match.start(3)].count("\n"))
    return None if body is None else (match[1] or match[2], body)


def body_of(text: str, line: int) -> Body | None:
    """The group or the subshell that a statement is; none if it is another."""
    if not text or text[0] not in "({" or text.startswith("((") or (text[0] == "{" and not text[1:2].isspace()):
        return None
    end = behind_bracket(text, 0)
    return Body(text[1 : end - 1], line, text[0] == "(", text[end:].strip())


def _begins_body(text: str, start: int, place: int) -> bool:
    """Whether a bracket stands where a command could, and is no part of a word."""
    before = text[start:place]
    if text[place] == "{" and not text[place + 1 : place + 2].isspace():
        return False
    words = before.split()
    while words and words[0] in _BEFORE_GROUP:
        before = before.lstrip()[len(words.pop(0)) :]
    if text[place] == "(" and words == ["for"]:
        return True
    is_arm = _ARM_HEAD.fullmatch(before) is not None
    return (not words or is_arm or _HEADER.fullmatch(before) is not None) and (
        before == "" or before[-1] in " \t\n)" + _JOINED
    )


def _inside(text: str, start: int, place: int, sign: str) -> bool:
    """Whether a sign is a part of a redirection, of ``[[ … ]]`` or of a pattern of ``case``."""
    if sign in ("&", "|") and (text[place - 1 : place] in ("<", ">") or text[place + 1 : place + 2] == ">"):
        return True
    patterns = [one.split() for one in _CASE.sub("", text[start:place]).split("|")]
    if sign == "|" and re.match(r"\|[^()\n;&$`]*\)", text[place:]) and all(len(words) == 1 for words in patterns):
        return True
    before = text[start:place].split()
    return sign in ("&&", "||") and "[[" in before and "]]" not in before
