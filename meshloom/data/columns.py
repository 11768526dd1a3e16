"""From a record with columns to a row.

Owns: the two forms a record may have, and their errors. verl's form: ``data_source``, ``prompt`` as a chat,
``reward_model.ground_truth``, ``extra_info``. The plain form: a prompt and an answer column under names that the settings
give. For supervised fine-tuning a response column, or a chat (also under ``messages``) that ends with the assistant.
Always holds: a row's prompt is a string, or a non-empty chat of plain dictionaries; its values are plain Python values.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshloom.config.errors import UserError
from meshloom.config.near import nearest_first
from meshloom.config.settings import DataSettings, SftDataSettings
from meshloom.data.rows import Row

Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where a record stands, for errors: rows count from 0, lines from 1."""

    source: str
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}, {self.unit} {self.number}"


def to_row(record: Mapping[str, Any], index: int, place: Place, data: DataSettings) -> Row:
    """Read one record.

    Args:
        record: column names to values.
        index: number of the row in its source, over all files.
        place: where it stands, for errors.
        data: names of the columns; ``SftDataSettings`` ask for a response.

    Raises:
        UserError: if a column is missing or holds something else than it should.
    """
    used = {"data_source", "reward_model", "extra_info", data.prompt_column, data.answer_column}
    column = data.prompt_column
    if isinstance(data, SftDataSettings) and not _has(record, column) and "messages" in record:
        column = "messages"
    prompt = _prompt(_column(record, column, "data.prompt_column", place), column, place)
    response: str | None = None
    if isinstance(data, SftDataSettings):
        used |= {data.response_column, "messages"}
        prompt, response = _split_response(record, prompt, column, place, data)
    elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise UserError(
            "the chat ends with an assistant message, so there is nothing to answer",
            where=f"{place}, column {column}",
            fix="end each prompt with a user message",
        )
    extra = {name: _plain(value) for name, value in record.items() if name not in used}
    answer_name, answer = _answer(record, place, data, required=response is None)
    return Row(
        index=index,
        prompt=prompt,
        answer=answer,
        answer_name=answer_name,
        response=response,
        data_source=str(record.get("data_source") or ""),
        extra=extra | _struct(record.get("extra_info"), "extra_info", place),
    )


def _column(record: Mapping[str, Any], name: str, setting: str, place: Place, fix: str = "") -> Any:
    if not _has(record, name):
        there = ", ".join(nearest_first(name, list(record))) or "none"
        raise UserError(
            f"there is no column {name!r}",
            where=str(place),
            why=f"the columns there are: {there}",
            fix=fix or f"set {setting} to one of them",
        )
    return record[name] if name in record else _nested(record, name, place)


def _has(record: Mapping[str, Any], name: str) -> bool:
    """Whether there is such a column, or one of structs that a dotted name begins with."""
    return name in record or ("." in name and name.partition(".")[0] in record)


def _nested(record: Mapping[str, Any], name: str, place: Place) -> Any:
    """What a dotted name stands for in a column of structs."""
    value: Any = record
    above = ""
    for part in name.split("."):
        inside = value if value is record else _struct(value, above, place)
        if part not in inside:
            there = ", ".join(inside) or "none"
            raise UserError(f"{above} has no {part!r}", where=str(place), why=f"it has: {there}")
        value, above = inside[part], f"{above}.{part}".lstrip(".")
    return value


def _plain(value: Any) -> Any:
    """Without numpy: arrays become lists, numpy scalars Python's own."""
    if type(value).__module__ == "numpy":
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _prompt(value: Any, column: str, place: Place) -> str | Chat:
    value = _plain(value)
    if isinstance(value, str):
        return _chat_in_json(value) or value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return _messages(value)
    kind = "an empty list" if value == [] else f"a {type(value).__name__}"
    raise UserError(
        "the prompt is neither a string nor a chat",
        where=f"{place}, column {column}",
        why=f"it holds {kind}: {json.dumps(value, default=str)[:200]}",
        fix='give a string, or a list such as [{"role": "user", "content": "…"}]',
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _messages(chat: Chat) -> Chat:
    """Parquet gives every message all keys of the column; those without a value were never there."""
    return [{key: entry for key, entry in message.items() if entry is not None or key == "content"} for message in chat]


def _chat_in_json(text: str) -> Chat | None:
    """The chat in a column of JSON strings, if this is one."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return _messages(value) if isinstance(value, list) and value and all(map(_is_message, value)) else None


def _struct(value: Any, name: str, place: Place) -> dict[str, Any]:
    """A nested column, given as a struct or as a JSON string."""
    value = _plain(value)
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{name} is not a struct", where=str(place), why=f"it holds a {type(value).__name__}")
    return value


def _answer(record: Mapping[str, Any], place: Place, data: DataSettings, *, required: bool) -> tuple[str, Any]:
    """The answer's name and the answer."""
    truth = _struct(record.get("reward_model"), "reward_model", place)
    if "ground_truth" in truth:
        return "ground_truth", truth["ground_truth"]
    if not data.answer_column or (not required and not _has(record, data.answer_column)):
        return "", None
    fix = "set data.answer_column to one of them, or to '' if the reward needs no answer"
    name = data.answer_column if data.answer_column in record else data.answer_column.rpartition(".")[2]
    return name, _plain(_column(record, data.answer_column, "data.answer_column", place, fix))


def _split_response(
    record: Mapping[str, Any], prompt: str | Chat, column: str, place: Place, data: SftDataSettings
) -> tuple[str | Chat, str]:
    """The prompt without its response, and the response."""
    if _has(record, data.response_column):
        column, response = data.response_column, _column(record, data.response_column, "data.response_column", place)
    elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        prompt, response = prompt[:-1], prompt[-1]["content"]
    else:
        fix = "set data.response_column to one of them, or end each chat with an assistant message"
        response = _column(record, data.response_column, "data.response_column", place, fix)
    if not isinstance(response, str) or not prompt:
        what = "the chat has no message before the response" if not prompt else "the response is not a string"
        raise UserError(what, where=f"{place}, column {column}", why="" if not prompt else f"it is {response!r:.200}")
    return prompt, response
