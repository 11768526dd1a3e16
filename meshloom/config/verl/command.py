"""A verl command taken apart: environment, launcher, program, options, overrides.

Owns: words and texts of shell commands, with their variables, arrays and line continuations. Refuses to know: what
overrides mean. Always holds: every word of the command ends up in one of the parts; a variable whose value is not in the
text is kept as it stands, so that it can be named.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshloom.config.errors import UserError

ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@-]*=.*|~[A-Za-z_][\w.]*", re.DOTALL)
_ARRAY = re.compile(r"^[ \t]*(\w+)(\+?)=\((.*?)\)[ \t]*$", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}$]*))?\})")
_PROGRAM = re.compile(r"(\S*/)?\w+\.py|verl(\.\w+)+|recipe(\.\w+)+")
_ENDS = {"|", "||", "&&", ";", "&"}
_PASSED_ON = re.compile(r"\$[@*]|\$\{[@*](?::\d+)?\}")
UNRESOLVED = re.compile(r"\$\w+|\$\{\w+(?:[:#%/^,?+-][^}]*)?\}|\$\(|`")
"""A shell variable or command without a value; ``${a.b}`` and ``${oc.env:A}`` are Hydra's."""

_GROUP_CHOICES = {"model_engine", "engine", "optim"}
"""Overrides without a dot, which look like assignments of the environment."""
_NODES = ("--nnodes", "--nproc_per_node", "--nproc-per-node")


@dataclass
class Command:
    """Parts of a verl command.

    Args:
        module: ``verl.trainer.main_ppo``; empty if only overrides are given.
        overrides: each ``a.b=value``, with ``+``, ``++`` or ``~`` as given.
        environment: variables that the text assigns, in front of the program or before.
        in_front: names of those in front of the program, which it would see.
        options: verl's own options, ``--config-name`` and the like, with their values.
        files: YAML files among the words.
        launcher: ``--nnodes`` and ``--nproc_per_node`` of torchrun.
        other: words that nothing is known about.
    """

    module: str = ""
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    in_front: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    launcher: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)


def read_command(words: Sequence[str]) -> Command:
    """A command from the words that a shell has made of it, or from one word that is its whole text.

    Raises:
        UserError: if there is nothing, or quotes are not closed.
    """
    if len(words) == 1 and _is_text(words[0]):
        environment, words = _read_text(words[0])
    else:
        environment = {}
        words = [_expanded(word, environment) for word in words]
    words = _without_tail(words)
    if not words:
        what = "there is no verl command"
        raise UserError(what, fix="write it behind --, such as: --verl -- python3 -m verl.trainer.main_ppo data.…=…")
    return _sorted_out(words, environment)


def _is_text(word: str) -> bool:
    """Whether one word is a whole text: a program, or several overrides, and not one override with blanks in its value."""
    if "\n" in word.strip():
        return True
    parts = word.split()
    several = not _OVERRIDE.fullmatch(parts[0]) or all(map(_OVERRIDE.fullmatch, parts)) if parts else False
    return len(parts) > 1 and (several or any(map(_PROGRAM.fullmatch, parts)))


def _read_text(text: str) -> tuple[dict[str, str], list[str]]:
    """Assignments of a script's text, and the words of the command in it."""
    text = "\n".join(map(_without_comment, text.replace("\r\n", "\n").split("\n")))
    environment: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    lines: list[str] = []

    def take_array(match: re.Match[str]) -> str:
        lines.append(match[0])
        return f"\0{len(lines) - 1}"

    text = _ARRAY.sub(take_array, text)
    text = re.sub(r"\\[ \t]*\n", " ", text)
    command: list[str] = []
    for line in text.split("\n"):
        if line.strip().startswith("\0"):
            _add_array(lines[int(line.strip()[1:])], arrays, environment)
            continue
        words = _split(line)
        if _only_assigns(words):
            _assign(words, environment)
            continue
        command += _words_of(words, arrays, environment)
    return environment, command


