"""Python files of the user's: what one defines, looked at without running it, and how its exceptions are told.

Owns: whether a file has a function or class of a name, what is said where it has not, and which frames of an exception are the
user's. Refuses to know: what a function is for. Always holds: no line of the file is run; a name that may be bound in a way
that cannot be seen (a star import, ``globals()``) is let pass.
"""

import ast
import difflib
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import meshloom
from meshloom.config.near import files_near, nearest_first

_BINDERS = {"globals", "vars", "locals", "setattr", "exec"}
"""What can bind a name that no statement does."""
_NAMES_TOLD = 10
_FRAMES_TOLD = 4
_LINE_CHARACTERS = 300
_NOT_OF_USERS = tuple(
    str(Path(folder).resolve())
    for folder in (Path(meshloom.__file__).parent, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)


class Lack(StrEnum):
    """Why a file has no function of a name."""

    FORM = "form"
    FILE = "file"
    SYNTAX = "syntax"
    NAME = "name"


@dataclass(frozen=True, kw_only=True)
class Lacking:
    """A function or class that is not there, in the words of an error.

    Args:
        lack: what is missing.
        what, why, fix: as of ``UserError``.
    """

    lack: Lack
    what: str
    why: str = ""
    fix: str = ""


def lacking(file: Path, name: str) -> Lacking | None:
    """Why a file has no function or class of this name at its top level; none if it has, or may have.

    Args:
        file: relative to the current directory.
        name: in it.
    """
    if file.suffix != ".py" or not name.isidentifier():
        return Lacking(
            lack=Lack.FORM,
            what=f"{file}:{name} is not of the form file.py:function",
            fix="name a file that ends in .py, and a function or class of it",
        )
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except FileNotFoundError:
        return Lacking(
            lack=Lack.FILE,
            what=f"there is no file {file}",
            why=f"paths are relative to {Path.cwd()}",
            fix=files_near(file),
        )
    except OSError as error:
        fix = f"give a file that can be read; paths are relative to {Path.cwd()}"
        return Lacking(lack=Lack.FILE, what=f"{file} cannot be read: {error.strerror}", fix=fix)
    except (SyntaxError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        return Lacking(lack=Lack.SYNTAX, what=f"{file} is not Python", why=why, fix="mend the file")
    return _lacking_name(file, name, tree)


def _lacking_name(file: Path, name: str, tree: ast.Module) -> Lacking | None:
    names = list(_top_level_names(tree.body))
    nodes = list(ast.walk(tree))
    names += [given for node in nodes if isinstance(node, ast.Global) for given in node.names]
    if name in names or "*" in names or any(isinstance(node, ast.Name) and node.id in _BINDERS for node in nodes):
        return None
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    there = nearest_first(name, [node.name for node in tree.body if isinstance(node, kinds)])
    near = difflib.get_close_matches(name, names, n=1)
    return Lacking(
        lack=Lack.NAME,
        what=f"{file} has no function or class {name!r}",
        why=f"it has: {', '.join(there[:_NAMES_TOLD])}" if there else "it defines none",
        fix=f"did you mean {file}:{near[0]}?" if near else "name one of the file",
    )


def told(error: BaseException, file: str | Path) -> str:
    """An exception in a user's code: its own lines, and those of the user's frames, no others.

    Args:
        error: that came out of it.
        file: the user's file, whose frames are always the user's.
    """
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_of_user(each.filename, str(file))]
    places = traceback.format_list(frames[-_FRAMES_TOLD:])
    lines = "".join([*places, *traceback.format_exception_only(error)]).rstrip().splitlines()
    kept = [line[:_LINE_CHARACTERS] for line in lines if line.strip(" ^~")]
    return "\n    ".join(["its last lines:", *kept])


def _is_of_user(filename: str, file: str) -> bool:
    if filename == file:
        return True
    return not filename.startswith("<frozen ") and not str(Path(filename).resolve()).startswith(_NOT_OF_USERS)


def _top_level_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements bind in their own scope: definitions, assignments, imports, also inside ``if`` and ``try``;
    ``*`` for whatever a star import brings."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        for node in ast.iter_child_nodes(statement):
            if isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]
            elif isinstance(node, ast.stmt):
                yield from _top_level_names([node])
            elif isinstance(node, ast.ExceptHandler | ast.match_case):
                yield from _top_level_names(node.body)
            else:
                targets = (part for part in ast.walk(node) if isinstance(part, ast.Name))
                yield from (part.id for part in targets if isinstance(part.ctx, ast.Store))
