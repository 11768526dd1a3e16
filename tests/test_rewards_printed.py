"""What reward functions print: kept with the call that printed it, within bounds, and never in the way. Real processes."""

import json
import os
import time
from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import RewardSettings
from meshloom.killable.output import HEAD_BYTES, TAIL_BYTES, Output
from meshloom.rewards.combined import Combination, Component
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest
from meshloom.rewards.pool import RewardPool

FUNCTIONS = r'''
import logging, os, subprocess, sys, threading, time
print("loaded")

def score(request):
    name, _, rest = request.response.partition(":")
    return ACTIONS[name](rest)

def say(text):
    print(text)
    return 1

def everywhere(text):
    print("out")
    print("err", file=sys.stderr)
    logging.getLogger("mine").warning("logged")
    os.write(1, b"raw\n")
    subprocess.run(["echo", "child"])
    sys.stdout.write("no end of line")
    return 1

def flood(text):
    sys.stdout.write("first" + "x" * 20_000_000 + "last")
    return 1

def flood_for_ever(text):
    print("first")
    while True:
        os.write(1, b"y" * 65536)

def thread(text):
    def on():
        while True:
            print("behind")
            time.sleep(0.005)
    threading.Thread(target=on, daemon=True).start()
    return 1

def later(text):
    """Prints once it is answered, and then makes a file."""
    def on():
        time.sleep(0.5)
        for _ in range(30):
            os.write(1, b"y" * 10_000)
        open(text, "w").close()
    threading.Thread(target=on, daemon=True).start()
    return 1

def elsewhere(text):
    """What comes after it goes to a file."""
    file = os.open(text, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    print("into the file")
    return 1

def closed(text):
    os.close(1)
    os.close(2)
    return 1

class Broken:
    def write(self, text): raise ZeroDivisionError
    def flush(self): raise ZeroDivisionError

def replaced(text):
    sys.stdout = sys.stderr = Broken()
    return 1

ACTIONS = {
    "say": say,
    "everywhere": everywhere,
    "quiet": lambda _: 1,
    "flood": flood,
    "flood for ever": flood_for_ever,
    "hang": lambda _: print("going to hang") or time.sleep(60),
    "exit": lambda _: print("going to exit") or os._exit(2),
    "raise": lambda _: print("going to raise") or {}["x"],
    "thread": thread,
    "later": later,
    "elsewhere": elsewhere,
    "closed": closed,
    "replaced": replaced,
    "strange": lambda _: print("\ud800 \x00 é") or os.write(1, b"\xff\n") and 1,
}
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("printed") / "functions.py"
    path.write_text(FUNCTIONS)
    return f"{path}:score"


def ask(response: str) -> RewardRequest:
    return RewardRequest(response=response, answer=None, data_source="", extra={}, prompt="", finish="stop")


def scored(functions: str, *actions: str, deadline_s: float = 20) -> list[Reward]:
    """By one process, after a first sample, which has what was printed before it."""
    with RewardPool(RewardSettings(function=functions, workers=1, deadline_s=deadline_s)) as pool:
        first, *rewards = pool.score([ask("say:begin"), *map(ask, actions)])
    assert first.printed == "loaded\nbegin"
    return rewards


def test_what_a_call_prints_stands_with_its_sample(functions: str) -> None:
    """Calls that share a message too: cheap ones run ahead of what is read of them."""
    actions = [f"say:{i}" if i % 3 else "quiet" for i in range(300)]
    printed = [reward.printed for reward in scored(functions, *actions)]
    assert printed == [str(i) if i % 3 else "" for i in range(300)]


def test_whatever_writes_to_the_process_is_kept(functions: str) -> None:
    everywhere, after = scored(functions, "everywhere", "say:after")
    assert everywhere.printed == "out\nerr\nlogged\nraw\nchild\nno end of line"
    assert after.printed == "after"


@pytest.mark.parametrize(
    ("action", "reason"),
    [("hang", InvalidReason.DEADLINE), ("exit", InvalidReason.DIED), ("raise", InvalidReason.RAISED)],
)
def test_a_call_that_fails_says_what_it_printed_before(functions: str, action: str, reason: InvalidReason) -> None:
    failed, after = scored(functions, action, "say:after", deadline_s=1)
    assert failed.reason is reason
    assert failed.printed.endswith(f"going to {action}")
    assert after.printed.endswith("after")


def test_much_output_is_cut_and_waits_for_nobody(functions: str) -> None:
    flood, after = scored(functions, "flood", "say:after")
    assert flood.value == 1
    assert flood.printed.startswith("firstxx") and flood.printed.endswith("xxlast")
    assert f"… {20_000_009 - HEAD_BYTES - TAIL_BYTES:,} bytes left out …" in flood.printed
    assert len(flood.printed) < HEAD_BYTES + TAIL_BYTES + 100
    assert after.printed == "after"


def test_output_without_end_does_not_put_off_the_deadline(functions: str) -> None:
    began = time.monotonic()
    flood, after = scored(functions, "flood for ever", "say:after", deadline_s=1)
    assert flood.reason is InvalidReason.DEADLINE
    assert "first\nyyy" in flood.printed and "bytes left out" in flood.printed
    assert after.value == 1
    assert time.monotonic() - began < 60


def test_output_of_a_thread_that_was_left_behind_breaks_nothing(functions: str) -> None:
    rewards = scored(functions, "thread", *["say:x"] * 50)
    assert all(reward.value == 1 for reward in rewards)
    assert all("x" in reward.printed for reward in rewards[1:])


def test_what_a_call_leaves_running_prints_on_while_nothing_is_asked(functions: str, tmp_path: Path) -> None:
    """A server that a function had started stood still between two steps, once it had filled the pipe."""
    with RewardPool(RewardSettings(function=functions, workers=1, deadline_s=20)) as pool:
        pool.score([ask(f"later:{tmp_path / 'done'}")])
        until = time.monotonic() + 60
        while not (tmp_path / "done").exists():
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.parametrize("action", ["closed", "replaced"])
def test_a_function_that_gives_up_its_output_is_scored_as_before(functions: str, action: str) -> None:
    rewards = scored(functions, action, *["quiet"] * 50)
    assert {(reward.value, reward.printed) for reward in rewards} == {(1.0, "")}


def test_a_file_in_place_of_the_output_gets_no_marks(functions: str, tmp_path: Path) -> None:
    rewards = scored(functions, f"elsewhere:{tmp_path / 'file'}", "say:more", "quiet")
    assert [(reward.value, reward.printed) for reward in rewards] == [(1.0, "")] * 3
    assert (tmp_path / "file").read_text() == "into the file\nmore\n"


def test_characters_that_no_file_can_hold_are_kept_in_another_form(functions: str) -> None:
    (strange,) = scored(functions, "strange")
    assert (strange.value, strange.printed) == (1.0, "\\ud800 \x00 é\n\ufffd")
    assert json.loads(json.dumps(strange.printed)) == strange.printed


def test_components_say_which_of_them_printed(functions: str) -> None:
    with RewardPool(RewardSettings(function=functions, workers=1)) as pool:
        both = Combination((Component(name="a", scorer=pool), Component(name="b", scorer=pool)))
        assert both.submit(ask("say:x")).result().printed == "a: loaded\nx\nb: x"


def test_a_file_that_ends_its_process_says_what_it_printed(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text("import os\nprint('no licence for this host')\nos._exit(3)\n")
    with pytest.raises(UserError, match="status 3; it printed: no licence for this host"):
        RewardPool(RewardSettings(function=f"{path}:score", workers=1))


@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_the_end_of_a_call_is_found_however_it_is_read(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshloom.killable.output._CHUNK", size)
    monkeypatch.setattr("meshloom.killable.output._MOST_CHUNKS", 10_000)
    from meshloom.killable.output import _END

    read, write = os.pipe()
    output = Output(read)
    os.write(write, b"one" + _END + _END[:-1] + b"two" + _END + b"rest" + _END[:3])
    assert [output.take(), output.take(), output.take(), output.take()] == [
        "one",
        (_END[:-1] + b"two").decode(),
        (b"rest" + _END[:3]).decode().rstrip(),
        "",
    ]
    os.close(write)
    assert not output.drain()
    output.close()
    output.close()
