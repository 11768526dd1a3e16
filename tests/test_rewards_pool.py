"""The reward pool under functions that misbehave: each costs its own sample and nothing else. Real processes throughout."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import psutil
import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import RewardSettings
from meshloom.rewards.outcome import InvalidReason, RewardRequest
from meshloom.rewards.pool import RewardPool

DEADLINE_S = 1.5
SLEEP = f"600.{os.getpid()}"
"""How long children sleep that should have been killed: a number no other process uses."""

FUNCTIONS = '''
import asyncio, ctypes, multiprocessing, os, re, signal, subprocess, sys, threading, time
from decimal import Decimal
import numpy

print("loud import" * 100_000)

def score(request):
    """The response names what to do; the answer is the right score."""
    name, _, rest = request.response.partition(":")
    return ACTIONS[name](rest, request)

def fail(text, request):
    raise ValueError(text * 5000 + chr(0xD800))

def hang_in_c(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    re.match("(a+)+$", "a" * 60 + "b")

def hang_holding_the_interpreter(*_):
    ctypes.PyDLL(None).sleep(60)

def print_megabytes(text, request):
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * 5_000_000)
    os.write(1, b"y" * 1_000_000)
    os.system("head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2")
    return 1

def leave_thread(*_):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return 1

def leave_killer(*_):
    threading.Thread(target=lambda: (time.sleep(0.05), os._exit(9)), daemon=True).start()
    return 1

def leave_child(text, request):
    new_session = text == "own session"
    child = subprocess.Popen(["sleep", "SLEEP"], start_new_session=new_session)
    return 1

def fork(*_):
    return 0 if os.fork() == 0 else 1

def run_child_then_hang(*_):
    subprocess.Popen(["sleep", "SLEEP"], start_new_session=True)
    subprocess.run(["sleep", "SLEEP"])

def write_to_sockets(text, request):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, text.encode() + b"\\n")
        except OSError:
            pass
    return 1

async def wait(*_):
    await asyncio.sleep(0.01)
    return 0.25

def close_all(*_):
    os.closerange(3, 64)
    return 1

ACTIONS = {
    "value": lambda text, request: float(text),
    "answer": lambda text, request: request.answer,
    "true": lambda *_: True,
    "numpy": lambda *_: numpy.float32(0.5),
    "decimal": lambda *_: Decimal("0.125"),
    "dict": lambda *_: {"score": numpy.int64(1), "format": True, "length": 3, "note": "text", "bad": float("nan")},
    "await": wait,
    "nan": lambda *_: float("nan"),
    "infinite": lambda *_: float("-inf"),
    "huge": lambda *_: 10**400,
    "none": lambda *_: None,
    "text": lambda *_: "1.0",
    "complex": lambda *_: 1j,
    "no score": lambda *_: {"reward": 1},
    "score of text": lambda *_: {"score": "1", "format": 1},
    "raise": fail,
    "exit": lambda *_: sys.exit(0),
    "interrupt": lambda *_: signal.raise_signal(signal.SIGINT),
    "recurse": lambda text, request: ACTIONS["recurse"](text, request),
    "sleep": lambda text, request: time.sleep(float(text)) or 1,
    "hang in c": hang_in_c,
    "hang holding": hang_holding_the_interpreter,
    "spin": lambda *_: [None for _ in iter(int, 1)],
    "os exit": lambda *_: os._exit(0),
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda *_: ctypes.string_at(0),
    "print": print_megabytes,
    "leave thread": leave_thread,
    "leave killer": leave_killer,
    "leave child": leave_child,
    "leave child and die": lambda *_: (leave_child("own session", None), os._exit(4)),
    "fork": fork,
    "child then hang": run_child_then_hang,
    "write to sockets": write_to_sockets,
    "close all": close_all,
    "pid": lambda *_: os.getpid(),
    "torch": lambda *_: "torch" in sys.modules,
}
'''


def ask(response, answer=None):
    return RewardRequest(response=response, answer=answer, data_source="test", extra={}, prompt="", finish="stop")


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS.replace("SLEEP", SLEEP))
    return f"{path}:score"


@pytest.fixture(scope="module")
def pool(functions):
    with RewardPool(RewardSettings(function=functions, workers=2, deadline_s=DEADLINE_S)) as shared:
        yield shared


def sleepers():
    """Processes that the functions above started in this test session."""
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", SLEEP]]


def is_alive(process):
    """False for a zombie too: the system's first process reaps orphans when it likes."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_that_run(module):
    found = set()
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if f"meshloom.{module} import" in " ".join(process.cmdline()):
                found.add(process)
    return found


