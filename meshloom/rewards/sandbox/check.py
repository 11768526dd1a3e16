"""Test code, run against a program in another process.

Owns: which statements are tests, the names they use, their verdicts. Refuses to know: the program. Always holds: a name that
the tests use is their own, a builtin or a module of the standard library before it is the program's; a verdict is written by
this process, which runs nothing of the program.
"""

import ast
import builtins
import importlib
import json
import sys
import typing
from collections.abc import Iterator
from typing import Any, TextIO

from meshloom.rewards.sandbox.remote import CannotCross, Program

_DETAIL_CHARACTERS = 300
_USUAL = {"np": "numpy", "pd": "pandas"}


def check(task: dict[str, Any], channel: int, verdicts: TextIO) -> int:
    """Run all tests of a task; write one line of JSON for each, after one with their number.

    Args:
        task: ``tests``, a list of code; ``setup``, code that comes first; ``entry_point``, the function, or none.
        channel: to the program.
        verdicts: where lines go.
    """

    def tell(**fields: Any) -> None:
        verdicts.write(json.dumps(fields) + "\n")
        verdicts.flush()

    try:
        trees = [ast.parse(code) for code in (task["setup"], *task["tests"])]
    except SyntaxError as error:
        tell(fault=f"the test code is no Python: {error}")
        return 1
    entry = task["entry_point"]
    trees[-1].body += _call_of_check(trees, entry)
    total = sum(_num_tests(statement) for tree in trees for statement in tree.body)
    tell(tests=total)
    errors = {name: kind for name, kind in vars(builtins).items() if _is_error(kind)}
    run = _Run(Program(channel, errors), trees, entry)
    for statement in (statement for tree in trees for statement in tree.body):
        for trouble in run.execute(statement):
            tell(ok=not trouble, detail=trouble[:_DETAIL_CHARACTERS])
        if run.fault:
            tell(fault=run.fault)
            return 1
        if run.trouble and not _num_tests(statement):
            tell(stopped=run.trouble[:_DETAIL_CHARACTERS])
            return 0
    return 0


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def _call_of_check(trees: list[ast.Module], entry: str | None) -> list[ast.stmt]:
    """``check(entry_point)``, where the tests define ``check`` and leave the call to whoever runs them."""
    defined = any(isinstance(one, ast.FunctionDef) and one.name == "check" for tree in trees for one in tree.body)
    called = any(_is_call_of_check(one) for tree in trees for one in tree.body)
    return ast.parse(f"check({entry})").body if entry and defined and not called else []


def _is_call_of_check(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"


def _num_tests(statement: ast.stmt) -> int:
    if isinstance(statement, ast.Assert) or _is_call_of_check(statement):
        return 1
    return len(_methods(statement))


def _methods(statement: ast.stmt) -> list[str]:
    """Test methods of a class for unittest."""
    if not isinstance(statement, ast.ClassDef) or not any("TestCase" in ast.unparse(base) for base in statement.bases):
        return []
    return [one.name for one in statement.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test")]


class _Run:
    """Executes test code one statement at a time."""

    def __init__(self, program: Program, trees: list[ast.Module], entry: str | None) -> None:
        self._program, self._names = program, {"__name__": "tests", "__builtins__": builtins}
        self._free, self._entry = _free_names(trees), entry
        self._bound = False
        self.fault, self.trouble = "", ""

    def execute(self, statement: ast.stmt) -> Iterator[str]:
        """Run a statement; for each test in it, what was wrong, or nothing."""
        count = _num_tests(statement)
        self.trouble = self._bind() or self._attempt(statement)
        if methods := _methods(statement):
            yield from ([self.trouble] * count if self.trouble else self._cases(statement, methods))
        elif count:
            yield self.trouble

    def _bind(self) -> str:
        """Give the tests the names they use of the program, once it has been loaded."""
        if self._bound:
            return ""
        try:
            wanted = [name for name in self._free if not self._is_known(name)]
            there = self._program.has(wanted)
            self._names |= {name: self._program.find(name) for name in there}
            if self._entry:
                self._names[self._entry] = self._names["candidate"] = self._program.find(self._entry)
        except Exception as error:  # the program's, of any kind
            return f"{type(error).__name__}: {error}"
        self._bound = True
        return ""

    def _is_known(self, name: str) -> bool:
        if name in vars(builtins):
            return True
        if name in typing.__all__:
            self._names[name] = getattr(typing, name)
            return True
        module = _USUAL.get(name, name)
        if module in sys.stdlib_module_names or name in _USUAL:
            self._names[name] = importlib.import_module(module)
            return True
        return False

    def _attempt(self, statement: ast.stmt) -> str:
        code = compile(ast.Module([statement], []), "tests.py", "exec", dont_inherit=True)
        try:
            exec(code, self._names)
        except CannotCross as error:
            self.fault = str(error)
            return self.fault
        except AssertionError as error:
            return f"{ast.unparse(statement)[:200]}{f': {error}' if str(error) else ''}"
        except BaseException as error:  # the tests' own, or the program's: the test has failed
            if isinstance(statement, ast.Import | ast.ImportFrom):  # before the program has any say
                self.fault = f"the test code cannot be run: {error}"
            return f"{ast.unparse(statement)[:200]}: {type(error).__name__}: {str(error)[:200]}"
        return ""

    def _cases(self, statement: ast.stmt, methods: list[str]) -> Iterator[str]:
        import unittest

        kind: Any = self._names[typing.cast(ast.ClassDef, statement).name]
        for method in methods:
            result = unittest.TestResult()
            kind(method).run(result)
            troubles = [text.strip().splitlines()[-1] for _, text in (*result.failures, *result.errors)]
            yield f"{method}: {troubles[0]}" if troubles else ""


def _free_names(trees: list[ast.Module]) -> list[str]:
    """Names that the tests read and never define."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return sorted(read - own)
