"""What runs in the innermost process, behind all walls: the program, or the tests that question it.

Owns: a fresh ``__main__`` for the program, its streams, its end. Refuses to know: expected values, with one exception: a
checker holds test code, in a sandbox of its own, and speaks to the program over a channel. Always holds: what a program may
write is an answer and never a verdict.
"""

import atexit
import io
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from meshloom.rewards.sandbox.check import check
from meshloom.rewards.sandbox.remote import Served

RESULT, CHANNEL = 3, 4
"""Descriptors for what is answered, and for the talk between tests and program."""
PROGRAM = "program.py"
_MESSAGE_CHARACTERS = 300


def _read_task(descriptor: int) -> dict[str, Any]:
    with open(descriptor, "rb") as file:
        return json.loads(file.read())


def _fresh_main() -> ModuleType:
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = [PROGRAM]
    random.seed(0)  # a fork seeds anew: a program that does not seed would differ from run to run
    main = ModuleType("__main__")
    main.__file__ = PROGRAM
    sys.modules["__main__"] = main
    return main


def _guarded(action: Callable[[], object]) -> int:
    """Run a program's code to its end; the exit code an interpreter would give."""
    try:
        action()
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return (exit_.code or 0) & 0xFF
        _say(str(exit_.code)[:_MESSAGE_CHARACTERS])
        return 1
    except BaseException as error:  # whatever a program raises is its own end
        _say(_describe(error))
        return 1
    return 0


def _describe(error: BaseException) -> str:
    """The exception in one line, with the line of the program it comes from."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno
    place = "" if line is None else f" (line {line})"
    message = error.msg if isinstance(error, SyntaxError) else str(error)[:_MESSAGE_CHARACTERS]
    return f"{type(error).__name__}: {message}{place}"


def _say(text: str) -> None:
    os.write(2, f"\n{text}\n".encode("utf-8", "backslashreplace"))


def _wind_up(code: int) -> int:
    """What an interpreter does at its end: other threads, exit functions, buffers."""
    if main_thread := [thread for thread in threading.enumerate() if thread is not threading.main_thread()]:
        for thread in main_thread:
            if not thread.daemon:
                thread.join()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return code or 120
    return code


def _ended(action: Callable[[], object]) -> int:
    """Exit code of an action with all that follows it; a failure in what follows ends it as well."""
    code = 1
    try:
        code = _guarded(action)
        return _wind_up(code)
    except BaseException as error:
        try:
            _say(_describe(error))
        except BaseException:
            _say("the program failed as it ended")
        return code or 1


def _compiled(source: str) -> CodeType:
    return compile(source, PROGRAM, "exec", dont_inherit=True)


def run_script(descriptor: int) -> int:
    """Run the program as a script: standard input, standard output."""
    task, main = _read_task(descriptor), _fresh_main()
    return _ended(lambda: exec(_compiled(task["source"]), vars(main)))


def run_call(descriptor: int) -> int:
    """Load the program, call one function of it, write what it returns as JSON."""
    task, main = _read_task(descriptor), _fresh_main()

    def call() -> None:
        exec(_compiled(task["source"]), vars(main))
        function = find_function(vars(main), task["entry_point"])
        value = function(*task["arguments"], **task["keywords"])
        text = json.dumps(value, default=_as_json).encode()
        with open(RESULT, "wb", closefd=False) as file:
            file.write(text)

    return _ended(call)


def find_function(names: dict[str, Any], wanted: str) -> Callable[..., Any]:
    """The function that tests are for: of that name, or the method of a class ``Solution``."""
    if wanted in names:
        return names[wanted]
    if "Solution" in names and hasattr(names["Solution"], wanted):
        return getattr(names["Solution"](), wanted)
    raise NameError(f"the program does not define {wanted!r}")


def _as_json(value: Any) -> Any:
    """Lists for what is like one, Python's numbers for those of numpy."""
    if isinstance(value, set | frozenset):
        try:
            return sorted(value)
        except TypeError:
            return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__iter__"):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def run_served(descriptor: int) -> int:
    """Load the program, and do what tests in another sandbox ask of it."""
    task, main = _read_task(descriptor), _fresh_main()

    def answer() -> None:
        exec(_compiled(task["source"]), vars(main))
        Served(vars(main), CHANNEL, find_function).until_closed()

    code = _guarded(answer)
    os._exit(code)


def run_check(descriptor: int) -> int:
    """Run test code against the program at the other end of the channel."""
    task = _read_task(descriptor)
    _fresh_main()
    with open(RESULT, "w", encoding="utf-8", closefd=False) as verdicts:
        return check(task, CHANNEL, verdicts)


JOBS: dict[str, Callable[[int], int]] = {
    "script": run_script,
    "call": run_call,
    "served": run_served,
    "check": run_check,
}
"""What a sandbox can be asked to do."""