def until(condition, deadline_s=30.0):
    end = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_rewards_come_in_the_order_of_requests(pool):
    """Slow samples first: the others overtake them in the other worker."""
    requests = [ask("sleep:0.1") if i % 97 == 0 else ask(f"value:{i}") for i in range(600)]
    rewards = pool.score(requests)
    assert [r.value for r in rewards] == [1.0 if i % 97 == 0 else float(i) for i in range(600)]
    assert all(r.valid for r in rewards)


def test_samples_may_be_submitted_while_others_run(pool):
    futures = []
    for i in range(20):
        futures.append(pool.submit(ask(f"value:{i}")))
        time.sleep(0.002)
    assert [f.result(timeout=10).value for f in futures] == list(range(20))


@pytest.mark.parametrize(
    ("action", "value"),
    [
        ("value:-2.5", -2.5),
        ("true", 1.0),
        ("numpy", 0.5),
        ("decimal", 0.125),
        ("dict", 1.0),
        ("await", 0.25),
        ("print", 1.0),
    ],
)
def test_numbers_of_every_kind_are_values(pool, action, value):
    (reward,) = pool.score([ask(action)])
    assert (reward.value, reward.reason) == (value, None)
    assert reward.parts == ({"format": 1.0, "length": 3.0} if action == "dict" else {})


@pytest.mark.parametrize(
    ("action", "reason", "words"),
    [
        ("nan", InvalidReason.NOT_A_NUMBER, "nan"),
        ("infinite", InvalidReason.NOT_A_NUMBER, "inf"),
        ("huge", InvalidReason.NOT_A_NUMBER, "int: 1000"),
        ("none", InvalidReason.NOT_A_NUMBER, "NoneType"),
        ("text", InvalidReason.NOT_A_NUMBER, "str: '1.0'"),
        ("complex", InvalidReason.NOT_A_NUMBER, "complex"),
        ("no score", InvalidReason.NOT_A_NUMBER, "reward"),
        ("score of text", InvalidReason.NOT_A_NUMBER, "str: '1'"),
        ("raise:no ", InvalidReason.RAISED, "ValueError: no no"),
        ("no such action", InvalidReason.RAISED, "KeyError"),
        ("exit", InvalidReason.RAISED, "SystemExit"),
        ("interrupt", InvalidReason.RAISED, "KeyboardInterrupt"),
        ("recurse", InvalidReason.RAISED, "RecursionError"),
        ("os exit", InvalidReason.DIED, "status 0"),
        ("kill", InvalidReason.DIED, "SIGKILL"),
        ("segfault", InvalidReason.DIED, "SIGSEGV"),
        ("write to sockets:rubbish", InvalidReason.DIED, "channel"),
        ('write to sockets:[NaN, null, "", {}, 0]', InvalidReason.DIED, "channel"),
        ("close all", InvalidReason.DIED, ""),
        ("spin", InvalidReason.DEADLINE, f"{DEADLINE_S:g} s"),
        ("hang in c", InvalidReason.DEADLINE, "killed"),
        ("hang holding", InvalidReason.DEADLINE, "killed"),
        ("sleep:60", InvalidReason.DEADLINE, "killed"),
    ],
)
def test_a_failure_is_invalid_with_its_reason_and_costs_no_other_sample(pool, action, reason, words):
    requests = [ask(f"value:{i}") for i in range(40)]
    requests.insert(7, ask(action))
    start = time.monotonic()
    rewards = pool.score(requests)
    failed = rewards.pop(7)
    assert (failed.value, failed.reason) == (None, reason)
    assert words in failed.detail
    assert len(failed.detail) <= 2000
    failed.detail.encode()
    assert [r.value for r in rewards] == list(range(40))
    assert time.monotonic() - start < DEADLINE_S + 20


def test_the_deadline_counts_from_the_start_of_a_sample_not_from_its_queueing(pool):
    """Twelve samples on two workers wait longer than the deadline, and run shorter."""
    rewards = pool.score([ask("sleep:0.3")] * 12)
    assert [r.value for r in rewards] == [1.0] * 12


def test_hanging_samples_are_killed_side_by_side(pool):
    start = time.monotonic()
    rewards = pool.score([ask("sleep:60"), ask("sleep:60"), *([ask("value:1")] * 20)])
    assert [r.reason for r in rewards[:2]] == [InvalidReason.DEADLINE] * 2
    assert all(r.valid for r in rewards[2:])
    assert time.monotonic() - start < 2 * DEADLINE_S + 20


