"""A verl command taken apart: environment, launcher, program, options, overrides.

Owns: words and texts of shell commands, with their variables, arrays and line continuations. Refuses to know: what
overrides mean. Always holds: every word of the command ends up in one of the parts; a variable whose value is not in the
text is kept as it stands, so that it can be named.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from meshloom.config.errors import UserError
from meshloom.config.verl.launches import require_none_named, the_launch
from meshloom.config.verl.script import read_script
from meshloom.config.verl.shell_words import Scope

ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@-]*=.*|~[A-Za-z_][\w.]*", re.DOTALL)
_VERL = re.compile(r"(verl|recipe)\.")
_NAMED = re.compile(r"\b(?:verl|recipe)(?:[./]\w+)+|\bmain_ppo\b")
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
        lost: overrides behind a line that ends the command, which a shell does not pass on.
    """

    module: str = ""
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    in_front: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    launcher: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def read_command(words: Sequence[str]) -> Command:
    """A command from the words that a shell has made of it, or from one word that is its whole text.

    Raises:
        UserError: if there is nothing, or quotes are not closed.
    """
    inner = [word for flag, word in pairwise(words) if re.fullmatch("-l?i?c", flag) and _is_launch(word.split())]
    scope, lost = Scope(), list[str]()
    if inner or (len(words) == 1 and _is_text(words[0])):
        scope, words, lost = _read_text((inner or words)[0])
    else:
        words = [_expanded(word, scope) for word in words]
    words = _without_tail(words)
    if not words:
        what = "there is no verl command"
        raise UserError(what, fix="write it behind --, such as: --verl -- python3 -m verl.trainer.main_ppo data.…=…")
    command = _sorted_out(words, scope.variables)
    command.lost = lost
    return command


def _is_text(word: str) -> bool:
    """Whether one word is a whole text: a program, or several overrides, and not one override with blanks in its value."""
    if "\n" in word.strip():
        return True
    parts = word.split()
    several = not _OVERRIDE.fullmatch(parts[0]) or all(map(_OVERRIDE.fullmatch, parts)) if parts else False
    return len(parts) > 1 and (several or any(map(_PROGRAM.fullmatch, parts)))


def _read_text(text: str) -> tuple[Scope, list[str], list[str]]:
    """Variables of a script's text, the words of the command in it, and overrides behind a line that ends it.

    Raises:
        UserError: if a quote or bracket is not closed, or several programs of verl's are started.
    """
    try:
        text = re.sub(r"^\s*```\w*\s*$", "", text.replace("\r\n", "\n"), flags=re.MULTILINE)
        found = read_script(text, _is_launch, _is_override)
    except ValueError as error:
        fix = "close it; or give the launch alone, with its variables"
        raise UserError("the verl command cannot be read", why=str(error), fix=fix) from error
    overrides = [word for words in found.overrides for word in words]
    if not found.launches:
        return found.scope, overrides or require_none_named(text, found, _NAMED), []
    launch = the_launch(found.launches, _is_override, lambda words: words[_program_ends(words) - 1])
    return launch.scope, launch.words, overrides


def _is_launch(words: Sequence[str]) -> bool:
    """Whether words start a program of verl's: by its name, or by a name of one's own with overrides behind it."""
    end = _program_ends(words)
    return end > 0 and (_VERL.match(words[end - 1]) is not None or any(map(_is_override, words[end:])))


def _is_override(word: str) -> bool:
    """Whether a word alone is an override, and no assignment of the environment; or an option of verl's."""
    name = word.partition("=")[0]
    if name in _VALUED:
        return True
    return _OVERRIDE.fullmatch(word) is not None and (not name.isidentifier() or name in _GROUP_CHOICES)


def _expanded(word: str, scope: Scope) -> str:
    """A word of a shell's with the variables that have a value all the same; ``$HOME`` is ``~``."""

    def value(match: re.Match[str]) -> str:
        found = scope.substituted(match[0])
        return found if isinstance(found, str) else match[0]

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
        for match in filter(None, map(ASSIGNMENT.fullmatch, rest[: start - 1])):
            command.environment[match[1]] = match[2]
            command.in_front.append(match[1])
    _add_words(command, rest[start:])
    return command


def _program_ends(words: Sequence[str]) -> int:
    """How many words come before the overrides: the launcher and the program; 0 if there is no program."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words) and "=" not in words[place + 1]:
            if "." in words[place + 1]:
                return place + 2
        elif _PROGRAM.fullmatch(word) and not word.endswith(".sh"):  # a script may be called verl.sh
            return place + 1
    return 0


def _module_name(word: str) -> str:
    """A module's name; of a file that of the module, wherever verl lies."""
    if not word.endswith(".py"):
        return word
    parts = word.removesuffix(".py").strip("./").split("/")
    roots = [place for place, part in enumerate(parts) if part in ("verl", "recipe")]
    return ".".join(parts[roots[-1] if roots else 0 :])


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
