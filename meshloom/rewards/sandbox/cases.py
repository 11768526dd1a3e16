"""Test methods of ``unittest``, run one at a time.

Owns: what went wrong in a method, its fixtures included. Refuses to know: whose fault that is.
"""

import unittest
from types import TracebackType
from typing import Any

_Told = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class _Result(unittest.TestResult):
    """Keeps exceptions besides their texts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[BaseException] = []

    def addError(self, test: unittest.TestCase, err: _Told) -> None:  # noqa: N802
        self._see(err)
        super().addError(test, err)

    def addFailure(self, test: unittest.TestCase, err: _Told) -> None:  # noqa: N802
        self._see(err)
        super().addFailure(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: _Told | None) -> None:  # noqa: N802
        if err is not None:
            self._see(err)
        super().addSubTest(test, subtest, err)

    def _see(self, err: _Told) -> None:
        if err[1] is not None:
            self.seen.append(err[1])


def run_method(kind: Any, method: str) -> tuple[str, list[BaseException]]:
    """Run a method of a test case, fixtures of its class too; what was wrong, or nothing, and the exceptions."""
    result = _Result()
    unittest.TestSuite([kind(method)]).run(result)
    texts = [text.strip().splitlines()[-1] for _, text in (*result.failures, *result.errors)]
    if result.unexpectedSuccesses:
        texts.append("it was to fail")
    return f"{method}: {texts[0]}" if texts else "", result.seen
