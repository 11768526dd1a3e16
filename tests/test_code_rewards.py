"""Programs judged by tests of all forms: right ones pass, wrong ones and cheats do not, broken rows are invalid."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.code_settings import CodeSettings
from meshloom.config.errors import UserError
from meshloom.config.settings import ComponentSettings, RewardSettings
from meshloom.rewards.code.__main__ import main as judge_from_command
from meshloom.rewards.code.compare import same_output, same_value
from meshloom.rewards.code.extract import find_program
from meshloom.rewards.code.judge import CodeJudge
from meshloom.rewards.code.tests import read_tests
from meshloom.rewards.combined import Component, Computed, combine
from meshloom.rewards.function import choose_function, code_rewards
from meshloom.rewards.isolation import require_isolation
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest
from meshloom.rewards.pool import RewardPool
from meshloom.rewards.verifiers import VERIFIERS

SETTINGS = CodeSettings(enabled=True, cpu_s=3.0, wall_s=30.0, memory_bytes=2**28)


@pytest.fixture(scope="module")
def judge() -> Iterator[CodeJudge]:
    with CodeJudge(SETTINGS, 120.0) as one:
        yield one


def ask(program: str, answer: Any, **extra: Any) -> RewardRequest:
    response = f"Here it is:\n```python\n{program}\n```\nDone."
    return RewardRequest(response=response, answer=answer, data_source="d", extra=extra, prompt="p", finish="stop")


ADD = "def add(a, b):\n    return a + b"
FORMS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "input and output": (
        "print(sum(map(int, input().split())))",
        "print(3)",
        {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]},
        {},
    ),
    "the same as JSON": (
        "print(sum(map(int, input().split())))",
        "print(4)",
        json.dumps({"inputs": ["1 2"], "outputs": ["3"]}),
        {},
    ),
    "calls, values wrapped": (
        ADD,
        ADD.replace("+", "-"),
        {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]},
        {},
    ),
    "calls of a method": (
        "class Solution:\n    def add(self, a, b):\n        return a + b",
        "class Solution: pass",
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
        {},
    ),
    "cases as text, a line an argument": (
        ADD,
        ADD.replace("+", "-"),
        [{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}],
        {"metadata": json.dumps({"func_name": "Solution.add"})},
    ),
    "cases by input and output": (
        "print(input()[::-1])",
        "print(1)",
        [{"input": "ab", "output": "ba", "testtype": "stdin"}],
        {},
    ),
    "arguments and expected": (
        ADD,
        ADD.replace("+", "*"),
        {
            "entry_point": "add",
            "tests": [{"arguments": [1, 2], "expected": 3}, {"keywords": {"a": 0.1, "b": 0.2}, "expected": 0.3}],
        },
        {},
    ),
    "a check function": (
        ADD,
        ADD.replace("+", "-"),
        {
            "entry_point": "add",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate([1], [2]) == [1, 2]",
        },
        {},
    ),
    "a list of asserts": (
        ADD,
        ADD.replace("+", "-"),
        {"test_list": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]},
        {},
    ),
    "text of asserts": (ADD, ADD.replace("+", "-"), "import math\nassert math.isclose(add(0.1, 0.2), 0.3)", {}),
    "a test case": (
        ADD,
        ADD.replace("+", "-"),
        {
            "test": "import unittest\nclass Tests(unittest.TestCase):\n"
            "    def test_sum(self):\n        self.assertEqual(add(1, 2), 3)"
        },
        {},
    ),
    "asserts about the program's own objects": (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\ndef swap(p):\n    return Pair(p.b, p.a)",
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\ndef swap(p):\n    return p",
        ["assert swap(Pair(1, 2)).a == 2"],
        {},
    ),
    "asserts about arguments that are changed": (
        "def order(values):\n    values.sort()",
        "def order(values):\n    pass",
        ["values = [3, 1, 2]\norder(values)\nassert values == [1, 2, 3]"],
        {},
    ),
    "asserts about exceptions": (
        "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5",
        "def root(x):\n    return abs(x) ** 0.5",
        ["try:\n    root(-1)\n    raised = False\nexcept ValueError:\n    raised = True\nassert raised"],
        {},
    ),
    "tuples, sets, dicts and generators": (
        "def make():\n    return (1, {2, 3}, {4: [5]}, float('inf'), b'x', None)\ndef count():\n    yield from range(3)",
        "def make():\n    return [1, [2, 3], {4: [5]}, float('inf'), b'x', None]\ndef count():\n    yield 0",
        ["assert make() == (1, {3, 2}, {4: [5]}, float('inf'), b'x', None)", "assert list(count()) == [0, 1, 2]"],
        {},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_passes_and_a_wrong_one_fails(judge: CodeJudge, form: str) -> None:
    right, wrong, answer, extra = FORMS[form]
    found = judge.score(ask(right, answer, **extra))
    assert (found["score"], found["remark"]) == (1.0, "passed")
    assert judge.score(ask(wrong, answer, **extra))["score"] < 1


def test_tests_may_stand_in_a_column_of_their_own(judge: CodeJudge) -> None:
    assert judge.score(ask(ADD, None, test_list=["assert add(1, 2) == 3"]))["score"] == 1
    assert judge.score(ask("print(1)", None, input_output='{"inputs": [""], "outputs": ["1"]}'))["score"] == 1
    listed = {
        "public_test_cases": '[{"input": "", "output": "1"}]',
        "private_test_cases": [{"input": "", "output": "2"}],
    }
    assert judge.score(ask("print(1)", "", **listed))["score"] == 0.5


def test_a_program_that_goes_on_from_the_given_start_is_joined_to_it(judge: CodeJudge) -> None:
    row = {
        "entry_point": "add",
        "prompt": "def add(a, b):\n    '''Sum.'''\n",
        "test": "def check(f):\n    assert f(1, 2) == 3",
    }
    assert judge.score(ask("    return a + b", row))["score"] == 1
    assert judge.score(ask(ADD, row))["score"] == 1


def test_the_score_is_the_share_of_tests_or_all_or_nothing() -> None:
    row = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "9"]}
    asserts = ["assert f(1) == 1", "assert f(2) == 0", "assert f(3) == 3"]
    with CodeJudge(SETTINGS, 60) as judge:
        found = judge.score(ask("print(input())", row))
        assert (found["score"], found["tests_passed"]) == (0.75, 0.75)
        assert found["remark"] == "wrong_answer: test 4: it printed '4\\n', not '9'"
        assert judge.score(ask("def f(x): return x", asserts))["score"] == pytest.approx(2 / 3)
    with CodeJudge(SETTINGS.model_copy(update={"score": "all"}), 60) as judge:
        assert judge.score(ask("print(input())", row))["score"] == 0
        assert judge.score(ask("def f(x): return x", asserts))["score"] == 0
    with CodeJudge(SETTINGS.model_copy(update={"max_tests": 3, "score": "all"}), 60) as judge:
        assert judge.score(ask("print(input())", row))["score"] == 1
    with CodeJudge(SETTINGS.model_copy(update={"stop_at_failure": True}), 60) as judge:
        row = {"inputs": ["1", "2", "3"], "outputs": ["1", "x", "3"]}
        assert judge.score(ask("print(input())", row))["score"] == pytest.approx(1 / 3)


def test_the_time_of_all_tests_together_is_bounded() -> None:
    row = {"inputs": [""] * 50, "outputs": ["1"] * 50}
    with CodeJudge(SETTINGS, 2.0) as judge:
        found = judge.score(ask("import time\ntime.sleep(0.3)\nprint(1)", row))
    assert 0 <= found["score"] < 1
    assert found["remark"].startswith("time_limit: ")


CODE = {
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 6\n"
    "assert all([f(1) == 2])\nassert len([f(5)]) == 1 and f(5) == 6",
}
CALLS = {"entry_point": "f", "tests": [{"arguments": [1], "expected": 2}, {"arguments": [5], "expected": 6}]}
PRINTS = {"inputs": ["1"], "outputs": ["2"]}
EQUALS_ALL = "class All(BASE):\n def __eq__(self, o): return True\n def __ne__(self, o): return False\n"
CHEATS = {
    "an object that equals everything": EQUALS_ALL.replace("BASE", "int") + "def f(x): return All(0)",
    "an object of no known kind that equals everything": EQUALS_ALL.replace("BASE", "object")
    + "def f(x): return All()",
    "an exit before the tests": "import sys\ndef f(x): return 0\nsys.exit(0)",
    "an exit in the tests": "import sys\ndef f(x): sys.exit(0)",
    "a hard exit in the tests": "import os\ndef f(x): os._exit(0)",
    "verdicts written everywhere": (
        "import os, json\nfor fd in range(1, 64):\n"
        " for text in ('{\"ok\": true, \"tests\": 1}', 'true', '2', '6'):\n"
        "  try: os.write(fd, (text + '\\n').encode())\n  except OSError: pass\ndef f(x): return 0"
    ),
    "verdicts written instead of an answer": (
        "import os\ndef f(x):\n for fd in range(3, 64):\n"
        '  try: os.write(fd, b\'{"ok": true, "tests": 1}\\n\' * 9)\n  except OSError: pass\n os._exit(0)'
    ),
    "builtins replaced": (
        "import builtins, operator\nfor name in ('all', 'any', 'isinstance', 'len', 'abs'):\n"
        " setattr(builtins, name, lambda *a, **k: True)\ndef f(x): return 0"
    ),
    "a name of the tests' taken": (
        "def check(*a): pass\nclass AssertionError(Exception): pass\ndef candidate(x): return 0\ndef f(x): return 0"
    ),
    "an assertion error of its own": "def f(x): raise AssertionError",
    "an import error of its own": "def f(x): raise ImportError('numpy')",
    "a skipped test": "import unittest\ndef f(x): raise unittest.SkipTest",
    "frames searched for the expected value": (
        "import gc, sys\ndef f(x):\n frame = sys._getframe()\n while frame:\n  for v in list(frame.f_locals.values()):\n"
        "   if isinstance(v, dict) and 'expected' in v: return v['expected']\n  frame = frame.f_back\n"
        " for o in gc.get_objects():\n  if isinstance(o, dict) and 'expected' in o: return o['expected']\n return 0"
    ),
    "json replaced": (
        "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a, **k: ['has', []]\ndef f(x): return 0"
    ),
    "a signal to the checker": "import os\ndef f(x):\n try: os.kill(-1, 9)\n except OSError: pass\n return 0",
    "an answer without end": "def f(x):\n a = []\n for _ in range(20000): a = [a]\n return a",
    "an answer as deep as can be read": "def f(x):\n a = []\n for _ in range(900): a = [a]\n return a",
    "an integer longer than can be read": "def f(x):\n import sys\n sys.set_int_max_str_digits(0)\n return 10**9000",
    "a lone surrogate": "def f(x): return chr(0xD800)",
    "a long answer": "def f(x): return 'x' * 2 * 10**7",
    "not a number": "def f(x): return float('nan')",
}


@pytest.fixture(scope="module")
def hasty() -> Iterator[CodeJudge]:
    """A judge that does not wait long, for programs that spoil their own answers."""
    with CodeJudge(SETTINGS.model_copy(update={"wall_s": 2.0, "cpu_s": 1.0, "stop_at_failure": True}), 120.0) as one:
        yield one


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_worth_nothing(hasty: CodeJudge, cheat: str) -> None:
    for row in (CODE, CALLS):
        found = hasty.score(ask(CHEATS[cheat], row))
        assert found["score"] == 0, (row, found)
        assert found["remark"].partition(":")[0] != "passed"


def test_an_object_of_the_program_is_no_array_to_the_tests(judge: CodeJudge) -> None:
    """numpy took the address an object told for the checker's own memory."""
    array = "{'shape': (1,), 'typestr': '<i8', 'data': (8, False), 'version': 3}"
    program = f"class Array:\n    __array_interface__ = {array}\n    x = 1\ndef f(x): return Array()"
    found = judge.score(
        ask(program, ["assert f(1).x == 1", "assert np.asarray(f(1)).dtype != object", "assert f(1).x"])
    )
    assert found["score"] == pytest.approx(2 / 3)
    assert "dtype" in found["remark"]


