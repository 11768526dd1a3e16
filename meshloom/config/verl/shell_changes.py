"""Statements that change variables besides plain assignments: arrays, their elements, arithmetic, ``read``, ``unset``.

Owns: what they leave in a scope. Refuses to know: whether they are carried out (``script``). Always holds: a variable whose new
value does not follow from the text has none.
"""

import re

from meshloom.config.verl.shell_words import Scope

_ARRAY = re.compile(
    r"(?:((?:export|local|declare|readonly|typeset)\s+)(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=\((.*)\)", re.DOTALL
)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[[^\]]*\]\+?=")
_CHANGING = re.compile(r"(let\s|\(\()|(?:read|unset|mapfile|readarray|getopts)\s")
_COUNTED = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")


def array_of(statement: str) -> re.Match[str] | None:
    """The parts of a statement that gives an array its words: the word that declares it, name, ``+``, words."""
    return _ARRAY.fullmatch(statement)


def set_array(scope: Scope, match: re.Match[str]) -> None:
    """Give an array its words, or further ones; a variable with a value is an array of that one."""
    name, adds, words = match[2], match[3], scope.words(match[4])
    before = scope.arrays.get(name, [scope.variables[name]] if name in scope.variables else [])
    scope.arrays[name] = [*(before if adds else []), *words]
    scope.unknown -= set() if adds else {name}


def changes(scope: Scope, statement: str) -> bool:
    """Whether a statement is one of those that change variables, which have no value then."""
    if element := _ELEMENT.match(statement):
        scope.forget(element[1])
        return True
    match = _CHANGING.match(statement)
    if match is None:
        return False
    found = re.findall(_COUNTED, statement) if match[1] else [(name, "") for name in statement.split()[1:]]
    for name in map("".join, found):
        plain, _, index = name.strip("'\"").partition("[")
        if plain.isidentifier():
            scope.forget(plain)
            if statement.startswith("unset") and not index:
                scope.unknown.discard(plain)
    return True
