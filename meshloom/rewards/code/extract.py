"""The program in a response.

Always holds: it is the last fenced block that is Python or says no language; without any such block, the whole response is the
program only if it says so by being nothing but Python.
"""

import ast
import re
import warnings

_FENCE = re.compile(
    r"^[ \t]*(```+|~~~+)[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = {"", "python", "python3", "py", "py3"}


def find_program(response: str) -> str | None:
    """The program, or none.

    A block that is not closed (the response was cut) reaches to the end. What is between ``<think>`` and ``</think>`` counts
    only where nothing follows it.
    """
    _, thought, after = response.rpartition("</think>")
    for text in (after, response) if thought and after.strip() else (response,):
        blocks = [body for _, language, body in _FENCE.findall(text) if language.lower() in _PYTHON]
        if blocks:
            return blocks[-1]
        if is_python(text):
            return text
    return None


def is_python(text: str) -> bool:
    """Whether a text is a Python program that does something."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(statement, ast.Expr) for statement in body) or any(
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) for statement in body
    )


def defines(source: str, name: str) -> bool:
    """Whether a program seems to define a function, class or variable of that name at its top."""
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*="
    return re.search(pattern, source, re.MULTILINE) is not None