def test_a_thread_left_behind_that_ends_the_process_is_not_charged_to_later_samples(functions):
    settings = RewardSettings(function=functions, workers=1, deadline_s=20)
    with RewardPool(settings) as single:
        rewards = single.score([ask("leave killer"), *([ask("sleep:0.03")] * 10)])
    assert [r.value for r in rewards] == [1.0] * 11


def test_a_worker_that_died_while_it_waited_costs_no_sample(functions):
    before = children_that_run("rewards.worker")
    with RewardPool(RewardSettings(function=functions, workers=1, deadline_s=20)) as single:
        (worker,) = children_that_run("rewards.worker") - before
        worker.kill()
        assert until(lambda: not is_alive(worker))
        assert [r.value for r in single.score([ask("value:1"), ask("value:2")])] == [1, 2]


def test_a_worker_full_of_leftovers_is_replaced(functions):
    settings = RewardSettings(function=functions, workers=1, deadline_s=20)
    with RewardPool(settings) as single:
        (first,) = single.score([ask("pid")])
        assert all(r.value == 1 for r in single.score([ask("leave thread")] * 20))
        (last,) = single.score([ask("pid")])
    assert first.value != last.value


@pytest.mark.parametrize("actions", [["leave child:own session", "os exit"], ["leave child and die"]])
def test_children_left_behind_die_with_a_worker_that_dies_by_itself(functions, actions):
    """They are in a session of their own, and orphans before anyone could look for them."""
    with RewardPool(RewardSettings(function=functions, workers=1, deadline_s=20)) as single:
        rewards = single.score([ask(action) for action in [*actions, "value:2"]])
        assert [r.reason for r in rewards[-2:]] == [InvalidReason.DIED, None]
        assert until(lambda: not sleepers())


@pytest.mark.parametrize("where", ["same group", "own session"])
def test_children_left_behind_die_with_the_pool(functions, where):
    with RewardPool(RewardSettings(function=functions, workers=1, deadline_s=20)) as single:
        assert single.score([ask(f"leave child:{where}")])[0].value == 1
        assert len(sleepers()) == 1
    assert until(lambda: not sleepers())


def test_the_children_of_a_killed_sample_die_with_it(pool):
    (reward,) = pool.score([ask("child then hang")])
    assert reward.reason is InvalidReason.DEADLINE
    assert until(lambda: not sleepers())


def test_a_forked_copy_of_a_worker_answers_nothing(pool):
    assert [r.value for r in pool.score([ask("fork"), *(ask(f"value:{i}") for i in range(5))])] == [1, 0, 1, 2, 3, 4]


def test_workers_do_not_import_torch(pool):
    assert {r.value for r in pool.score([ask("torch")] * 8)} == {0.0}


