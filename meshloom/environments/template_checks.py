"""What a chat template must let stand for episodes of several turns, found out before a run begins.

Owns: the conversations that it is tried with, and the words for what is wrong with it. Refuses to know: which model it is of.
Always holds: a template that cannot go on after a turn is refused with the property that is in the way and what to change; one
that could in some conversations only is told of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jinja2.exceptions import TemplateError

from meshloom.config.errors import UserError
from meshloom.environments.chat import ChatRenderer, Rewritten, turn_end
from meshloom.environments.protocol import Message

_SPLIT = "environment.rewritten_history=split, which makes several samples of an episode"
_OWN_TEMPLATE = "a chat_template.jinja in the model's folder that leaves earlier turns as they are"
_REASONED = "<think>\nx\n</think>\n\nb"


@dataclass(frozen=True)
class _Talk:
    """A conversation to try.

    Args:
        renderer: of the run.
        role: of what answers the model.
        system: prompt; none if there is none.
    """

    renderer: ChatRenderer
    role: str
    system: str | None

    def rewritten(self) -> Rewritten | None:
        """What the template changes of two plain turns.

        Raises:
            TemplateError, TypeError: if it refuses the messages.
            UserError: if nothing tells the turn's end from what follows.
        """
        renderer = self.renderer
        before: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        conversation = renderer.begin([*before, {"role": "user", "content": "a"}])
        ids = renderer.tokenizer("b", add_special_tokens=False).input_ids
        for content in ("c", "d"):
            found = renderer.extend(conversation, [*ids, renderer.end_id], [{"role": self.role, "content": content}])
            if isinstance(found, Rewritten):
                return found
        return None

    def stands(self) -> bool:
        """Whether a plain conversation stays as it was."""
        try:
            return self.rewritten() is None
        except (TemplateError, TypeError, UserError):
            return False


def check_template(renderer: ChatRenderer, role: str, *, system_prompt: str | None = None, splits: bool = False) -> str:
    """Check that a template can go on after turns of the model.

    Args:
        renderer: of the run.
        role: of what answers a turn.
        system_prompt: that stands before each conversation.
        splits: whether an episode whose history is rewritten goes on as another sample.

    Returns:
        What to tell a user whose template rewrites some conversations; empty if nothing is known of that.

    Raises:
        UserError: if it cannot.
    """
    talk = _Talk(renderer, role, system_prompt)
    try:
        found = talk.rewritten()
    except (TemplateError, TypeError) as error:
        raise _refusal(talk, error) from error
    if found is not None and not _ends_turns(renderer):
        raise renderer.no_end(found.why)
    if splits:
        return ""
    if found is not None:
        what, fixes = _property(talk)
        raise UserError(
            f"the chat template {what}", where="environment", why=found.why, fix=", or ".join((*fixes, _SPLIT))
        )
    if _rewrites_reasoning(talk):
        return (
            "warning: the chat template takes the reasoning (<think>…</think>) out of earlier turns once "
            f"{'a tool' if role == 'tool' else 'a user'} has answered: episodes in which the model reasons become invalid; "
            f"set {_SPLIT}, or use {_OWN_TEMPLATE}"
        )
    return ""


def _refusal(talk: _Talk, error: Exception) -> UserError:
    """Which message a template does not take."""
    said = f"{type(error).__name__}: {error}"
    if talk.system is not None and replace(talk, system=None).stands():
        return UserError(
            "the chat template refuses a system prompt",
            where="data.system_prompt",
            why=said,
            fix="leave data.system_prompt out and say the same in the first message, or use a template that has one",
        )
    return UserError(
        f"the chat template refuses a message of the role {talk.role!r} after a turn of the model",
        where="environment",
        why=said,
        fix="use a model whose template knows such turns, or put a chat_template.jinja into its folder",
    )


def _ends_turns(renderer: ChatRenderer) -> bool:
    """Whether a turn that is over has the end token behind it, if the template shows it at all."""
    said = "QZQ"
    try:
        text = renderer.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": said}], opens=False)
    except (TemplateError, TypeError):
        return True
    return said not in text or renderer.end_text in text[text.index(said) :]


def _property(talk: _Talk) -> tuple[str, Sequence[str]]:
    """How a template changes a plain conversation, in words, and what to do beside splitting it."""
    if talk.system is not None and replace(talk, system=None).stands():
        return "moves the system prompt as a conversation goes on", ("leave data.system_prompt out",)
    if talk.renderer.tools and replace(talk, renderer=replace(talk.renderer, tools=())).stands():
        return "moves the descriptions of tools as a conversation goes on", (_OWN_TEMPLATE,)
    if opening := _lost_opening(talk.renderer):
        return f"begins a turn of the model with {opening!r} and leaves that out once the turn is over", (
            _OWN_TEMPLATE,
        )
    return "changes earlier turns", (_OWN_TEMPLATE,)


def _lost_opening(renderer: ChatRenderer) -> str:
    """What the template puts before a turn that the model is about to take, if it is another text before one that is over."""
    question: Message = {"role": "user", "content": "a"}
    asked, opened = renderer.render([question], opens=False), renderer.render([question])
    over = renderer.render([question, {"role": "assistant", "content": "b"}], opens=False)
    lost = over.startswith(asked) and not over.startswith(opened)
    return opened.removeprefix(asked) if lost else ""


def _rewrites_reasoning(talk: _Talk) -> bool:
    """Whether a turn with reasoning changes once it was answered; its text alone tells, whatever its tokens are."""
    renderer, question = talk.renderer, {"role": "user", "content": "a"}
    try:
        shown = renderer.render([question])
        whole = renderer.render(
            [question, {"role": "assistant", "content": _REASONED}, {"role": talk.role, "content": "c"}]
        )
    except (TemplateError, TypeError):
        return False
    return turn_end(whole, shown, _REASONED, renderer.end_text) is None
