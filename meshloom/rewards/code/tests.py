"""The tests of a row, in the forms that data sets have them.

Owns: reading them. Refuses to know: how they are run. Always holds: a row whose tests cannot be read raises ``ValueError``, so
that it becomes an invalid reward and not a zero.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIELDS = (
    "tests",
    "inputs",
    "input_output",
    "test",
    "test_list",
    "test_cases",
    "private_test_cases",
    "public_test_cases",
)
_MAX_TEXT = 2**26


@dataclass(frozen=True, kw_only=True)
class ScriptTest:
    """Standard input, and what the program must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True, kw_only=True)
class CallTest:
    """Arguments of a function, and what it must return. ``alternatives`` are equally right."""

    entry_point: str
    arguments: list[Any]
    keywords: dict[str, Any]
    alternatives: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """Test code: pieces that each hold tests, and what comes before them."""

    pieces: tuple[str, ...]
    setup: str
    entry_point: str | None


@dataclass(frozen=True, kw_only=True)
class Tests:
    """All tests of a row: cases that are judged one by one, or code. ``prefix`` stands before a program that does not define
    the entry point itself."""

    cases: tuple[ScriptTest | CallTest, ...] = ()
    code: CodeTests | None = None
    prefix: str = ""
    entry_point: str | None = None


def read_tests(answer: Any, extra: Mapping[str, Any]) -> Tests:
    """The tests of a row: its answer, or where that has none, its further columns.

    Raises:
        ValueError: if there are none, or they are in no known form.
    """
    found = _opened(answer)
    if isinstance(found, list):
        found = {"tests": found}
    if isinstance(found, str) and "assert" in found:
        found = {"test": found}
    if not isinstance(found, Mapping) or not any(name in found for name in _FIELDS):
        found = extra
    fields = {**{name: value for name, value in extra.items() if name not in _FIELDS}, **found}
    tests = _tests_of(fields)
    if not tests.cases and tests.code is None:
        raise ValueError("the row has no tests")
    return tests


def _opened(value: Any) -> Any:
    """What a text of JSON holds; other values as they are."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _tests_of(fields: Mapping[str, Any]) -> Tests:
    entry = _entry_point(fields)
    if "input_output" in fields and "inputs" not in fields:
        inner = _opened(fields["input_output"])
        if not isinstance(inner, Mapping):
            raise ValueError("input_output is no JSON object")
        return _tests_of({**{k: v for k, v in fields.items() if k != "input_output"}, **inner})
    if "inputs" in fields:
        return _pairs(fields, entry)
    if "test" in fields or "test_list" in fields:
        return _code(fields, entry)
    cases: list[ScriptTest | CallTest] = []
    for name in ("tests", "test_cases", "public_test_cases", "private_test_cases"):
        listed = _opened(fields.get(name) or [])
        if isinstance(listed, str) and name == "tests" and "assert" in listed:
            return _code({**fields, "test": listed}, entry)
        if not isinstance(listed, list):
            raise ValueError(f"{name} is no list of tests (packed tests are not unpacked: write them out as JSON)")
        if listed and all(isinstance(one, str) for one in listed):
            return _code({**fields, "test_list": listed}, entry)
        cases += [_case(one, entry) for one in listed]
    return Tests(cases=tuple(cases), prefix=_prefix(fields, entry), entry_point=entry)


def _entry_point(fields: Mapping[str, Any]) -> str | None:
    metadata = _opened(fields.get("metadata"))
    places = (fields, metadata if isinstance(metadata, Mapping) else {})
    for name in ("entry_point", "fn_name", "func_name"):
        for place in places:
            if isinstance(place.get(name), str) and place[name]:
                return place[name].rpartition(".")[2]
    return None


def _prefix(fields: Mapping[str, Any], entry: str | None) -> str:
    text = fields.get("prefix", fields.get("starter_code", ""))
    if not text and entry and isinstance(fields.get("prompt"), str) and f"def {entry}" in fields["prompt"]:
        text = fields["prompt"]
    return text if isinstance(text, str) else ""


def _pairs(fields: Mapping[str, Any], entry: str | None) -> Tests:
    inputs, outputs = _opened(fields["inputs"]), _opened(fields.get("outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs are not two lists of one length")
    pairs = zip(inputs, outputs, strict=True)
    cases = tuple(_case({"input": given, "output": wanted}, entry) for given, wanted in pairs)
    return Tests(cases=cases, prefix=_prefix(fields, entry), entry_point=entry)


def _case(one: Any, entry: str | None) -> ScriptTest | CallTest:
    if not isinstance(one, Mapping):
        raise ValueError(f"a test is no object: {one!r:.100}")
    if "arguments" in one or "expected" in one:
        return _own_call(one, entry)
    given = next((one[name] for name in ("stdin", "input") if name in one), None)
    wanted = next((one[name] for name in ("stdout", "output") if name in one), None)
    if given is None or wanted is None:
        raise ValueError(f"a test has neither input and output nor arguments and expected; it has {sorted(one)}")
    if entry is None or one.get("testtype") == "stdin":
        return ScriptTest(stdin=_text(given), stdout=_text(wanted))
    return _foreign_call(given, wanted, entry)


def _own_call(one: Mapping[str, Any], entry: str | None) -> CallTest:
    if entry is None:
        raise ValueError("tests with arguments need an entry_point")
    if "expected" not in one:
        raise ValueError("a test with arguments has no expected value")
    arguments, keywords = one.get("arguments", []), one.get("keywords", {})
    if not isinstance(arguments, list) or not isinstance(keywords, Mapping):
        raise ValueError("arguments are a list, keywords an object")
    return CallTest(entry_point=entry, arguments=arguments, keywords=dict(keywords), alternatives=(one["expected"],))


def _foreign_call(given: Any, wanted: Any, entry: str) -> CallTest:
    """Arguments as a list, or as JSON of one a line; the value alone, or in a list of one."""
    if isinstance(given, str):
        given = [_json_or_text(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list):
        given = [given]
    value = _json_or_text(wanted) if isinstance(wanted, str) else wanted
    wrapped = isinstance(wanted, list) and len(wanted) == 1
    alternatives = (wanted[0], value) if wrapped else (value,)
    return CallTest(entry_point=entry, arguments=given, keywords={}, alternatives=alternatives)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _code(fields: Mapping[str, Any], entry: str | None) -> Tests:
    pieces = [fields["test"]] if "test" in fields else _opened(fields["test_list"])
    imports = _opened(fields.get("test_imports") or [])
    setup = [*(imports if isinstance(imports, list) else [imports]), fields.get("test_setup_code") or ""]
    if not isinstance(pieces, list) or not all(isinstance(one, str) for one in (*pieces, *setup)):
        raise ValueError("test code is no text")
    code = CodeTests(pieces=tuple(pieces), setup="\n".join(map(str, setup)), entry_point=entry)
    return Tests(code=code, prefix=_prefix(fields, entry), entry_point=entry)