ALSO_TESTS = {
    "a loop": ("assert f(1) == 1\nfor i in range(5):\n    assert f(i) == i * i", 0.5),
    "a test that is called": ("assert f(1) == 1\ndef test_b():\n    assert f(2) == 4\ntest_b()", 0.5),
    "a helper that asserts": (
        "def same(a, b):\n    assert a == b\ndef all_same(a, b):\n    same(a, b)\nall_same(f(1), 1)\nsame(f(2), 4)",
        0.5,
    ),
    "a statement that raises": ("assert f(1) == 1\nif f(2) != 4:\n    raise ValueError('wrong')", 0.5),
    "an exit that fails": ("import sys\nassert f(1) == 1\nif f(2) != 4:\n    sys.exit(1)", 0.5),
    "a block that expects an error": (
        "assert f(1) == 1\ntry:\n    f('a')\n    assert False\nexcept TypeError:\n    pass",
        0.5,
    ),
    "tests that unittest is to find": (
        "import unittest\nclass T(unittest.TestCase):\n"
        "    @classmethod\n    def setUpClass(cls):\n        cls.x = 1\n"
        "    def test_a(self):\n        self.assertEqual(f(self.x), 1)\n"
        "    def test_b(self):\n        self.assertEqual(f(2), 4)\n"
        "unittest.main()\nif __name__ == '__main__':\n    assert f(2) == 4",
        0.5,
    ),
    "an exit at the end": ("import sys\nassert f(1) == 1\nassert f(2) == 4\nsys.exit(0)", 0.5),
}


