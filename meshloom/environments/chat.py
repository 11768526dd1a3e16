"""A conversation as token ids that only grow: the template's additions after each turn, with the proof that it changed nothing.

Owns: the rendering of an episode. Refuses to know: engines, environments, losses. Always holds: the ids of a turn are exactly
those that were sampled; what follows them are the ids that the template itself puts there, cut out of the rendering of the
whole conversation; that rendering must begin with the text that the model was shown and then say what the model said, or the
history is rewritten, which is told and never mended.

White space at the ends of a turn is the one thing a template may drop (many trim a message): the sampled ids keep it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from meshloom.config.errors import UserError
from meshloom.environments.protocol import Message


@dataclass
class Conversation:
    """What was said so far, and how the model sees it.

    Args:
        messages: all of them.
        text: as the template renders them, with the beginning of the model's next turn: what it is shown.
        ids: what the engine is given: the same, but for the model's turns as they were sampled.
    """

    messages: list[Message]
    text: str
    ids: list[int]


@dataclass(frozen=True)
class Added:
    """What a template puts behind a turn: the model's next prompt.

    Args:
        ids: after the sampled ones.
    """

    ids: list[int]


@dataclass(frozen=True)
class Rewritten:
    """The template changed what stood before.

    Args:
        why: where the texts part.
        fresh: the conversation as the template has it now: the begin of another sample.
    """

    why: str
    fresh: Conversation


@dataclass(frozen=True)
class ChatRenderer:
    """Renders the conversations of a run.

    Args:
        tokenizer: with a chat template.
        tools: JSON schemas that the template is given.
        end_id: the token that the template puts behind a turn.
    """

    tokenizer: PreTrainedTokenizerBase
    end_id: int
    tools: Sequence[dict[str, Any]] = ()
    _specials: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        added = self.tokenizer.added_tokens_decoder
        object.__setattr__(self, "_specials", frozenset(i for i, token in added.items() if token.special))

    def begin(self, messages: Sequence[Message]) -> Conversation:
        """A conversation before the model's first turn.

        Raises:
            TemplateError: if the template refuses the messages.
        """
        text = self._render(messages)
        return Conversation(list(messages), text, self._encode(text))

    def said(self, turn_ids: Sequence[int]) -> str:
        """The content of a turn: its text without the token that ended it."""
        own = turn_ids[:-1] if turn_ids and self.ends(turn_ids[-1]) else turn_ids
        return str(self.tokenizer.decode(list(own), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def ends(self, token: int) -> bool:
        """Whether a token can end a turn: it is the template's, or another special one."""
        return token == self.end_id or token in self._specials

    def extend(self, conversation: Conversation, turn_ids: Sequence[int], new: Sequence[Message]) -> Added | Rewritten:
        """Take the model's turn and what the environment says to it into the conversation; on ``Rewritten`` it stays as it was.

        Raises:
            TemplateError: if the template refuses the messages.
            UserError: if nothing tells the turn's end from what follows.
        """
        content = self.said(turn_ids)
        messages = [*conversation.messages, {"role": "assistant", "content": content}, *new]
        whole = self._render(messages)
        end = _end_of(whole, conversation.text, content, self._end_text)
        if end is None:
            return Rewritten(_parting(whole, conversation.text + content), self.begin(messages))
        ended = bool(turn_ids) and self.ends(turn_ids[-1])
        added = self._behind(whole, end, ended)
        conversation.messages, conversation.text = messages, whole
        conversation.ids = [*conversation.ids, *turn_ids, *added]
        return Added(added)

    def _behind(self, whole: str, end: int, ended: bool) -> list[int]:
        """Ids behind a turn that ends at a place of the text; its end token is among them if it was not sampled."""
        cut = whole.index(self._end_text, end) + len(self._end_text) if ended else end
        head, ids = self._encode(whole[:cut]), self._encode(whole)
        if ids[: len(head)] != head:
            raise self._no_end(f"the tokens of {whole[:cut][-20:]!r} change with what follows")
        return ids[len(head) :]

    @property
    def _end_text(self) -> str:
        return str(self.tokenizer.decode([self.end_id], skip_special_tokens=False))

    def _no_end(self, why: str) -> UserError:
        return UserError(
            "the chat template does not end a turn with a token of its own",
            where="environment",
            why=f"{why}; behind a turn {self._end_text!r} was expected",
            fix="use a model whose template ends each turn with a special token",
        )

    def check(self, role: str) -> None:
        """Check that the template can go on after a turn, with messages of a role.

        Raises:
            UserError: if it cannot.
        """
        try:
            conversation = self.begin([{"role": "user", "content": "a"}])
            found = self.extend(conversation, [*self._encode("b"), self.end_id], [{"role": role, "content": "c"}])
        except (TemplateError, TypeError) as error:
            raise UserError(
                f"the chat template refuses a message of the role {role!r} after a turn of the model",
                where="environment",
                why=f"{type(error).__name__}: {error}",
                fix="use a model whose template knows such turns, or put a chat_template.jinja into its folder",
            ) from error
        if isinstance(found, Rewritten):
            raise self._no_end(found.why)

    def shows_tools(self) -> bool:
        """Whether the template shows the tools' schemas at all."""
        messages = [{"role": "user", "content": "a"}]
        return not self.tools or self._render(messages) != self._render(messages, tools=False)

    def _render(self, messages: Sequence[Message], *, tools: bool = True) -> str:
        shown = list(self.tools) if tools and self.tools else None
        return str(
            self.tokenizer.apply_chat_template(list(messages), tools=shown, add_generation_prompt=True, tokenize=False)
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def _end_of(whole: str, shown: str, content: str, end_text: str) -> int | None:
    """Where the model's turn ends in the rendered text, if that begins with what was shown and said, and then ends the turn."""
    if not whole.startswith(shown):
        return None
    for form in (content, content.rstrip(), content.lstrip(), content.strip()):
        end = len(shown) + len(form)
        if whole.startswith(form, len(shown)) and whole[end:].lstrip().startswith(end_text):
            return end
    return None


def _parting(whole: str, expected: str) -> str:
    """Where two texts part."""
    place = next((i for i, (a, b) in enumerate(zip(whole, expected, strict=False)) if a != b), len(whole))
    return (
        f"the chat template changes earlier turns: after {expected[max(0, place - 20) : place]!r} stands "
        f"{whole[place : place + 40]!r}, where the model saw or said {expected[place : place + 40]!r}"
    )
