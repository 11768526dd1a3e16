"""A conversation as token ids that only grow: the template's additions after each turn, with the proof that it changed nothing.

Owns: the rendering of an episode. Refuses to know: engines, environments, losses. Always holds: the ids of a turn are exactly
those that were sampled; what follows them are the ids that the template itself puts there, cut out of the rendering of the
whole conversation; that rendering must begin with the text that the model was shown and then say what the model said, or the
history is rewritten, which is told and never mended.

White space at the ends of a turn is the one thing a template may drop (many trim a message) or put there: the sampled ids stay
as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        arguments: further ones that the template reads.
    """

    tokenizer: PreTrainedTokenizerBase
    end_id: int
    tools: Sequence[dict[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _specials: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        added = self.tokenizer.added_tokens_decoder
        object.__setattr__(self, "_specials", frozenset(i for i, token in added.items() if token.special))

    def begin(self, messages: Sequence[Message]) -> Conversation:
        """A conversation before the model's first turn.

        Raises:
            TemplateError: if the template refuses the messages.
        """
        text = self.render(messages)
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
        whole = self.render(messages)
        end = turn_end(whole, conversation.text, content, self.end_text)
        if end is None:
            return Rewritten(_parting(whole, conversation.text + content), self.begin(messages))
        ended = bool(turn_ids) and self.ends(turn_ids[-1])
        added = self._behind(whole, end, ended)
        conversation.messages, conversation.text = messages, whole
        conversation.ids = [*conversation.ids, *turn_ids, *added]
        return Added(added)

    def _behind(self, whole: str, end: int, ended: bool) -> list[int]:
        """Ids behind a turn that ends at a place of the text; its end token is among them if it was not sampled."""
        cut = whole.index(self.end_text, end) + len(self.end_text) if ended else end
        head, ids = self._encode(whole[:cut]), self._encode(whole)
        if ids[: len(head)] != head:
            raise self.no_end(f"the tokens of {whole[:cut][-20:]!r} change with what follows")
        return ids[len(head) :]

    @property
    def end_text(self) -> str:
        """Of the token that the template puts behind a turn."""
        return str(self.tokenizer.decode([self.end_id], skip_special_tokens=False))

    def no_end(self, why: str) -> UserError:
        """Nothing tells where a turn ends."""
        return UserError(
            "the chat template does not end a turn with a token of its own",
            where="environment",
            why=f"{why}; behind a turn {self.end_text!r} was expected",
            fix="use a model whose template ends each turn with a special token",
        )

    def shows_tools(self) -> bool:
        """Whether the template shows the tools' schemas at all."""
        messages = [{"role": "user", "content": "a"}]
        return not self.tools or self.render(messages) != self.render(messages, tools=False)

    def render(self, messages: Sequence[Message], *, tools: bool = True, opens: bool = True) -> str:
        """Text of messages; ``tools``: with their descriptions, ``opens``: with the beginning of the model's next turn."""
        shown = list(self.tools) if tools and self.tools else None
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=shown, add_generation_prompt=opens, tokenize=False, **self.arguments
            )
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def turn_end(whole: str, shown: str, content: str, end_text: str) -> int | None:
    """Where the model's turn ends in the rendered text, if that begins with what was shown and said, and then ends the turn."""
    if not whole.startswith(shown):
        return None
    for form in (content, content.rstrip(), content.lstrip(), content.strip()):
        end = len(shown) + len(form)
        if whole.startswith(form, len(shown)) and whole[end:].lstrip().startswith(end_text):
            return end
    behind, said = whole[len(shown) :], content.strip()
    end = len(shown) + len(behind) - len(behind.lstrip()) + len(said)
    if whole[:end].endswith(said) and whole[end:].lstrip().startswith(end_text):
        return end
    return None


def _parting(whole: str, expected: str) -> str:
    """Where two texts part."""
    place = next((i for i, (a, b) in enumerate(zip(whole, expected, strict=False)) if a != b), len(whole))
    return (
        f"the chat template changes earlier turns: after {expected[max(0, place - 20) : place]!r} stands "
        f"{whole[place : place + 40]!r}, where the model saw or said {expected[place : place + 40]!r}"
    )
