"""Programs judged by tests: the verifier ``code``.

Owns: which runs a row's tests need, and the reward that follows. Refuses to know: how a sandbox is built, pools. Always holds:
what a test expects never enters a process that runs the program; a failure of the program is a valid reward, a failure of the
sandbox or of the row raises, so that it becomes an invalid one.
"""

import json
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from meshloom.config.code_settings import CodeSettings
from meshloom.config.errors import UserError
from meshloom.rewards.code.checked import read_verdicts, refuse_heavy_tests
from meshloom.rewards.code.compare import same_output, same_value
from meshloom.rewards.code.extract import defines, find_program
from meshloom.rewards.code.tests import CallTest, CodeTests, ScriptTest, Tests, read_tests
from meshloom.rewards.code.verdict import Finding, Verdict, failure
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.sandbox.client import Outcome, Sandbox, SandboxFault
from meshloom.rewards.sandbox.limits import Limits

_SHOWN_CHARACTERS = 120
_CHECKER_BYTES = 2**30
_NONE = Finding(verdict=Verdict.NO_PROGRAM, detail="the response has no block of Python, and is none itself")
_NO_PYTHON = ("SyntaxError: ", "IndentationError: ", "TabError: ")
_STARTS = 2
"""How often a program is run before the sandbox is held to be at fault."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What became of a program.

    Args:
        passed: tests that passed.
        total: all tests, those that were not run included.
        finding: on the first test that failed, or that all passed.
        cpu_s: processor seconds of the program.
    """

    passed: int
    total: int
    finding: Finding
    cpu_s: float


