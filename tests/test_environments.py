"""Environments without an engine: conversations as ids, tools, and the processes that environments run in."""

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.config.errors import UserError
from meshloom.environments.chat import Added, ChatRenderer, Rewritten
from meshloom.environments.pool import EnvironmentPool, Reply, tool_schemas
from meshloom.environments.protocol import Answer, Fault, FaultReason, Task, Turn
from meshloom.environments.tools import Call, ToolBox, by_pattern, hermes, llama3_json
from meshloom.environments.user_code import read_code
from meshloom.lesson.model import CHAT_TEMPLATE
from tests.lesson_runs import write_model

STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('=')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops what stands before the last ``=`` of earlier turns, as templates do with reasoning."""
TRIMMING = CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] | trim }}")

TOOLS = '''
import os, time

def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: the one.
        b: the other.
    """
    return a + b

def breaks(text: str) -> str:
    """Breaks in the way that it is told.

    Args:
        text: what to do.
    """
    if text == "die":
        os._exit(3)
    if text == "hang":
        time.sleep(60)
    raise ValueError("no " + text)

async def slow(text: str) -> str:
    """Waits.

    Args:
        text: given back.
    """
    return text * 100
'''

GAME = """
import os, random, time

class Game:
    def __init__(self, luck=0):
        self.luck = luck
    def reset(self, task):
        self.total = task.seed
        return f"begin at {self.total}"
    async def step(self, turn):
        if turn.text == "die":
            os._exit(3)
        if turn.text == "hang":
            time.sleep(60)
        if turn.text == "raise":
            raise ValueError("as asked")
        if turn.text == "nothing":
            return None
        if turn.text == "random":
            self.total += random.SystemRandom().randrange(10**9)
        self.total += len(turn.ids)
        return f"now {self.total} {os.getpid()}" if turn.text == "pid" else f"now {self.total}", 1.0, turn.text == "end"
    def close(self):
        pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("environments")
    write_model(root / "model")
    (root / "tools.py").write_text(TOOLS)
    (root / "game.py").write_text(GAME)
    return root


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder / "model")


def renderer(tokenizer: PreTrainedTokenizerFast, template: str = CHAT_TEMPLATE) -> ChatRenderer:
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))


def said(tokenizer: PreTrainedTokenizerFast, text: str, *, ended: bool = True) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return [*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")] if ended else ids


QUESTION = [{"role": "user", "content": "1+1="}]
REPLY = [{"role": "user", "content": "no"}]


def test_ids_only_grow_by_what_was_sampled_and_what_the_template_adds(tokenizer) -> None:
    chat = renderer(tokenizer)
    conversation = chat.begin(QUESTION)
    for turn in ("3", "4 maybe"):
        before, sampled = conversation.ids, said(tokenizer, turn)
        added = chat.extend(conversation, sampled, REPLY)
        assert isinstance(added, Added)
        assert conversation.ids == before + sampled + added.ids
        assert tokenizer.decode(added.ids) == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    assert conversation.ids == tokenizer(conversation.text, add_special_tokens=False).input_ids


def test_a_turn_that_did_not_end_is_ended_by_the_template(tokenizer) -> None:
    chat = renderer(tokenizer)
    conversation = chat.begin(QUESTION)
    added = chat.extend(conversation, said(tokenizer, "3", ended=False), REPLY)
    assert tokenizer.decode(added.ids).startswith("<|im_end|>\n<|im_start|>user")


def test_sampled_ids_stay_where_the_text_has_others(tokenizer) -> None:
    """A special token inside a turn, and white space that the template trims, stay as they were sampled."""
    chat = renderer(tokenizer, TRIMMING)
    conversation = chat.begin(QUESTION)
    odd = [tokenizer.convert_tokens_to_ids("<|im_start|>"), *said(tokenizer, " 3 ")]
    before = conversation.ids
    added = chat.extend(conversation, odd, REPLY)
    assert conversation.ids == [*before, *odd, *added.ids]
    assert isinstance(chat.extend(conversation, said(tokenizer, "4  "), REPLY), Added)


def test_a_template_that_rewrites_history_is_found_out(tokenizer) -> None:
    chat = renderer(tokenizer, STRIPPING)
    conversation = chat.begin(QUESTION)
    ids, text = conversation.ids, conversation.text
    assert isinstance(chat.extend(conversation, said(tokenizer, "3"), REPLY), Added), "nothing to strip"
    conversation = chat.begin(QUESTION)
    found = chat.extend(conversation, said(tokenizer, "so 1+1=2"), REPLY)
    assert isinstance(found, Rewritten)
    assert "so 1+1=2" in found.why
    assert (conversation.ids, conversation.text) == (ids, text), "it stays as it was"
    assert "so 1+1" not in found.fresh.text and found.fresh.text.endswith("no<|im_end|>\n<|im_start|>assistant\n")


def test_history_rewritten_later_is_found_out(tokenizer) -> None:
    """A template that keeps the last turn as it was, and changes it when another has come."""
    late = STRIPPING.replace("not loop.last", "loop.index0 < messages|length - 3")
    chat = renderer(tokenizer, late)
    conversation = chat.begin(QUESTION)
    assert isinstance(chat.extend(conversation, said(tokenizer, "so 1+1=2"), REPLY), Added)
    assert isinstance(chat.extend(conversation, said(tokenizer, "3"), REPLY), Rewritten)


def test_calls_are_found_in_each_format() -> None:
    one = Call("add", {"a": 1})
    assert hermes('x <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> y') == [one]
    assert hermes("no call") == []
    assert [bool(call.error) for call in hermes('<tool_call>{"name": "add"}</tool_call><tool_call>{"name": 3}')] == [
        False,
        True,
    ]
    assert llama3_json('{"name": "add", "parameters": {"a": 1}}') == [one]
    assert llama3_json('<|python_tag|>{"name": "add", "parameters": {"a": 1}}') == [one]
    assert llama3_json("the sum is 2") == []
    assert llama3_json("{oops")[0].error.startswith("the call is not valid JSON")
    assert by_pattern(r"(?P<name>\w+)\((?P<arguments>.*?)\)", None)('add({"a": 1}) f(x)') == [one, Call("f", "x")]
    assert by_pattern(r"=(?P<arguments>.*?)=", "add")("=7=") == [Call("add", "7")]
    with pytest.raises(UserError, match="name and arguments"):
        by_pattern(r"(?P<arguments>.*)", None)


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_a_call_that_is_nested_too_deeply_is_one_that_cannot_be_read(folder: Path, deep: str) -> None:
    """It made its episode invalid, as if the environment had failed."""
    for found in (hermes(f"<tool_call>{deep}</tool_call>"), llama3_json('{"name": "add", "parameters": ' + deep)):
        assert len(found) == 1 and found[0].error.startswith("the call is not valid JSON")
    assert by_pattern(r"CALL (?P<arguments>.*)", "add")(f"CALL {deep}")[0].arguments == deep
    settings = tool_settings(folder, "add")
    answer = ToolBox(settings, [read_code(each, "environment.tools") for each in settings.tools]).answer(
        f"<tool_call>{deep}</tool_call>", 0
    )
    assert (answer.tools.calls, answer.tools.errors) == (1, 1)


def tool_settings(folder: Path, *names: str, **more) -> EnvironmentSettings:
    tools = tuple(f"{folder}/tools.py:{name}" for name in names)
    return EnvironmentSettings(**{"tools": tools, "workers": 1, "step_deadline_s": 3.0} | more)


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_what_is_wrong_with_a_call_is_its_answer(folder: Path) -> None:
    settings = tool_settings(folder, "add", "breaks", "slow", max_tool_calls=7, max_answer_characters=30)
    box = ToolBox(settings, [read_code(place, "environment.tools") for place in settings.tools])
    asked = [
        call("add", a=1),
        call("add"),
        call("sub", a=1),
        call("breaks", text="it"),
        "<tool_call>{",
        call("slow", text="x"),
    ]
    answer = box.answer("".join(asked), 0)
    contents = [message["content"] for message in answer.messages]
    assert contents[0] == "2"
    assert "missing a required argument: 'a'" in contents[1]
    assert "there is no tool 'sub'; there are: add, breaks, slow" in contents[2]
    assert contents[3] == "error: ValueError: no it"
    assert "not valid JSON" in contents[4]
    assert contents[5] == "x" * 30 + "\n[cut: 70 of 100 characters]"
    assert (answer.tools.calls, answer.tools.errors, answer.done) == (6, 4, False)
    late = box.answer(call("add", a=1) + call("add", a=1), 6)
    assert [message["content"] for message in late.messages] == ["2", "error: no more than 7 tool calls are allowed"]
    assert box.answer("I say 2", 0) == Answer(done=True)


def test_schemas_come_from_hints_and_docstrings(folder: Path) -> None:
    (schema,) = tool_schemas(tool_settings(folder, "add"))
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "the one."}
    assert schema["function"]["parameters"]["required"] == ["a"]
    (folder / "bare.py").write_text("def bare(x):\n    return x\n")
    with pytest.raises(UserError, match="the tool 'bare' has no schema"):
        tool_schemas(EnvironmentSettings(tools=(f"{folder}/bare.py:bare",)))
    with pytest.raises(UserError, match="no function or class 'none'"):
        tool_schemas(tool_settings(folder, "none"))


def wait(future: "Future[Reply]") -> Reply:
    return future.result(timeout=60)


def test_late_and_deadly_tools_are_answered_and_others_go_on(folder: Path) -> None:
    with EnvironmentPool(tool_settings(folder, "add", "breaks", workers=2)) as pool:
        episode = pool.open()
        texts = [call("breaks", text="hang"), call("breaks", text="die"), *[call("add", a=i) for i in range(6)]]
        replies = [wait(future) for future in [pool.use_tools(episode, text, 0) for text in texts]]
    contents = [reply.messages[0]["content"] for reply in replies]
    assert "no answer after 3 s" in contents[0] and "status 3" in contents[1]
    assert contents[2:] == [str(i + 1) for i in range(6)]
    assert [reply.tools.errors for reply in replies] == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.fixture(scope="module")
def games(folder: Path) -> Iterator[EnvironmentPool]:
    settings = EnvironmentSettings(
        custom=f"{folder}/game.py:Game", workers=1, step_deadline_s=3.0, arguments={"luck": 3}
    )
    with EnvironmentPool(settings) as pool:
        yield pool


def task(seed: int) -> Task:
    return Task(seed=seed, prompt="", answer=None, data_source="", extra={})


def turn(text: str) -> Turn:
    return Turn(text=text, ids=(1,) * len(text), finish="stop")


def content(reply: Reply) -> str:
    assert isinstance(reply, Answer), reply
    return reply.messages[0]["content"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("die", FaultReason.DIED),
        ("hang", FaultReason.DEADLINE),
        ("raise", FaultReason.RAISED),
        ("nothing", FaultReason.RAISED),
    ],
)
def test_an_environment_that_fails_costs_its_own_episode_only(games, text: str, reason: FaultReason) -> None:
    """Others of the same process are brought to where they were in a fresh one, and go on."""
    other, failing = games.open(), games.open()
    assert content(wait(games.reset(other, task(5)))) == "begin at 5"
    assert content(wait(games.step(other, turn("abc")))) == "now 8"
    wait(games.reset(failing, task(6)))
    fault = wait(games.step(failing, turn(text)))
    assert isinstance(fault, Fault) and fault.reason is reason
    found = wait(games.step(other, turn("ab")))
    assert (content(found), found.reward, found.done) == ("now 10", 1.0, False)
    assert wait(games.step(other, turn("end"))).done
    for episode in (other, failing):
        games.end(episode)


def test_an_environment_that_answers_differently_when_it_is_repeated_is_told(games) -> None:
    other, failing = games.open(), games.open()
    wait(games.reset(other, task(1)))
    wait(games.step(other, turn("random")))
    wait(games.reset(failing, task(6)))
    wait(games.step(failing, turn("die")))
    fault = wait(games.step(other, turn("ab")))
    assert isinstance(fault, Fault) and fault.reason is FaultReason.NOT_REPEATABLE


def test_a_worker_that_is_killed_between_two_turns_costs_nothing(games) -> None:
    episode = games.open()
    wait(games.reset(episode, task(1)))
    pid = int(content(wait(games.step(episode, turn("pid")))).split()[-1])
    os.kill(pid, signal.SIGKILL)
    fault = wait(games.step(episode, turn("ab")))
    assert isinstance(fault, Fault) and fault.reason is FaultReason.NOT_REPEATABLE, "it told another process id before"
    episode = games.open()
    wait(games.reset(episode, task(1)))
    for child in psutil.Process().children():
        if "environments.worker" in " ".join(child.cmdline()):
            child.kill()
    assert content(wait(games.step(episode, turn("ab")))) == "now 3"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("class Game:\n    pass\n", "no method 'reset'"),
        ("class Game: ...\nraise RuntimeError('no')\n", "raises RuntimeError"),
        ("class Other:\n    pass\n", "no function or class 'Game'"),
        ("import os\nos._exit(4)\nclass Game: ...\n", "ends while it is loaded"),
    ],
)
def test_what_cannot_be_loaded_is_refused(tmp_path: Path, source: str, what: str) -> None:
    (tmp_path / "game.py").write_text(source)
    with pytest.raises(UserError, match=what):
        EnvironmentPool(EnvironmentSettings(custom=f"{tmp_path}/game.py:Game", workers=2))


def test_arguments_that_an_environment_does_not_take_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="environment.arguments"):
        EnvironmentPool(EnvironmentSettings(custom=f"{folder}/game.py:Game", workers=1, arguments={"size": 3}))


def test_a_pool_that_is_closed_leaves_no_process(folder: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with EnvironmentPool(tool_settings(folder, "add", workers=2)) as pool:
        wait(pool.use_tools(pool.open(), call("add", a=1), 0))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


class TakenAway(queue.SimpleQueue):
    """Another keeper takes what is there right after it was seen."""

    def empty(self) -> bool:
        was_empty = super().empty()
        if not was_empty:
            self.get_nowait()
        return was_empty


def test_keepers_that_leave_at_once_do_not_wait_for_what_the_other_has_taken(folder: Path) -> None:
    with EnvironmentPool(tool_settings(folder, "add", workers=1)) as pool:
        keeper = pool._keepers[0]
    keeper.queue = TakenAway()
    keeper.queue.put(None)
    leaves = threading.Thread(target=keeper.leave, daemon=True)
    leaves.start()
    leaves.join(20.0)
    assert not leaves.is_alive()
