"""From rows to token ids: chat templates and tokenisation.

Owns: the one place where text becomes ids. Refuses to know: models, devices. Always holds: a prompt is rendered and
tokenised once, and everything later uses those ids; its text is what those ids decode to; a prompt is rendered the same
way for reinforcement learning and for supervised fine-tuning.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2.exceptions import TemplateError

from meshloom.config.errors import UserError
from meshloom.config.settings import DataSettings, Overlong, SftDataSettings
from meshloom.data.rows import Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, Any]]
_T = TypeVar("_T")

_OWN_ARGUMENTS = ("tools", "messages", "add_generation_prompt", "tokenize", "return_dict")
_BATCH = 1024
"""Rows rendered and tokenised in one call."""


@dataclass(frozen=True, kw_only=True)
class RenderedPrompts:
    """Prompts in the order of their rows, and how many were too long and dropped."""

    prompts: list[Prompt]
    dropped: int


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A prompt and its worked response as the model sees them.

    Args:
        row: where it is from.
        ids: tokens of the prompt, the response and the end token.
        mask: true where a token is learned: the response and the end token.
    """

    row: Row
    ids: list[int]
    mask: list[bool]


def render_prompts(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", data: DataSettings, tools: Sequence[dict[str, Any]] = ()
) -> RenderedPrompts:
    """Render and tokenise prompts for generation.

    Chats go through the tokenizer's chat template with its generation prompt; so do strings, as one user message, unless
    ``data.chat_template`` is ``never``, or ``auto`` and there is no template. Other strings are tokenised as they are, with
    the special tokens the tokenizer itself puts before a text.

    Args:
        rows: to be rendered.
        tokenizer: of the model.
        data: template and bounds.
        tools: JSON schemas of functions that the model may call; the template is given them.

    Raises:
        UserError: if a template is needed and missing or refuses a chat; if a prompt is empty, or longer than
            ``max_prompt_tokens`` and not to be dropped; if all prompts were dropped.
    """
    kept = list(_fitting(rows, tokenizer, data, tools))
    _check_some_left(kept, rows, data)
    prompts: list[Prompt] = []
    for part in _batches(kept):
        texts = tokenizer.batch_decode(
            [ids for _, ids in part], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        prompts += [Prompt(row=row, ids=ids, text=text) for (row, ids), text in zip(part, texts, strict=True)]
    return RenderedPrompts(prompts=prompts, dropped=len(rows) - len(prompts))


def render_supervised(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", data: SftDataSettings
) -> list[Supervised]:
    """Render and tokenise worked examples.

    The prompt's ids are those of ``render_prompts``. If the template, given the whole chat, begins with these ids, the
    response is what follows them, up to the template's own end of turn. Otherwise, and for strings without a template, the
    response is tokenised apart. Every response ends with the end token. Overlong prompts may be dropped: the result is
    then shorter than ``rows``.

    Raises:
        UserError: as ``render_prompts``; if a row has no response, or one longer than ``max_response_tokens``; if an end
            token is needed and the tokenizer has none.
    """
    kept = list(_fitting(rows, tokenizer, data))
    _check_some_left(kept, rows, data)
    end = end_of_turn(tokenizer, data)
    samples: list[Supervised] = []
    for part in _batches(kept):
        for (row, prompt_ids), response_ids in zip(part, _responses(part, tokenizer, data, end), strict=True):
            if len(response_ids) > data.max_response_tokens:
                raise _too_long(
                    "response", row, len(response_ids), "data.max_response_tokens", data.max_response_tokens
                )
            mask = [False] * len(prompt_ids) + [True] * len(response_ids)
            samples.append(Supervised(row=row, ids=prompt_ids + response_ids, mask=mask))
    return samples


def end_of_turn(tokenizer: "PreTrainedTokenizerBase", data: DataSettings) -> int | None:
    """The token that ends a turn: the special token the template puts behind an assistant message, or the tokenizer's own.

    Found by rendering a chat whose messages are single letters.
    """
    if tokenizer.chat_template and data.chat_template != "never":
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            (ids,) = _encode([probe], tokenizer, data, generation_prompt=False)
        except TemplateError:
            return tokenizer.eos_token_id
        ids = _without_trailing_space(ids, tokenizer)
        if ids and (ids[-1] == tokenizer.eos_token_id or ids[-1] in tokenizer.added_tokens_decoder):
            return ids[-1]
    return tokenizer.eos_token_id


def _batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _fitting(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", data: DataSettings, tools: Sequence[dict[str, Any]] = ()
) -> Iterator[tuple[Row, list[int]]]:
    """Rows whose prompts fit, with the prompts' ids."""
    for part in _batches(rows):
        for row, ids in zip(part, _prompt_ids(part, tokenizer, data, tools), strict=True):
            if not ids:
                raise UserError(
                    "the prompt has no tokens", where=f"row {row.index}", fix="give it some text, or remove the row"
                )
            if len(ids) <= data.max_prompt_tokens:
                yield row, ids
            elif data.overlong_prompts is Overlong.ERROR:
                fix = "raise the limit, or set data.overlong_prompts=drop"
                raise _too_long("prompt", row, len(ids), "data.max_prompt_tokens", data.max_prompt_tokens, fix)


def _too_long(what: str, row: Row, tokens: int, setting: str, limit: int, fix: str = "") -> UserError:
    return UserError(
        f"the {what} of row {row.index} has {tokens} tokens, more than {setting}={limit}",
        where=f"row {row.index}, counted from 0",
        fix=fix or "raise the limit, or remove the row",
    )


def _check_some_left(kept: Sequence[object], rows: Sequence[Row], data: DataSettings) -> None:
    if not kept:
        raise UserError(
            "no prompt is left",
            where="data.overlong_prompts=drop",
            why=f"all {len(rows)} prompts are longer than data.max_prompt_tokens={data.max_prompt_tokens}",
            fix="raise data.max_prompt_tokens",
        )


def _prompt_ids(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", data: DataSettings, tools: Sequence[dict[str, Any]]
) -> list[list[int]]:
    """Ids of each row's prompt. Rows with and without a template are tokenised apart, each in one call."""
    chats = {i: _chat(row, data) for i, row in enumerate(rows) if _uses_template(row, tokenizer, data)}
    texts = {i: str(row.prompt) for i, row in enumerate(rows) if i not in chats}
    ids: dict[int, list[int]] = {}
    if chats:
        templated = [rows[i] for i in chats]
        rendered = _template_ids(list(chats.values()), templated, tokenizer, data, generation_prompt=True, tools=tools)
        ids |= zip(chats, rendered, strict=True)
    if texts:
        ids |= zip(texts, _plain_ids(list(texts.values()), tokenizer), strict=True)
    return [ids[i] for i in range(len(rows))]


def _plain_ids(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Ids of texts that a model goes on from: what the tokenizer itself puts before a text, nothing that it puts behind it
    (an end token would be answered, not the prompt), and one begin token where the text has its own."""
    probe, bare = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    starts = [i for i in range(len(probe) - len(bare) + 1) if probe[i : i + len(bare)] == bare]
    behind = len(probe) - len(bare) - starts[0] if starts else 0
    whole = [ids[: len(ids) - behind] for ids in tokenizer(texts).input_ids]
    return [with_one_begin(ids, tokenizer.bos_token_id) for ids in whole]


def with_one_begin(ids: list[int], begin: int | None) -> list[int]:
    """Ids of a text that has its own begin token, without the one that the tokenizer put before it."""
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def _uses_template(row: Row, tokenizer: "PreTrainedTokenizerBase", data: DataSettings) -> bool:
    is_chat, there = isinstance(row.prompt, list), bool(tokenizer.chat_template)
    needed = is_chat or data.chat_template == "always" or bool(data.system_prompt)
    if needed and data.chat_template == "never":
        raise UserError(
            "a chat cannot be rendered without a template"
            if is_chat
            else "a system prompt cannot be put before plain text",
            where=f"row {row.index}, data.chat_template=never",
            fix="set data.chat_template=auto, or give prompts as plain strings and no data.system_prompt",
        )
    if needed and not there:
        raise UserError(
            "the tokenizer has no chat template",
            where=f"row {row.index}",
            why="its prompt is a chat" if is_chat else "data.chat_template or data.system_prompt ask for one",
            fix="put chat_template.jinja into the model folder, or give prompts as plain strings",
        )
    return needed or (there and data.chat_template == "auto")


def _chat(row: Row, data: DataSettings) -> Chat:
    chat: Chat = row.prompt if isinstance(row.prompt, list) else [{"role": "user", "content": row.prompt}]
    if not data.system_prompt:
        return chat
    if chat[0]["role"] == "system":
        raise UserError(
            "the chat has a system message of its own",
            where=f"row {row.index}",
            why="data.system_prompt would put a second one before it",
            fix="unset data.system_prompt, or take the system messages out of the data",
        )
    return [{"role": "system", "content": data.system_prompt}, *chat]


def _template_ids(
    chats: list[Chat],
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    *,
    generation_prompt: bool,
    tools: Sequence[dict[str, Any]] = (),
) -> list[list[int]]:
    """Ids of each chat; ``rows`` are where they are from, for errors."""
    _require_read(tokenizer, data)

    def render(some: list[Chat]) -> list[list[int]]:
        return _encode(some, tokenizer, data, generation_prompt=generation_prompt, tools=tools)

    try:
        return render(chats)
    except (TemplateError, TypeError) as error:
        raise UserError(
            "the chat template refuses a chat",
            where=_refused(chats, rows, render),
            why=f"{type(error).__name__}: {error}",
            fix="bring the chat's roles and contents into the form the model's template knows",
        ) from error


def _require_read(tokenizer: "PreTrainedTokenizerBase", data: DataSettings) -> None:
    """Refuse an argument that the template does not read: it would change nothing, unnoticed."""
    for name in data.chat_template_arguments:
        if name in _OWN_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            why = "it is given by the run itself" if name in _OWN_ARGUMENTS else "its text does not name it"
            raise UserError(
                f"the chat template reads no argument {name!r}",
                where=f"data.chat_template_arguments.{name}",
                why=why,
                fix="leave it out, or give one that chat_template.jinja of the model's folder names",
            )


def _encode(
    chats: list[Chat],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    *,
    generation_prompt: bool,
    tools: Sequence[dict[str, Any]] = (),
) -> list[list[int]]:
    encoded: Any = tokenizer.apply_chat_template(
        chats,
        tools=list(tools) or None,
        add_generation_prompt=generation_prompt,
        tokenize=True,
        return_dict=True,
        **data.chat_template_arguments,
    )
    return encoded["input_ids"]


def _refused(chats: list[Chat], rows: Sequence[Row], render: Callable[[list[Chat]], Any]) -> str:
    """Names the first row that the template refuses."""
    for chat, row in zip(chats, rows, strict=True):
        try:
            render([chat])
        except (TemplateError, TypeError):
            return f"row {row.index}"
    return f"rows {rows[0].index} to {rows[-1].index}"


def _responses(
    part: Sequence[tuple[Row, list[int]]], tokenizer: "PreTrainedTokenizerBase", data: SftDataSettings, end: int | None
) -> list[list[int]]:
    """Ids of each row's response, its end token included."""
    rows = [row for row, _ in part]
    for row in rows:
        if row.response is None:
            raise UserError(
                "the row has no response to learn", where=f"row {row.index}", fix="give it one, or remove the row"
            )
    if end is None:
        raise UserError(
            "the tokenizer has no end token", fix="set eos_token in the model folder's tokenizer_config.json"
        )
    apart = tokenizer([str(row.response) for row in rows], add_special_tokens=False).input_ids
    responses = [[*ids, end] for ids in apart]
    templated = [i for i, row in enumerate(rows) if _uses_template(row, tokenizer, data)]
    if templated:
        chats = [[*_chat(rows[i], data), {"role": "assistant", "content": rows[i].response}] for i in templated]
        whole = _template_ids(chats, [rows[i] for i in templated], tokenizer, data, generation_prompt=False)
        for i, ids in zip(templated, whole, strict=True):
            prompt_ids = part[i][1]
            if ids[: len(prompt_ids)] == prompt_ids:
                responses[i] = _until_end(ids[len(prompt_ids) :], end, tokenizer)
    return responses


def _until_end(ids: list[int], end: int, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """A rendered turn up to its end token, without the white space a template puts behind it."""
    ids = _without_trailing_space(ids, tokenizer)
    return ids if ids and ids[-1] == end else [*ids, end]


def _without_trailing_space(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    stop = len(ids)
    while stop and not str(tokenizer.decode(ids[stop - 1 : stop])).strip():
        stop -= 1
    return ids[:stop]
