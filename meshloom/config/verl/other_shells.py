"""Commands that carry the text of other commands: another shell, a machine that is reached, a here-document, a file.

Owns: which words and documents are texts for a shell. Refuses to know: what is in them. Always holds: a text that is only
printed is none of them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from meshloom.config.verl.shell_text import Document
from meshloom.config.verl.shell_words import Scope

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_TAKES_TEXT = ("ssh", "tmux", "su", "script", "sbatch", "salloc", "pdsh", "watch", "qsub", "bsub")
"""Programs that hand a word with blanks to a shell."""
_READS_INPUT = ("sbatch", "qsub", "bsub", "ssh")
_ELSEWHERE = ("ssh", "pdsh")
_FOR_EACH = ("xargs", "parallel", "pdsh")
_TEXT_FLAG = re.compile("-[a-z]*c|--wrap")
_REDIRECTION = re.compile(r"(\d|&)?(>>?|<)(&?\S*)")
_MARK = re.compile(r"<<:(\d+):")


@dataclass(frozen=True)
class ShellText:
    """A text that another shell reads.

    Args:
        text: of it.
        line: of the script on which it begins; none: that of its command.
        arguments: of that shell.
        is_elsewhere: whether it is on another machine.
    """

    text: str
    line: int | None = None
    arguments: list[str] = field(default_factory=list)
    is_elsewhere: bool = False


def program(word: str) -> str:
    """The name of a program, wherever it lies; empty for an override, whose value may end with one."""
    return "" if "=" in word else word.rpartition("/")[2]


def given_to_shell(words: Sequence[str]) -> Iterator[ShellText]:
    """The words that are texts: behind ``-c`` of a shell, and those with blanks of a program that hands them to one."""
    names = [program(word) for word in words]
    for place, (flag, text) in enumerate(pairwise(words)):
        if _TEXT_FLAG.fullmatch(flag) and any(name in SHELLS or name in _TAKES_TEXT for name in names[:place]):
            yield ShellText(text, None, list(words[place + 3 :]), _is_elsewhere(names[:place]))
            return
    if any(name in SHELLS for name in names):
        return
    for word in words:
        text = word.removeprefix("--wrap=")
        if len(text.split()) > 1 and any(name in _TAKES_TEXT for name in names):
            yield ShellText(text, is_elsewhere=_is_elsewhere(names))


def _is_elsewhere(names: Sequence[str]) -> bool:
    return any(name in _ELSEWHERE for name in names)


def documents_in(words: Sequence[str], documents: Sequence[Document], files: dict[str, Document], scope: Scope) -> None:
    """Note the file into which ``cat`` or ``tee`` writes a here-document."""
    marks = [match for match in map(_MARK.fullmatch, words) if match]
    if not marks or program(words[0]) not in ("cat", "tee"):
        return
    found = _expanded(documents[int(marks[0][1])], scope)
    behind = [after for sign, after in pairwise(words) if sign in (">", "tee")]
    behind += [match[3] for match in map(_REDIRECTION.fullmatch, words) if match and match[2] == ">" and match[3]]
    files.update({name.removeprefix("./"): found for name in behind if not name.startswith(("-", "<"))})


def read_by_shell(
    words: Sequence[str], documents: Sequence[Document], files: dict[str, Document], scope: Scope
) -> Iterator[ShellText]:
    """The here-document that a shell reads, and the file of the script's own that it is given."""
    marks = [match for match in map(_MARK.fullmatch, words) if match]
    named = [program(word) for word in without_redirections(words)]
    reads = bool(named) and (named[-1] in SHELLS or any(name in _READS_INPUT for name in named[:1]))
    place = max((at for at, name in enumerate(named) if name in SHELLS), default=None)
    if place is not None and all(re.fullmatch("-[a-z]+|--login", word) for word in named[place + 1 :]):
        reads = True
    if marks and (reads or (named and named[0] == "ssh")):
        found = _expanded(documents[int(marks[0][1])], scope)
        yield ShellText(found.text, found.line, is_elsewhere=_is_elsewhere(named))
    plainly = [word.removeprefix("./") for word in without_redirections(words)]
    for at, word in enumerate(plainly):
        if word in files and (at == 0 or named[0] in _TAKES_TEXT or any(name in SHELLS for name in named[:at])):
            yield ShellText(files[word].text, files[word].line, plainly[at + 1 :])


def _expanded(document: Document, scope: Scope) -> Document:
    if not document.expands:
        return document
    return Document(scope.document(document.text), expands=False, line=document.line)


def asked_for_each(words: Sequence[str]) -> list[str]:
    """In words, what a program starts the rest of the words for."""
    found = next((name for name in map(program, words) if name in _FOR_EACH), None)
    return [] if found is None else [f"inputs of {found}"]


def without_redirections(words: Sequence[str]) -> list[str]:
    """Words that a program is given."""
    kept: list[str] = []
    skips = False
    for word in words:
        match = _REDIRECTION.fullmatch(word) or _MARK.fullmatch(word)
        if match is None and not skips:
            kept.append(word)
        skips = match is not None and match.re is _REDIRECTION and not match[3]
    return kept