class CodeJudge:
    """Judges programs in a sandbox of its own. Close it, or use it as a context manager.

    Args:
        settings: bounds and how a score is made.
        budget_s: seconds for all tests of a sample.
        without: means of isolation not to use.

    Raises:
        SandboxFault: if the sandbox does not start.
    """

    def __init__(self, settings: CodeSettings, budget_s: float, without: Collection[str] = ()) -> None:
        self._settings, self._budget_s, self._without = settings, budget_s, tuple(without)
        self.sandbox = Sandbox(settings.python, self._without)
        self._limits = Limits(
            cpu_s=settings.cpu_s,
            wall_s=settings.wall_s,
            memory_bytes=settings.memory_bytes,
            disk_bytes=settings.disk_bytes,
            processes=settings.processes,
            open_files=settings.open_files,
        )

    def score(self, request: RewardRequest) -> dict[str, Any]:
        """The reward of a response, with its reason and further numbers.

        Raises:
            ValueError: if the row has no tests, or they are broken.
            SandboxFault: if programs cannot be run.
        """
        tests = read_tests(request.answer, request.extra)
        found = find_program(request.response)
        if found is None:
            return self._result(Judgement(passed=0, total=1, finding=_NONE, cpu_s=0.0))
        program = found.source
        if tests.prefix and tests.entry_point and not defines(program, tests.entry_point):
            program = _joined(tests.prefix, program)
        judgement = self.judge(program, tests, f"{request.prompt}\n{tests.prefix}" if request.prompt else None)
        if not found.fenced and any(sign in judgement.finding.detail for sign in _NO_PYTHON):
            judgement = replace(judgement, finding=_NONE)
        return self._result(judgement)

    def judge(self, program: str, tests: Tests, prompt: str | None = None) -> Judgement:
        """Run a program against tests. A name that only the tests use, and that ``prompt`` does not say, is their fault."""
        until = time.monotonic() + self._budget_s
        source = program.encode("utf-8", "replace").decode()
        for attempt in range(_STARTS):
            try:
                if tests.code:
                    return self._by_code(source, tests.code, until, prompt)
                return self._by_cases(source, tests, until)
            except SandboxFault:
                self.sandbox.close()
                self.sandbox = Sandbox(self._settings.python, self._without)
                if attempt + 1 == _STARTS:
                    raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        self.sandbox.close()

    def __enter__(self) -> "CodeJudge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, judgement: Judgement) -> dict[str, Any]:
        share = judgement.passed / judgement.total
        score = share if self._settings.score == "share" else float(judgement.passed == judgement.total)
        finding = judgement.finding
        return {
            "score": score,
            "remark": f"{finding.verdict}: {' '.join(finding.detail.split())}"
            if finding.detail
            else str(finding.verdict),
            "tests_passed": share,
            "cpu_s": judgement.cpu_s,
        }

    @property
    def _stops(self) -> bool:
        return self._settings.stop_at_failure or self._settings.score == "all"

    def _by_cases(self, program: str, tests: Tests, until: float) -> Judgement:
        cases = tests.cases[: self._settings.max_tests]
        passed, cpu_s, first = 0, 0.0, None
        for number, case in enumerate(cases, 1):
            left = until - time.monotonic()
            if left <= 0:
                spent = f"the {self._budget_s:g} s for all tests were used up after {number - 1} of {len(cases)}"
                first = first or Finding(verdict=Verdict.TIME_LIMIT, detail=spent)
                break
            outcome = self._run_case(program, case, replace(self._limits, wall_s=min(self._limits.wall_s, left)))
            cpu_s += outcome.ending.cpu_s
            trouble = failure(outcome) or self._compare(outcome, case)
            if trouble is None:
                passed += 1
                continue
            first = first or replace(trouble, detail=f"test {number}: {trouble.detail}")
            if self._stops:
                break
        finding = first or Finding(verdict=Verdict.PASSED)
        return Judgement(passed=passed, total=len(cases), finding=finding, cpu_s=cpu_s)

    def _run_case(self, program: str, case: ScriptTest | CallTest, limits: Limits) -> Outcome:
        size = self._settings.output_bytes
        if isinstance(case, ScriptTest):
            stdin = case.stdin.encode("utf-8", "surrogatepass")
            return self.sandbox.run("script", {"source": program}, limits, output_bytes=size, stdin=stdin)
        task = {
            "source": program,
            "entry_point": case.entry_point,
            "arguments": case.arguments,
            "keywords": case.keywords,
        }
        return self.sandbox.run("call", task, limits, output_bytes=size)

    def _compare(self, outcome: Outcome, case: ScriptTest | CallTest) -> Finding | None:
        tolerance = self._settings.tolerance
        if isinstance(case, ScriptTest):
            text = outcome.output.decode(errors="replace")
            if same_output(text, case.stdout, tolerance):
                return None
            return _wrong(f"it printed {_shown(text)}, not {_shown(case.stdout)}")
        try:
            value = json.loads(outcome.answer)
            if any(same_value(value, wanted, tolerance) for wanted in case.alternatives):
                return None
        except (ValueError, RecursionError):
            return _wrong("what it returned cannot be read")
        return _wrong(f"it returned {_shown(value)}, not {_shown(case.alternatives[0])}")

    def _by_code(self, program: str, code: CodeTests, until: float, prompt: str | None) -> Judgement:
        left = max(0.1, until - time.monotonic())
        limits = replace(self._limits, wall_s=min(self._limits.wall_s, left))
        checking = replace(limits, wall_s=limits.wall_s + 1, cpu_s=limits.wall_s + 1, memory_bytes=_CHECKER_BYTES)
        pieces = list(code.pieces[: self._settings.max_tests])
        task = {"tests": pieces, "setup": code.setup, "entry_point": code.entry_point}
        one, other = socket.socketpair()
        size = self._settings.output_bytes
        served = self.sandbox.start("served", {"source": program}, limits, output_bytes=size, channel=one.detach())
        try:
            checker = self.sandbox.start("check", task, checking, output_bytes=2**24, channel=other.detach())
        except SandboxFault:
            served.close()
            raise
        ran, checked = self.sandbox.finish([served, checker])
        told = read_verdicts(checked, prompt)
        total, passed, first = told.total, told.passed, told.first
        if passed < total:
            refuse_heavy_tests(ran, checked, told)
        trouble = failure(ran)
        if passed == total:
            finding = Finding(verdict=Verdict.PASSED)
        elif trouble is not None:
            finding = trouble
        else:
            finding = _wrong(first)
        if self._stops and passed < total:
            passed = min(passed, total - 1)
        return Judgement(passed=passed, total=total, finding=finding, cpu_s=ran.ending.cpu_s)


def _joined(prefix: str, program: str) -> str:
    """The start that the row gives, and a response that goes on from there: the body of a function, or more code."""
    return f"{prefix.rstrip()}\n{program}"


def _wrong(detail: str) -> Finding:
    return Finding(verdict=Verdict.WRONG_ANSWER, detail=detail)


def _shown(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        return "a value nested too deeply"
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")


def judge_from(**kwargs: Any) -> CodeJudge:
    """The judge from plain values, as they travel to a worker: ``budget_s``, and the fields of ``CodeSettings``."""
    budget_s = float(kwargs.pop("budget_s"))
    try:
        return CodeJudge(CodeSettings.model_validate_json(json.dumps(kwargs)), budget_s)
    except SandboxFault as fault:
        raise UserError("programs of the model cannot be run", where="reward.code", why=str(fault)) from fault
