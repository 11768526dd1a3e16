"""Rows to ids: rendered once, templates, limits, and what supervised fine-tuning learns."""

import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from meshloom.config.errors import UserError
from meshloom.config.settings import DataSettings, Overlong, SftDataSettings, SourceSettings
from meshloom.data.prompts import render_prompts, render_supervised
from meshloom.data.rows import Row

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
CHAT = [{"role": "user", "content": "hello world"}]


def tokenizer(template=None, *, eos="<eos>", bos=False):
    """A real byte-level BPE tokenizer; with ``bos`` it puts <bos> before plain text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(["hello world\n\nuser assistant system : 1 + 2"] * 4, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token=eos)
    made.chat_template = template
    return made


def rows(*prompts, responses=None):
    responses = responses or [None] * len(prompts)
    return [
        Row(index=i, prompt=p, response=r, extra={}) for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]


def data(kind=DataSettings, **settings):
    return kind(train=SourceSettings(), **settings)


def refused(render, *args):
    with pytest.raises(UserError) as caught:
        render(*args)
    return str(caught.value)


def test_chats_and_strings_go_through_the_template():
    rendered = render_prompts(rows(CHAT, "hello world"), tokenizer(CHATML), data())
    expected = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert [p.text for p in rendered.prompts] == [expected, expected]
    assert rendered.dropped == 0
    for prompt in rendered.prompts:
        assert type(prompt.ids) is list
        assert {type(i) for i in prompt.ids} == {int}
        assert tokenizer(CHATML).decode(prompt.ids) == prompt.text


def test_a_template_with_its_own_begin_token_gets_no_second_one():
    made = tokenizer("<bos>" + CHATML, bos=True)
    (prompt,) = render_prompts(rows(CHAT), made, data()).prompts
    assert prompt.ids.count(made.bos_token_id) == 1


@pytest.mark.parametrize(("template", "mode"), [(None, "auto"), (CHATML, "never"), (None, "never")])
def test_plain_strings_get_the_special_tokens_the_tokenizer_adds(template, mode):
    made = tokenizer(template, bos=True)
    (prompt,) = render_prompts(rows("hello 1"), made, data(chat_template=mode)).prompts
    assert prompt.ids == made("hello 1").input_ids
    assert prompt.text == "<bos>hello 1"


def test_rows_with_and_without_template_keep_their_order():
    """Chats and strings are tokenised in separate calls and must be put together again row by row."""
    made = tokenizer(CHATML)
    mixed = rows("a", CHAT, "b", CHAT, *(f"c{i}" for i in range(2000)))
    prompts = render_prompts(mixed, made, data()).prompts
    assert [p.row for p in prompts] == mixed
    for prompt in prompts:
        content = prompt.row.prompt if isinstance(prompt.row.prompt, str) else CHAT[0]["content"]
        assert f"user\n{content}<|im_end|>" in prompt.text


def test_the_system_prompt_stands_before_each_chat():
    prompts = render_prompts(rows(CHAT, "hello"), tokenizer(CHATML), data(system_prompt="be brief")).prompts
    assert all(p.text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user") for p in prompts)
    assert "system" not in render_prompts(rows("a"), tokenizer(CHATML), data(system_prompt="")).prompts[0].text
    own = [{"role": "system", "content": "x"}, *CHAT]
    message = refused(render_prompts, rows("a", own), tokenizer(CHATML), data(system_prompt="be brief"))
    assert "system message of its own" in message
    assert "row 1" in message


@pytest.mark.parametrize(
    ("prompt", "template", "settings", "words"),
    [
        (CHAT, None, {}, ["no chat template", "row 0", "is a chat"]),
        ("a", None, {"chat_template": "always"}, ["no chat template", "data.chat_template"]),
        ("a", None, {"system_prompt": "s"}, ["no chat template", "data.system_prompt"]),
        (CHAT, CHATML, {"chat_template": "never"}, ["without a template", "row 0"]),
        ("a", CHATML, {"chat_template": "never", "system_prompt": "s"}, ["system prompt", "row 0"]),
        ("a", STRICT, {"system_prompt": "s"}, ["refuses a chat", "System role not supported", "row 0"]),
        ("", None, {}, ["no tokens", "row 0"]),
    ],
)
def test_what_cannot_be_rendered_is_one_clear_error(prompt, template, settings, words):
    message = refused(render_prompts, rows(prompt), tokenizer(template), data(**settings))
    for word in words:
        assert word in message


def test_the_template_gets_arguments_and_those_that_it_does_not_read_are_refused():
    thinks = tokenizer(CHATML + "{% if thinks is false %}<eos>{% endif %}")
    plain, silent = (data(chat_template_arguments=arguments) for arguments in ({}, {"thinks": False}))
    (without,), (with_it,) = (render_prompts(rows(CHAT), thinks, given).prompts for given in (plain, silent))
    assert with_it.text == without.text + "<eos>"
    for name, said in (("thinking", "does not name it"), ("tools", "by the run itself")):
        message = refused(render_prompts, rows(CHAT), thinks, data(chat_template_arguments={name: True}))
        assert said in message and f"data.chat_template_arguments.{name}" in message


def test_a_refused_chat_is_named_by_its_row():
    bad = [{"role": "system", "content": "x"}, *CHAT]
    assert "row 2" in refused(render_prompts, rows(CHAT, "a", bad, CHAT), tokenizer(STRICT), data())
    settings = data(SftDataSettings)
    assert "row 1" in refused(render_supervised, rows(CHAT, bad, responses=["1", "2"]), tokenizer(STRICT), settings)


def test_an_overlong_prompt_is_an_error_that_names_its_row_length_and_limit():
    made = tokenizer(None)
    length = len(made("hello world " * 9).input_ids)
    message = refused(render_prompts, rows("hello", "hello world " * 9), made, data(max_prompt_tokens=length - 1))
    assert f"row 1 has {length} tokens" in message
    assert f"max_prompt_tokens={length - 1}" in message
    assert len(render_prompts(rows("hello world " * 9), made, data(max_prompt_tokens=length)).prompts) == 1


def test_overlong_prompts_are_dropped_and_counted():
    settings = data(max_prompt_tokens=5, overlong_prompts=Overlong.DROP)
    rendered = render_prompts(rows("hello", "long " * 50, "world"), tokenizer(None), settings)
    assert ([p.row.index for p in rendered.prompts], rendered.dropped) == ([0, 2], 1)
    message = refused(render_prompts, rows("long " * 50, "long " * 50), tokenizer(None), settings)
    assert "no prompt is left" in message
    assert "all 2 prompts" in message


def learned(sample, made):
    """Text of the tokens before the mask, and of those under it."""
    start = sample.mask.index(True)
    assert all(sample.mask[start:])
    assert len(sample.mask) == len(sample.ids)
    return made.decode(sample.ids[:start]), made.decode(sample.ids[start:])


def test_a_chat_learns_its_response_and_the_templates_end_of_turn():
    made = tokenizer(CHATML)
    (sample,) = render_supervised(rows(CHAT, responses=["1 + 2"]), made, data(SftDataSettings))
    prompt = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert learned(sample, made) == (prompt, "1 + 2<|im_end|>")


def test_a_template_without_end_of_turn_learns_the_tokenizers_end():
    made = tokenizer(BARE)
    (sample,) = render_supervised(rows("hello", responses=["1"]), made, data(SftDataSettings))
    assert learned(sample, made)[1] == "1<eos>"


@pytest.mark.parametrize(("template", "response"), [(REWRITES, "1 + 2"), (CHATML, "\n\nhello")])
def test_where_the_whole_chat_does_not_begin_with_the_prompt_the_response_is_tokenised_apart(template, response):
    """A generation prompt of its own, or a token that merges across the border, must not change the prompt's ids."""
    made = tokenizer(template)
    (prompt,) = render_prompts(rows(CHAT), made, data()).prompts
    (sample,) = render_supervised(rows(CHAT, responses=[response]), made, data(SftDataSettings))
    assert sample.ids[: len(prompt.ids)] == prompt.ids
    assert learned(sample, made) == (prompt.text, response + "<|im_end|>")


