"""Tools: Python functions that the model may call.

Owns: how calls are found in a turn, checked, carried out and answered, and the functions' JSON schemas. Refuses to know:
processes, deadlines, templates. Always holds: nothing of a turn is evaluated: a call is a name and JSON values, and only a
function that the settings name is called; a call that cannot be carried out is answered with the reason, and counted.
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.config.errors import UserError
from meshloom.environments.protocol import Answer, Message, ToolCount
from meshloom.environments.user_code import UserCode, load_code

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it.

    Args:
        name: of the function; empty where it could not be read.
        arguments: by name; a plain value is that of the function's only argument.
        error: why it cannot be read; empty if it can.
    """

    name: str = ""
    arguments: Mapping[str, Any] | str = ""
    error: str = ""


Parser = Callable[[str], list[Call]]


def hermes(text: str) -> list[Call]:
    """Calls in ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
    return [_from_json(found.group(1), "arguments") for found in _HERMES.finditer(text)]


def llama3_json(text: str) -> list[Call]:
    """The call that a turn is, as ``{"name": …, "parameters": {…}}``; a turn that begins otherwise has none."""
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    return [_from_json(text, "parameters")] if text.startswith("{") else []


def by_pattern(pattern: str, only_tool: str | None) -> Parser:
    """Calls that a regular expression finds.

    Args:
        pattern: with a group ``arguments`` and perhaps ``name``.
        only_tool: name of the tool where there is one only.

    Raises:
        UserError: if it is no regular expression, or lacks a group.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(
            "the pattern of tool calls is no regular expression", where="environment.tool_pattern", why=str(error)
        ) from error
    groups = compiled.groupindex
    if "arguments" not in groups or ("name" not in groups and only_tool is None):
        needed = "arguments" if only_tool is not None else "name and arguments"
        raise UserError(
            f"the pattern of tool calls needs groups called {needed}",
            where="environment.tool_pattern",
            why=f"it has: {', '.join(groups) or 'none'}",
            fix=r"such as '(?P<name>\w+)\((?P<arguments>.*?)\)'",
        )

    def parse(text: str) -> list[Call]:
        return [
            Call(found.group("name") if "name" in groups else str(only_tool), _object_or_text(found.group("arguments")))
            for found in compiled.finditer(text)
        ]

    return parse


def _object_or_text(text: str) -> Mapping[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # deep nesting is the latter
        return text
    return value if isinstance(value, dict) else text


def _from_json(text: str, key: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(error=f"the call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(error='the call is not an object with a "name"')
    arguments = value.get(key, value.get("arguments", {}))
    if not isinstance(arguments, dict):
        return Call(error=f'"{key}" is not an object')
    return Call(value["name"], arguments)


class ToolBox:
    """The functions of a run, loaded. For worker processes only.

    Args:
        settings: format and bounds.
        codes: the functions.

    Raises:
        UserError: if one cannot be loaded, two have the same name, or the pattern of calls is bad.
    """

    def __init__(self, settings: EnvironmentSettings, codes: Sequence[UserCode]) -> None:
        modules: dict[str, ModuleType] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        for code in codes:
            if code.name in self._functions:
                raise UserError(f"two tools are called {code.name!r}", where="environment.tools", fix="rename one")
            self._functions[code.name] = load_code(code, modules)
        self._codes = {code.name: code for code in codes}
        self._max_calls, self._max_characters = settings.max_tool_calls, settings.max_answer_characters
        self._parse = _parser(settings, list(self._functions))

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the functions, from their type hints and docstrings.

        Raises:
            UserError: if a function has not what that needs.
        """
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        found = []
        for name, function in self._functions.items():
            try:
                found.append(get_json_schema(function))
            except (DocstringParsingException, TypeHintParsingException) as error:
                raise UserError(
                    f"the tool {name!r} has no schema",
                    where=f"environment.tools: {self._codes[name]}",
                    why=str(error),
                    fix="give each argument a type hint and a line under Args: in a Google-style docstring",
                ) from error
        return found

    def answer(self, text: str, calls_before: int) -> Answer:
        """Carry out the calls of a turn, in their order. A turn without a call ends the episode.

        Args:
            text: of the turn.
            calls_before: calls of the episode's earlier turns.
        """
        calls = self._parse(text)
        if not calls:
            return Answer(done=True)
        results = [self._result(call, calls_before + i < self._max_calls) for i, call in enumerate(calls)]
        messages = tuple(_message(call, text) for call, (text, _) in zip(calls, results, strict=True))
        return Answer(messages=messages, tools=ToolCount(calls=len(calls), errors=sum(failed for _, failed in results)))

    def _result(self, call: Call, allowed: bool) -> tuple[str, bool]:
        """The answer to a call, and whether it is an error."""
        if not allowed:
            return f"error: no more than {self._max_calls} tool calls are allowed", True
        if call.error:
            return f"error: {call.error}", True
        function = self._functions.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name!r:.100}; there are: {', '.join(self._functions)}", True
        try:
            arguments = _bound(function, call.arguments)
        except TypeError as error:
            return f"error: {call.name}: {error}", True
        try:
            result = function(*arguments.args, **arguments.kwargs)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return self._cut(_text(result)), False
        except (
            BaseException
        ) as error:  # whatever a tool raises, SystemExit too, is an answer that the model may learn from
            return self._cut(f"error: {type(error).__name__}: {error}"), True

    def _cut(self, text: str) -> str:
        text = text.encode(
            "utf-8", "backslashreplace"
        ).decode()  # no lone surrogates: every file and tokenizer can hold it
        bound = self._max_characters
        return text if len(text) <= bound else f"{text[:bound]}\n[cut: {len(text) - bound} of {len(text)} characters]"


def _parser(settings: EnvironmentSettings, names: Sequence[str]) -> Parser:
    if settings.tool_format == "regex":
        return by_pattern(settings.tool_pattern or "", names[0] if len(names) == 1 else None)
    return {"hermes": hermes, "llama3_json": llama3_json}[settings.tool_format]


def _bound(function: Callable[..., Any], arguments: Mapping[str, Any] | str) -> inspect.BoundArguments:
    """Arguments of a call.

    Raises:
        TypeError: if the function takes others.
    """
    signature = inspect.signature(function)
    return signature.bind(arguments) if isinstance(arguments, str) else signature.bind(**arguments)


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _message(call: Call, text: str) -> Message:
    return {"role": "tool", **({"name": call.name} if call.name else {}), "content": text}


def failed(detail: str) -> Answer:
    """The answer to a turn whose calls were not carried out: their process was late or died."""
    message: Message = {"role": "tool", "content": f"error: {detail}"}
    return Answer(messages=(message,), tools=ToolCount(calls=1, errors=1))


def named_in(schemas: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names of the functions of some schemas."""
    return (str(schema["function"]["name"]) for schema in schemas)
