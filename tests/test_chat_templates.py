"""Chat templates with the ways of well-known ones: a conversation goes on with its beginning proved, or they are refused."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meshloom.config.errors import UserError
from meshloom.environments.chat import Added, ChatRenderer
from meshloom.environments.template_checks import check_template
from tests.lesson_runs import write_model

TURN = "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chat(set_text: str = "{% set text = m.content %}", turn: str = TURN, before: str = "", asks: str = ASKS) -> str:
    """A template from its parts: what stands first, what is shown of a message, how a turn looks, how the model's begins."""
    return before + "{% for m in messages %}" + set_text + turn + "{% endfor %}" + asks


PLAIN = chat()
HEADERS = chat(
    "{% set text = m.content | trim %}",
    turn="<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|im_start|>\n\n{{ text }}<|im_end|>",
    before="<|im_start|>",
    asks="{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}",
)
"""A begin token, roles between two tokens, every message trimmed, tools under another name."""
ALTERNATING = chat(
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set text = m.content | trim %}",
    turn="<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ text }}<|im_end|>\n",
    before="{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
    asks="{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
)
"""No system prompt, a question and an answer in turn, the model under another name."""
BRACKETS = chat(
    "{% set text = m.content | trim %}",
    turn="{% if m.role == 'user' %}[INST] {{ text }} [/INST]{% else %} {{ text }}<|im_end|>{% endif %}",
    before="<|im_start|>",
    asks="",
)
"""The model's turn begins with no words of the template's; a space is put before it once it is over."""
DEFAULT_SYSTEM = chat(before="{% if messages[0].role != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}")
MOVING_SYSTEM = chat(
    "{% set text = (messages[0].content ~ '\n' ~ m.content) if loop.last and messages[0].role == 'system' else m.content %}"
)
"""The system prompt stands in the last message, too."""
MOVING_TOOLS = chat("{% set text = (tools | string ~ m.content) if loop.last and tools else m.content %}")
STRIPS_REASONING = chat(
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' and not loop.last else m.content %}"
)
OPENS_REASONING = chat(asks="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
NO_END = chat(turn="{{ m.role }}: {{ text }}\n", asks="{% if add_generation_prompt %}assistant: {% endif %}")
ONE_TURN = chat(before="{% if messages[1:] %}{{ raise_exception('one only') }}{% endif %}")
OTHER = chat("{% set text = m.content.upper() if m.role == 'assistant' else m.content %}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return AutoTokenizer.from_pretrained(folder)


def renderer(tokenizer: PreTrainedTokenizerFast, template: str, *, tools: bool = False) -> ChatRenderer:
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"), [{"name": "f"}] if tools else [])


@pytest.mark.parametrize(
    "template", [PLAIN, HEADERS, ALTERNATING, BRACKETS, DEFAULT_SYSTEM, MOVING_SYSTEM, STRIPS_REASONING]
)
@pytest.mark.parametrize("turn", ["b", " b ", "\nb", ""])
def test_a_conversation_goes_on_with_its_beginning_as_it_was(tokenizer, template: str, turn: str) -> None:
    """Sampled ids stay, and what comes behind them is the template's own rendering, whatever it does with white space."""
    found = renderer(tokenizer, template)
    check_template(found, "user")
    conversation = found.begin([{"role": "user", "content": "a"}])
    sampled = [*tokenizer(turn, add_special_tokens=False).input_ids, found.end_id]
    for answer in ("3", "7"):
        before = list(conversation.ids)
        added = found.extend(conversation, sampled, [{"role": "user", "content": answer}])
        assert isinstance(added, Added), added
        assert conversation.ids == [*before, *sampled, *added.ids]
        behind = found.render([{"role": "user", "content": answer}]).partition(answer)[2]
        expected = tokenizer(answer + behind, add_special_tokens=False).input_ids
        assert added.ids[-len(expected) :] == expected


@pytest.mark.parametrize(
    ("template", "role", "system", "tools", "what", "where", "fix"),
    [
        (ALTERNATING, "user", "be kind", False, "refuses a system prompt", "data.system_prompt", "leave data.system"),
        (ALTERNATING, "tool", None, False, "refuses a message of the role 'tool'", "environment", "whose template knows"),
        (ONE_TURN, "user", None, False, "refuses a message of the role 'user'", "environment", "whose template knows"),
        (MOVING_SYSTEM, "user", "be kind", False, "moves the system prompt", "environment", "leave data.system_prompt out, or"),
        (MOVING_TOOLS, "tool", None, True, "moves the descriptions of tools", "environment", "rewritten_history=split"),
        (OPENS_REASONING, "user", None, False, r"assistant\n<think>\n' and leaves", "environment", "rewritten_history=split"),
        (NO_END, "user", None, False, "does not end a turn with a token of its own", "environment", "special token"),
        (OTHER, "user", None, False, "changes earlier turns", "environment", "rewritten_history=split"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_go_on_is_refused_by_its_property(
    tokenizer, template: str, role: str, system: str | None, tools: bool, what: str, where: str, fix: str
) -> None:
    found = renderer(tokenizer, template, tools=tools)
    with pytest.raises(UserError) as error:
        check_template(found, role, system_prompt=system)
    assert what in error.value.what and error.value.where == where and fix in error.value.fix
    if "rewritten_history=split" in error.value.fix:
        assert check_template(found, role, system_prompt=system, splits=True) == ""


def test_a_template_that_takes_reasoning_out_is_told_of_and_may_be_split(tokenizer) -> None:
    found = renderer(tokenizer, STRIPS_REASONING)
    told = check_template(found, "user")
    assert "takes the reasoning" in told and "environment.rewritten_history=split" in told
    assert check_template(found, "user", splits=True) == ""
    assert check_template(renderer(tokenizer, PLAIN), "user") == ""