def test_closing_kills_at_once_and_cancels_the_rest(functions):
    before = set(psutil.Process().children())
    pool = RewardPool(RewardSettings(function=functions, workers=2, deadline_s=60))
    futures = [pool.submit(ask("sleep:60")) for _ in range(6)]
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 30
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    assert set(psutil.Process().children()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(ask("value:1"))


def test_a_pool_ends_though_its_processes_are_held(functions):
    """Whoever handed a long sample to a process that does not read waited for all of the sample's time, and for a guardian that
    was held without end."""
    before = children_that_run("rewards.worker"), children_that_run("killable.guardian")
    pool = RewardPool(RewardSettings(function=functions, workers=1, deadline_s=600))
    assert pool.score([ask("value:1")])[0].value == 1
    held = (children_that_run("rewards.worker") - before[0]) | (children_that_run("killable.guardian") - before[1])
    for process in held:
        process.suspend()
    future = pool.submit(ask("value:1" + " " * 10_000_000))
    time.sleep(0.5)
    start = time.monotonic()
    pool.close()
    assert len(held) == 2 and time.monotonic() - start < 100
    with pytest.raises(CancelledError):
        future.result(timeout=0)


@pytest.mark.parametrize("busy", ["sleep:600", "hang holding", "child then hang", "value:1"])
def test_nothing_outlives_a_controller_that_is_killed(functions, busy):
    """kill -9 on the controller, with workers idle, busy, or busy holding the interpreter's lock."""
    program = f"""
        import sys, time
        from meshloom.config.settings import RewardSettings
        from meshloom.rewards.outcome import RewardRequest
        from meshloom.rewards.pool import RewardPool
        pool = RewardPool(RewardSettings(function={functions!r}, workers=2, deadline_s=600))
        request = dict(answer=None, data_source="", extra={{}}, prompt="", finish="")
        pids = [pool.submit(RewardRequest(response="pid", **request)) for _ in range(64)]
        print(*{{int(pid.result().value) for pid in pids}})
        [pool.submit(RewardRequest(response={busy!r}, **request)) for _ in range(2)]
        time.sleep(0.3)
        print("busy", flush=True)
        time.sleep(600)
    """
    controller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert controller.stdout.readline() == "busy\n"
    family = psutil.Process(controller.pid).children(recursive=True)
    assert {p.pid for p in family} >= set(pids)
    controller.kill()
    controller.wait()
    assert until(lambda: not any(is_alive(p) for p in family))
    assert until(lambda: not sleepers())


def test_a_guardian_that_was_killed_comes_back(functions):
    before = children_that_run("killable.guardian")
    with RewardPool(RewardSettings(function=functions, workers=1, deadline_s=20)) as single:
        (first,) = children_that_run("killable.guardian") - before
        first.kill()
        assert [r.valid for r in single.score([ask("os exit"), ask("value:1")])] == [False, True]
        (second,) = children_that_run("killable.guardian") - before
        assert second != first


def test_a_pool_starts_from_a_notebook_or_an_unguarded_script(functions, tmp_path):
    """multiprocessing would import the main program again in each worker, and start the pool again."""
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(f"""
        from meshloom.config.settings import RewardSettings
        from meshloom.rewards.outcome import RewardRequest
        from meshloom.rewards.pool import RewardPool
        pool = RewardPool(RewardSettings(function={functions!r}, workers=1))
        request = RewardRequest(response="value:3", answer=None, data_source="", extra={{}}, prompt="", finish="")
        print(pool.score([request])[0].value)
        """)
    )
    for command, text in (([str(script)], None), (["-"], script.read_text())):
        done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True, timeout=30)
        assert (done.stdout, done.stderr) == ("3.0\n", "")


def test_ctrl_c_does_not_reach_the_workers(functions):
    with RewardPool(RewardSettings(function=functions, workers=1, deadline_s=20)) as single:
        pid = int(single.score([ask("pid")])[0].value)
        assert os.getpgid(pid) != os.getpgid(0)
        assert os.getsid(pid) != os.getsid(0)


def test_all_workers_run_the_file_as_it_was_at_the_start(tmp_path):
    """A file that is edited during a run must not change the reward when a worker is replaced."""
    path = tmp_path / "r.py"
    path.write_text("import os\ndef score(request):\n    return os._exit(1) if request.response == 'die' else 1\n")
    with RewardPool(RewardSettings(function=f"{path}:score", workers=1)) as single:
        path.write_text("def score(request):\n    return 2\n")
        assert [r.value for r in single.score([ask("a"), ask("die"), ask("b")])] == [1.0, None, 1.0]


def test_large_requests_pass(pool):
    rewards = pool.score([ask("answer", answer=1)] + [ask("value:1" + " " * 3_000_000)] * 6)
    assert [r.value for r in rewards] == [1.0] * 7


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os\nos._exit(3)", ["ends while it loads", "status 3"]),
        ("import time\ntime.sleep(60)", ["not loaded within 1 s"]),
        ("import sys\nsys.exit(2)", ["raises SystemExit"]),
        ("x = 1\nimport nonsense_package\n", ["raises ModuleNotFoundError", "line 2", "nonsense_package"]),
        ("def score(:\n", ["raises SyntaxError", "line 1"]),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_clear_error_and_leaves_nothing(tmp_path, source, words):
    before = set(psutil.Process().children())
    path = tmp_path / "r.py"
    path.write_text(source)
    with pytest.raises(UserError) as caught:
        RewardPool(RewardSettings(function=f"{path}:score", workers=2), start_deadline_s=1 if "sleep" in source else 60)
    for word in words:
        assert word in str(caught.value)
    assert set(psutil.Process().children()) <= before


def test_sigterm_handlers_of_a_function_do_not_delay_its_end(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(
        "import signal, time\ndef score(request):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(60)\n"
    )
    with RewardPool(RewardSettings(function=f"{path}:score", workers=1, deadline_s=0.3)) as single:
        start = time.monotonic()
        assert single.score([ask("a")])[0].reason is InvalidReason.DEADLINE
        assert 0.3 <= time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