@pytest.mark.parametrize("template", [None, CHATML, BARE, REWRITES])
def test_supervised_prompts_have_the_ids_of_generation(template):
    made = tokenizer(template, bos=True)
    examples = rows(*(f"hello {i}" for i in range(5)), responses=[f"{i} world \n" for i in range(5)])
    prompts = render_prompts(examples, made, data()).prompts
    for prompt, sample in zip(prompts, render_supervised(examples, made, data(SftDataSettings)), strict=True):
        assert sample.ids[: len(prompt.ids)] == prompt.ids
        assert sample.mask.index(True) == len(prompt.ids)
        assert sample.ids.count(sample.ids[-1]) >= 1
        assert made.decode(sample.ids[-1:]) == ("<|im_end|>" if template in (CHATML, REWRITES) else "<eos>")


def test_supervised_limits_name_the_row():
    made = tokenizer(None)
    examples = rows("a", "b", responses=["1", "hello world " * 20])
    message = refused(render_supervised, examples, made, data(SftDataSettings, max_response_tokens=10))
    assert re.search(r"response of row 1 has \d\d tokens, more than data.max_response_tokens=10", message)
    assert len(render_supervised(rows("a", responses=["1"]), made, data(SftDataSettings, max_response_tokens=2))) == 1
    assert "row 0" in refused(
        render_supervised, rows("a", responses=["1"]), made, data(SftDataSettings, max_response_tokens=1)
    )
    dropping = data(SftDataSettings, max_prompt_tokens=3, overlong_prompts=Overlong.DROP)
    kept = render_supervised(rows("hello world " * 9, "b", responses=["1", "2"]), made, dropping)
    assert [s.row.index for s in kept] == [1]


def test_a_supervised_row_needs_a_response_and_an_end_token():
    settings = data(SftDataSettings)
    assert "no response" in refused(render_supervised, rows("a"), tokenizer(None), settings)
    assert "no end token" in refused(render_supervised, rows("a", responses=["b"]), tokenizer(None, eos=None), settings)


def test_plain_text_gets_one_begin_token_and_no_end_token():
    """Some tokenizers put their end token behind every text: the model was then asked to go on from the end. Text that was
    rendered elsewhere brings its begin token along: there were two of them."""
    made = tokenizer(bos=True)
    both = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)])
    made.backend_tokenizer.post_processor = both
    plain, rendered = render_prompts(rows("hello world", "<bos>hello world"), made, data()).prompts
    assert plain.ids == rendered.ids == [0, *made("hello world", add_special_tokens=False).input_ids]
    (learned,) = render_supervised(rows("hello", responses=["world"]), made, data(SftDataSettings))
    assert learned.ids.count(0) == learned.ids.count(1) == 1