@pytest.mark.parametrize("form", ALSO_TESTS)
def test_what_fails_outside_of_an_assert_counts_too(judge: CodeJudge, form: str) -> None:
    """Only asserts at the top counted: a program that failed in a loop or in a called test had the full reward."""
    tests, share = ALSO_TESTS[form]
    assert judge.score(ask("def f(x): return x * x", tests))["score"] == 1
    assert judge.score(ask("def f(x): return x", tests))["score"] == share


def test_fake_verdicts_on_standard_output_are_output(judge: CodeJudge) -> None:
    assert judge.score(ask("print('passed')\nimport os\nos._exit(0)", PRINTS))["score"] == 0


def test_names_the_tests_use_are_their_own_first(judge: CodeJudge) -> None:
    """A program cannot stand in for a module or a builtin that the tests compare with."""
    cheat = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef len(x): return 7\ndef f(x): return 0"
    assert judge.score(ask(cheat, ["assert math.isclose(f(1), 2)"]))["score"] == 0
    assert judge.score(ask(cheat, ["assert len('x' * f(1)) == 7"]))["score"] == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "no tests"),
        ("42", "no tests"),
        ({"inputs": ["1"], "outputs": []}, "not two lists of one length"),
        ({"tests": [{"arguments": [1], "expected": 2}]}, "need an entry_point"),
        ([{"input": "1"}], "neither input and output"),
        ({"test": "def (:", "entry_point": "f"}, "no Python"),
        ({"test": "x = 1"}, "no assert"),
        ({"test": "import no_such_module\nassert f(1) == 1"}, "no_such_module"),
        ({"private_test_cases": "eJxyz"}, "not unpacked"),
        (["assert f(lambda x: x)(1) == 1"], "cannot cross"),
    ],
)
def test_a_row_with_broken_tests_is_never_a_zero(judge: CodeJudge, answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        judge.score(ask("def f(x): return x", answer))


CASE = "import decimal, unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        "
FAULTS = {
    "unittest swallows what cannot cross": (CASE + "self.assertEqual(f(decimal.Decimal(1)), 1)", "cannot cross"),
    "so does the test": ("try:\n    f(print)\nexcept Exception:\n    pass\nassert f(1) == 2", "cannot cross"),
    "a module that is missing in a check": (
        "def check(c):\n    import no_such_module\n    assert c(1) == 1",
        "no_such_module",
    ),
    "a module that is missing in a case": (CASE + "import no_such_module", "no_such_module"),
    "a name that is missing": ("def g(x):\n    return nowhere(x)\ndef check(c):\n    assert c(1) == g(1)", "nowhere"),
    "a name before it is given": ("def check(c):\n    assert c(1) == x\n    x = 1", "local variable 'x'"),
    "too much memory": ("def check(c):\n    assert c(1) == 1 and bytearray(10**11)", "MemoryError"),
    "a crash": ("import ctypes\ndef check(c):\n    assert c(1) == 1\n    ctypes.string_at(0)", "ended: signal"),
    "too much time": ("def check(c):\n    assert c(1) == 1\n    while True: pass", "the tests themselves took"),
    "too much time between calls": (
        "import time\ndef check(c):\n    for i in range(50):\n        time.sleep(0.2)\n        assert c(i) == i",
        "the tests themselves took",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tests_that_fail_by_themselves_are_never_a_zero(hasty: CodeJudge, fault: str) -> None:
    """A right program had a zero, and it was held to be valid."""
    test, words = FAULTS[fault]
    with pytest.raises(ValueError, match=words):
        hasty.score(ask("def f(x): return x", {"entry_point": "f", "test": test}))


WAYS_OUT = {
    "a function that is not there": ("def g(x): return x", "assert f(1) == 1\nassert g(1) == 1"),
    "nothing at all": ("x = 1", "assert f(1) == 1"),
    "a class that the prompt names": ("def f(x): return x", "assert f(Pair(1, 2)).a == 2"),
    "a large number": ("def f(x): return 10**12", "for _ in range(f(1)): pass\nassert f(1) == 1"),
    "a large size": ("def f(x): return 10**12", "assert len([0] * f(1)) == 1"),
    "sleep": ("import time\ndef f(x): time.sleep(60)", "import numpy\nassert f(1) == 1"),
    "short sleeps": ("import time\ndef f(x): time.sleep(0.02)", "while f(1) != 1: pass\nassert f(1) == 1"),
    "text that is no expression": ("def f(x): return 'foo'", "assert eval(f(1)) == 24"),
    "text that is a large size": ("def f(x): return '[0] * 10**12'", "assert len(eval(f(1))) == 24"),
    "an import error": ("def f(x): raise ImportError('numpy')", "assert f(1) == 1"),
    "a name error": ("def f(x): return y", "assert f(1) == 1"),
    "no memory": ("def f(x): raise MemoryError", "assert f(1) == 1"),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_program_cannot_make_tests_look_broken(hasty: CodeJudge, way: str) -> None:
    """Or it would choose not to be judged."""
    program, test = WAYS_OUT[way]
    request = ask(program, test)
    named = RewardRequest(
        response=request.response, answer=test, data_source="d", extra={}, prompt="Write f, g and Pair.", finish="stop"
    )
    assert hasty.score(named)["tests_passed"] < 1


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```py\nx = 1\n```\nb\n```\nx = 2\n```\nc", "x = 2\n"),
        ("```python\nx = 1\n```\nOutput:\n```text\n2\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("~~~\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("x = 1\nprint(x)", "x = 1\nprint(x)"),
        ("    return a + b", "    return a + b"),
        ("", None),
        (" \n", None),
        ("```java\nclass A {}\n```", None),
    ],
)
def test_the_program_is_the_last_block_of_python(response: str, program: str | None) -> None:
    found = find_program(response)
    assert (found and found.source) == program


def test_a_start_that_is_given_may_be_gone_on_with_without_a_block(judge: CodeJudge) -> None:
    row = {"entry_point": "add", "prompt": "def add(a, b):\n", "test": "def check(f):\n    assert f(1, 2) == 3"}
    request = RewardRequest(
        response="    return a + b\n", answer=row, data_source="d", extra={}, prompt="p", finish="stop"
    )
    assert judge.score(request)["score"] == 1


def test_a_response_without_program_is_the_models_fault(judge: CodeJudge) -> None:
    request = RewardRequest(response="I cannot.", answer=PRINTS, data_source="d", extra={}, prompt="p", finish="stop")
    found = judge.score(request)
    assert (found["score"], found["remark"]) == (
        0.0,
        "no_program: the response has no block of Python, and is none itself",
    )


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2  \n\n", "1 2\n", True),
        ("1\r\n2", "1\n2", True),
        ("0.30000000000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("1e400", "inf", False),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_with_tolerance_for_space_and_fractions(found: str, wanted: str, same: bool) -> None:
    assert same_output(found, wanted, 1e-6) is same


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (1, 1.0, True),
        (1.0, 1, True),
        (1000000007.0 - 900, 1000000007, False),
        ([2.0**53], [2**53 + 1], False),
        (1, True, False),
        (True, 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ("1", 1, False),
        (None, None, True),
        (0, None, False),
        (10**400, 1.5, False),
        (float("nan"), 1.0, False),
    ],
)
def test_values_are_compared_by_kind(found: Any, wanted: Any, same: bool) -> None:
    assert same_value(found, wanted, 1e-6) is same


def test_code_runs_only_where_it_is_asked_for() -> None:
    with pytest.raises(UserError, match="was not asked for") as caught:
        choose_function(RewardSettings(function="code"))
    assert caught.value.fix == "set reward.code.enabled=true"
    settings = RewardSettings(function="code", code=SETTINGS, kwargs={"cpu_s": 3})
    with pytest.raises(UserError, match="settings of its own"):
        choose_function(settings)


def test_less_isolation_than_is_demanded_is_refused() -> None:
    with pytest.raises(UserError, match=r"not there: network, processes") as caught:
        require_isolation(SETTINGS, ("namespaces", "own_user", "landlock", "filter"))
    assert "programs can reach the network" in str(caught.value.why)
    assert caught.value.fix.endswith("reward.code.require=[]")


def test_rewards_come_through_the_pool_with_their_reasons() -> None:
    settings = RewardSettings(function="code", code=SETTINGS, workers=1, deadline_s=100)
    with RewardPool(settings) as pool:
        right, wrong, broken = pool.score([ask("print(2)", PRINTS), ask("print(3)", PRINTS), ask("print(2)", "42")])
    assert (right.value, right.detail) == (1.0, "passed")
    assert (wrong.value, wrong.detail) == (0.0, "wrong_answer: test 1: it printed '3\\n', not '2'")
    assert (broken.value, broken.reason) == (None, InvalidReason.RAISED)
    assert "no tests" in broken.detail


def test_as_a_component_it_keeps_its_bounds_and_its_reasons() -> None:
    """The settings of programs are the run's; a remark of a component is the sample's."""
    part = ComponentSettings(function="code", deadline_s=50)
    settings = RewardSettings(
        components={"tests": part, "brief": ComponentSettings(function="length_penalty")}, code=SETTINGS
    )
    ((path, alone),) = code_rewards(settings).items()
    assert path == "reward.components.tests"
    assert choose_function(alone).kwargs["budget_s"] == 40
    brief = Component(name="brief", scorer=Computed(lambda request: 0.5))
    wrong = Reward(value=0.0, detail="wrong_answer: test 1", parts={"tests_passed": 0.0})
    found = combine([(Component(name="tests", scorer=brief.scorer), wrong), (brief, Reward(value=0.5))])
    assert (found.value, found.detail) == (0.5, "wrong_answer: test 1")


@pytest.mark.parametrize("passes", [True, False])
def test_one_program_can_be_judged_from_the_command_line(
    tmp_path: Path, passes: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("print(sum(map(int, input().split())))")
    (tmp_path / "tests.json").write_text(json.dumps({"inputs": ["3 4"], "outputs": ["7" if passes else "8"]}))
    assert judge_from_command([str(tmp_path / "program.py"), str(tmp_path / "tests.json")]) == (0 if passes else 1)
    first, second = capfd.readouterr().out.splitlines()
    assert first.startswith("programs of the model run behind: ")
    assert second == ("1  passed" if passes else "0  wrong_answer: test 1: it printed '7\\n', not '8'")


def test_the_verifier_has_its_name() -> None:
    assert "code" in VERIFIERS
    assert read_tests({"inputs": ["a"], "outputs": ["b"]}, {}).cases
