"""Test code, run against a program in another process.

Owns: which statements are tests, the names they use, their verdicts. Refuses to know: the program. Always holds: a name that
the tests use is their own, a builtin or a module of the standard library before it is the program's; a verdict is written by
this process, which runs nothing of the program; what would go wrong with any program is told as a fault of the tests.
"""

import ast
import builtins
import importlib
import json
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from meshloom.rewards.sandbox import remote
from meshloom.rewards.sandbox.cases import run_method
from meshloom.rewards.sandbox.remote import Program

_DETAIL_CHARACTERS = 300
_EVALUATING = {"eval", "exec", "compile"}
"""By these even a short answer can be long work."""
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
    statements = [one for tree in trees for one in tree.body if not _is_start_of_unittest(one)]
    asserting = _asserting(trees)
    tell(tests=sum(_num_tests(statement, asserting) for statement in statements))
    errors = {name: kind for name, kind in vars(builtins).items() if _is_error(kind)}
    program = Program(channel, errors, tell)
    if any(isinstance(node, ast.Name) and node.id in _EVALUATING for tree in trees for node in ast.walk(tree)):
        program.note_large()
    run = _Run(program, trees, entry, tell)
    for statement in statements:
        num_tests = _num_tests(statement, asserting)
        for trouble in run.execute(statement, num_tests):
            tell(ok=not trouble, detail=trouble[:_DETAIL_CHARACTERS])
        if run.fault:
            tell(fault=run.fault)
            return 1
        if run.trouble and not num_tests:
            if not run.exited:
                tell(stopped=run.trouble[:_DETAIL_CHARACTERS])
            break
    tell(waited_s=program.waited_s, done=True)
    return 0


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def _call_of_check(trees: list[ast.Module], entry: str | None) -> list[ast.stmt]:
    """``check(entry_point)``, where the tests define ``check`` and leave the call to whoever runs them."""
    defined = any(isinstance(one, ast.FunctionDef) and one.name == "check" for tree in trees for one in tree.body)
    called = any(_is_call_of_check(one) for tree in trees for one in tree.body)
    return ast.parse(f"check({entry})").body if entry and defined and not called else []


def _is_call_of_check(statement: ast.stmt) -> bool:
    return _called(statement) == "check"


def _called(statement: ast.stmt) -> str:
    """The name that a statement calls and does nothing besides; empty: it is no such statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


def _is_start_of_unittest(statement: ast.stmt) -> bool:
    """``unittest.main()`` looks for tests elsewhere and exits; methods are run one by one instead."""
    return _called(statement) == "unittest.main"


def _asserting(trees: list[ast.Module]) -> set[str]:
    """Functions of the tests that assert something, or call one that does."""
    functions = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    found: set[str] = set()
    while more := {one.name for one in functions if one.name not in found and _asserts(one.body, found)}:
        found |= more
    return found


def _asserts(statements: list[ast.stmt], asserting: set[str]) -> bool:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return any(isinstance(node, ast.Assert) or _calls(node, asserting) for node in nodes)


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _num_tests(statement: ast.stmt, asserting: set[str]) -> int:
    """How many tests a statement is: an assert, a call of what asserts, or a loop and the like around one, is one."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    if isinstance(statement, ast.ClassDef):
        return len(_methods(statement))
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return 0
    return int(_is_call_of_check(statement) or _asserts([statement], asserting))


def _methods(statement: ast.stmt) -> list[str]:
    """Test methods of a class for unittest."""
    if not isinstance(statement, ast.ClassDef) or not any("TestCase" in ast.unparse(base) for base in statement.bases):
        return []
    return [one.name for one in statement.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test")]


class _Run:
    """Executes test code one statement at a time."""

    def __init__(self, program: Program, trees: list[ast.Module], entry: str | None, tell: Callable[..., None]) -> None:
        self._program, self._names = program, {"__name__": "tests", "__builtins__": builtins}
        self._free, self._entry, self._tell = _free_names(trees), entry, tell
        self._bound, self._fits, self._missing = False, False, set[str]()
        self.fault, self.trouble, self.exited = "", "", False

    def execute(self, statement: ast.stmt, num_tests: int) -> Iterator[str]:
        """Run a statement; for each test in it, what was wrong, or nothing."""
        self.trouble = self._bind() or self._attempt(statement)
        if methods := _methods(statement):
            yield from ([self.trouble] * num_tests if self.trouble else self._cases(statement, methods))
        elif num_tests:
            yield self.trouble
        self.fault = self.fault or self._program.fault

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
            self._missing = set(wanted) - set(there) - {self._entry, "candidate"}
            self._fits = bool(there or self._entry)
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
        except AssertionError as error:
            return f"{ast.unparse(statement)[:200]}{f': {error}' if str(error) else ''}"
        except BaseException as error:  # the tests' own, or the program's: the test has failed
            if isinstance(statement, ast.Import | ast.ImportFrom):  # before the program has any say
                self.fault = f"the test code cannot be run: {error}"
            self._note(error)
            self.exited = isinstance(error, SystemExit) and not error.code
            return f"{ast.unparse(statement)[:200]}: {type(error).__name__}: {str(error)[:200]}"
        return ""

    def _cases(self, statement: ast.stmt, methods: list[str]) -> Iterator[str]:
        kind = self._names[typing.cast(ast.ClassDef, statement).name]
        for method in methods:
            trouble, errors = run_method(kind, method)
            for error in errors:
                self._note(error)
            yield trouble

    def _note(self, error: BaseException) -> None:
        """Tell an error that any program would meet from one that this program has brought about."""
        if _comes_from_program(error):
            return
        if isinstance(error, NameError) and error.name in self._missing:
            if self._fits:  # else the program has nothing of what is tested
                self._tell(missing=error.name)  # whether programs had to define it is said in the prompt
        elif isinstance(error, NameError | ImportError) or isinstance(error, MemoryError) and not self._program.large:
            self.fault = self.fault or f"the test code fails by itself: {type(error).__name__}: {str(error)[:200]}"


def _comes_from_program(error: BaseException) -> bool:
    """Whether the program raised it, or text that was evaluated: that may be the program's."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (remote.__file__, "<string>"):
            return True
        trace = trace.tb_next
    return False


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