def _without_comment(line: str) -> str:
    """A line up to a ``#`` that begins a word outside quotes."""
    quote = ""
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _only_assigns(words: Sequence[str]) -> bool:
    if not words or not all(ASSIGNMENT.fullmatch(word) or word == "export" for word in words):
        return False
    return words[0] == "export" or not any(word.partition("=")[0] in _GROUP_CHOICES for word in words)


def _words_of(words: Sequence[str], arrays: dict[str, list[str]], environment: dict[str, str]) -> list[str]:
    """Words of a line that is a part of the command; lines of other programs have none."""
    if not any(_OVERRIDE.fullmatch(word) or "verl" in word or "[@]" in word for word in words):
        return []
    found: list[str] = []
    for word in words:
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
        known = array is not None and array[1] in arrays
        found += arrays[array[1]] if array is not None and known else [_expanded(word, environment)]
    return found


def _add_array(text: str, arrays: dict[str, list[str]], environment: dict[str, str]) -> None:
    match = _ARRAY.fullmatch(text)
    assert match is not None, text
    words = [_expanded(word, environment) for word in _split(re.sub(r"\\[ \t]*\n", " ", match[3]))]
    arrays[match[1]] = [*(arrays.get(match[1], []) if match[2] else []), *words]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UserError("the verl command cannot be read", where=line.strip()[:120], why=str(error)) from error


def _assign(words: Sequence[str], environment: dict[str, str]) -> None:
    for word in words:
        if match := ASSIGNMENT.fullmatch(word):
            environment[match[1]] = _expanded(match[2], environment)


def _expanded(word: str, environment: dict[str, str]) -> str:
    """A word with the variables that have a value; ``$HOME`` is ``~``."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        if name in environment:
            return environment[name]
        if name == "HOME":
            return "~"
        return match[0] if default is None else default

    before = None
    while before != word:
        before, word = word, _VARIABLE.sub(value, word)
    return word


def _without_tail(words: Sequence[str]) -> list[str]:
    """Without what a shell does with the output, and without ``"$@"``."""
    kept: list[str] = []
    for word in words:
        if word in _ENDS or re.match(r"(\d|&)?>", word):
            break
        if not _PASSED_ON.fullmatch(word) and word.strip():
            kept.append(word)
    return kept


def _sorted_out(words: Sequence[str], environment: dict[str, str]) -> Command:
    command = Command()
    rest = list(words)
    program = any("=" not in word and not word.startswith("-") for word in rest[:40] if not word.startswith("~"))
    while rest and program and (match := ASSIGNMENT.fullmatch(rest[0])) and match[1] not in _GROUP_CHOICES:
        command.environment[match[1]] = match[2]
        command.in_front.append(match[1])
        rest.pop(0)
    command.environment = {**environment, **command.environment}
    start = _program_ends(rest)
    if start:
        command.module = _module_name(rest[start - 1])
        command.launcher = _options(rest[: start - 1], _NODES)
    _add_words(command, rest[start:])
    return command


def _program_ends(words: Sequence[str]) -> int:
    """How many words come before the overrides: the launcher and the program; 0 if there is no program."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words) and "=" not in words[place + 1]:
            if "." in words[place + 1]:
                return place + 2
        elif _PROGRAM.fullmatch(word):
            return place + 1
    return 0


def _module_name(word: str) -> str:
    return re.sub(r"^\.?/", "", word).removesuffix(".py").replace("/", ".") if word.endswith(".py") else word


def _options(words: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found[name.replace("_", "-")] = value if equals else "".join(words[place + 1 : place + 2])
    return found


_VALUED = {
    "--config-name": "name",
    "-cn": "name",
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "dir",
    "-cd": "dir",
}


def _add_words(command: Command, words: Sequence[str]) -> None:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _VALUED:
            command.options[_VALUED[name]] = (value if equals else rest.pop(0) if rest else "").strip("'\"")
        elif _OVERRIDE.fullmatch(word):
            command.overrides.append(word)
        elif word.endswith((".yaml", ".yml")):
            command.files.append(word)
        else:
            command.other.append(word)
