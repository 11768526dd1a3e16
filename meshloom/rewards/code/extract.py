"""The program in a response.

Always holds: it is the last fenced block that is Python or says no language; without any block, it is the whole response.
Whether that is Python is found where it runs: nothing a model wrote is parsed here.
"""

import re
from dataclasses import dataclass

_FENCE = re.compile(
    r"^[ \t]*(```+|~~~+)[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = {"", "python", "python3", "py", "py3"}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and whether the response set it off as one."""

    source: str
    fenced: bool


def find_program(response: str) -> Program | None:
    """The program; none in an empty response.

    A block that is not closed (the response was cut) reaches to the end. What is between ``<think>`` and ``</think>`` counts
    only where nothing follows it.
    """
    _, thought, after = response.rpartition("</think>")
    text = after if thought and after.strip() else response
    blocks = [body for _, language, body in _FENCE.findall(text) if language.lower() in _PYTHON]
    if blocks:
        return Program(source=blocks[-1], fenced=True)
    return Program(source=text, fenced=False) if text.strip() and not _FENCE.search(text) else None


def defines(source: str, name: str) -> bool:
    """Whether a program seems to define a function, class or variable of that name at its top."""
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*="
    return re.search(pattern, source, re.MULTILINE) is not None
