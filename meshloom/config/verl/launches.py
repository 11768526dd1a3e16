"""Which of the launches in a text is the run, and what to say where it is none or several.

Owns: that choice, and its words. Refuses to know: how a text is read (``script``). Always holds: several launches are taken for
one only where their words are the same; whatever is refused is named with its line and with what to write instead.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshloom.config.errors import UserError
from meshloom.config.verl.shell_text import Body
from meshloom.config.verl.shell_words import Scope

_FORM = "python3 -m verl.trainer.main_ppo data.…=…"


@dataclass(frozen=True)
class Launch:
    """A statement that starts a program of verl's.

    Args:
        words: of it.
        line: of the text on which it begins.
        scope: the variables there.
        repeated: what it is started for each of, in words: values of a loop, inputs; empty where it is started once, or again
            as it is.
        called: line that calls the function which it is in; 0 where it is in none.
    """

    words: list[str]
    line: int
    scope: Scope
    repeated: str = ""
    called: int = 0


@dataclass
class Found:
    """What a text has.

    Args:
        scope: its variables at the end.
        launches: each statement that starts a program of verl's.
        overrides: statements that are nothing but overrides: all there is where no program is named, and else lost behind a
            line that ends the launch.
        uncalled: functions that nothing calls, with their lines.
        end: line that ends the text before its last; 0 where none does.
    """

    scope: Scope = field(default_factory=Scope)
    launches: list[Launch] = field(default_factory=list)
    overrides: list[list[str]] = field(default_factory=list)
    uncalled: dict[str, Body] = field(default_factory=dict)
    end: int = 0


def the_launch(
    launches: Sequence[Launch], is_override: Callable[[str], bool], program: Callable[[Sequence[str]], str]
) -> Launch:
    """The only launch; one that has overrides, where others have none.

    Args:
        launches: of a text.
        is_override: whether a word is an override.
        program: that words start.

    Raises:
        UserError: if there are several, or one is started several times with other words.
    """
    chosen = [launch for launch in launches if any(map(is_override, launch.words))] or list(launches)
    different = list({tuple(launch.words): launch for launch in reversed(chosen)}.values())[::-1]
    if len(different) > 1:
        programs = [program(launch.words) for launch in different]
        lines = ", ".join(str(launch.called or launch.line) for launch in different)
        why = f"lines {lines}: which of them is meant does not follow from the text"
        fix = "give the text of one, with its variables; of branches, give variables such values that one is taken"
        what = f"the text starts {len(programs)} programs: {', '.join(programs)}"
        raise UserError(what, where="the verl command", why=why, fix=fix)
    launch = different[0]
    if launch.repeated:
        name = launch.repeated.partition(":")[0]
        what = f"line {launch.line} starts {program(launch.words)} several times, for each of {launch.repeated}"
        fix = f"give the launch alone, with one value: {name}=… in a line of its own in front of it, without the loop"
        if name.startswith("inputs"):
            fix = "give the launch alone, with its own words"
        raise UserError(what, where="the verl command", why="one run is one launch", fix=fix)
    return launch


def require_none_named(text: str, found: Found, names: re.Pattern[str]) -> list[str]:
    """Refuse a text that names a program of verl's and does not start it; no words for one that names none.

    Raises:
        UserError: that names the line.
    """
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if names.search(line)]
    if not numbered:
        return []
    number, line = numbered[0]
    named = names.search(line)
    what = f"line {number} names {named[0] if named else line.strip()}, and the text does not start it"
    why = "it stands in a comment, in a text, in $(…), behind the end of the script, or in a branch that is not taken"
    fix = f"give the launch as a command of its own: {_FORM}"
    starts = [name for name, body in found.uncalled.items() if names.search(body.inside)]
    behind = text.splitlines()[found.end :] if found.end else []
    if any(names.search(line) or not {*starts}.isdisjoint(line.split()) for line in behind):
        why = f"line {found.end} ends the text before"
        fix = "give each variable that it asks for a line of its own in front, NAME=…, or give the launch alone"
    elif starts:
        why = f"the function {starts[-1]} starts it, and nothing calls {starts[-1]}"
        fix = f"add a line {starts[-1]}, with its arguments"
    raise UserError(what, where="the verl command", why=why, fix=fix)
