"""Programs that misbehave, run for real: each costs itself only. Harnesses bound what could go wrong if a wall did not hold."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshloom.config.code_settings import CodeSettings, Isolation
from meshloom.config.settings import RewardSettings
from meshloom.rewards.code.judge import CodeJudge, Judgement
from meshloom.rewards.code.tests import read_tests
from meshloom.rewards.code.verdict import Verdict
from meshloom.rewards.isolation import find_isolation
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.pool import RewardPool
from meshloom.rewards.sandbox.client import Sandbox, SandboxFault

SETTINGS = CodeSettings(
    enabled=True, cpu_s=2.0, wall_s=30.0, memory_bytes=2**28, disk_bytes=2**22, output_bytes=2**16, processes=8
)
BUDGET_S = 120.0
SLEEP = f"700.{os.getpid()}"
"""How long children sleep that should have been killed: a number no other process uses."""


@pytest.fixture(scope="module")
def judge() -> Iterator[CodeJudge]:
    with CodeJudge(SETTINGS, BUDGET_S) as one:
        yield one


@pytest.fixture(scope="module")
def hasty() -> Iterator[CodeJudge]:
    """A judge that does not wait long, for programs that would."""
    with CodeJudge(SETTINGS.model_copy(update={"wall_s": 0.8, "cpu_s": 0.4}), BUDGET_S) as one:
        yield one


def judged(judge: CodeJudge, program: str, stdout: str = "right", stdin: str = "") -> Judgement:
    return judge.judge(program, read_tests([{"stdin": stdin, "stdout": stdout}], {}))


def verdict(judge: CodeJudge, program: str) -> Verdict:
    return judged(judge, program).finding.verdict


def left_over() -> list[str]:
    """Processes and folders that programs of these tests left."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if SLEEP in " ".join(process.info["cmdline"] or []):
            found.append(str(process))
    return found


def test_a_right_program_passes(judge: CodeJudge) -> None:
    found = judged(judge, "a, b = map(int, input().split())\nprint(a + b)", "7\n", "3 4\n")
    assert (found.passed, found.total, found.finding.verdict) == (1, 1, Verdict.PASSED)


def test_a_program_may_read_its_input_in_any_way(judge: CodeJudge) -> None:
    program = (
        "import os, sys\nprint(open('/dev/stdin').read() + sys.stdin.readline() + sys.stdin.buffer.read().decode())"
    )
    assert judged(judge, program, "3 4\n3 4\n", "3 4\n").passed == 1
    assert judged(judge, "print(open(0).read())", "3 4", "3 4").passed == 1
    assert judged(
        judge, "import threading\nt = threading.Thread(target=lambda: print(input()))\nt.start()", "x", "x"
    ).passed


ORDINARY = {
    "numpy": "import numpy\nprint(numpy.arange(4).sum())",
    "threads": "import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as e: print(sum(e.map(int, '15')))",
    "processes": "import multiprocessing as m\nwith m.Pool(2) as p: print(sum(p.map(int, '15')))",
    "values that processes share": (
        "import multiprocessing as m\nv, a = m.Value('i', 0), m.RawArray('d', 10**5)\n"
        "def f():\n v.value, a[9] = 5, 1\np = m.Process(target=f)\np.start()\np.join()\nprint(v.value + int(a[9]))"
    ),
    "private memory": (
        "import mmap as m\na = m.mmap(-1, 4096, m.MAP_PRIVATE | m.MAP_ANONYMOUS)\na[:1] = b'6'\nprint(a[:1].decode())"
    ),
    "commands": "import subprocess\nprint(subprocess.check_output(['echo', '6'], text=True))",
    "an event loop": "import asyncio\nasync def f(): print(6)\nasyncio.run(f())",
    "files of its own": "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n f.write('6')\n f.seek(0)\n print(f.read())",
    "classes": "import pickle\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n x: int = 6\n"
    "print(pickle.loads(pickle.dumps(A())).x)",
    "exit": "print(6)\nexit()",
    "the main guard": "if __name__ == '__main__':\n print(6)",
}


@pytest.mark.parametrize("way", ORDINARY)
def test_ordinary_programs_run_as_they_would_alone(judge: CodeJudge, way: str) -> None:
    found = judged(judge, ORDINARY[way], "6")
    assert found.passed == 1, found.finding


BOMB = """
import os, sys
made = 0
for _ in range(200):
    try:
        child = os.fork()
    except OSError:
        print("bounded", made)
        raise
    made += 1
    if child == 0:
        import time
        time.sleep(SLEEP)
"""
MISDEEDS = {
    "a bomb of forks": (BOMB, Verdict.PROCESS_LIMIT),
    "a bomb of threads": (
        "import threading, time\nfor _ in range(200):\n threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
        Verdict.PROCESS_LIMIT,
    ),
    "ten gigabytes": ("x = bytearray(10**10)\nprint('right')", Verdict.MEMORY_LIMIT),
    "shared memory that no process holds": (
        "import mmap\nkept = []\nfor _ in range(200):\n m = mmap.mmap(-1, 2**22)\n m.write(b'a' * 2**22)\n"
        " m.madvise(mmap.MADV_DONTNEED)\n kept.append(m)\nprint('right')",
        Verdict.FORBIDDEN,
    ),
    "shared memory of a device": (
        "import mmap\nmmap.mmap(open('/dev/zero', 'r+b').fileno(), 2**22)\nprint('right')",
        Verdict.RUNTIME_ERROR,
    ),
    "a file that fills the disk": ("open('x', 'wb').write(b'a' * 10**8)\nprint('right')", Verdict.FILE_LIMIT),
    "many files that fill the disk": (
        "for i in range(100):\n with open(str(i), 'wb') as f:\n  f.write(b'a' * 10**6)\nprint('right')",
        Verdict.FILE_LIMIT,
    ),
    "too many open files": ("f = [open('/dev/null') for _ in range(1000)]\nprint('right')", Verdict.FILE_LIMIT),
    "a gigabyte of output": (
        "import os\nfor _ in range(1000):\n os.write(1, b'x' * 10**6)",
        Verdict.OUTPUT_LIMIT,
    ),
    "a gigabyte of complaints": (
        "import os\nfor _ in range(1000):\n os.write(2, b'x' * 10**6)",
        Verdict.OUTPUT_LIMIT,
    ),
    "an integer too long to print": ("print(10**10000)", Verdict.RUNTIME_ERROR),
    "deep recursion": ("def f(n):\n return f(n + 1)\nf(0)", Verdict.RUNTIME_ERROR),
    "a crash": ("import ctypes\nctypes.string_at(0)", Verdict.RUNTIME_ERROR),
    "a lone surrogate": ("print(chr(0xD800))", Verdict.RUNTIME_ERROR),
    "a syntax error": ("def (:", Verdict.RUNTIME_ERROR),
    "binary output": ("import os\nos.write(1, bytes(range(256)))", Verdict.WRONG_ANSWER),
    "nothing": ("", Verdict.WRONG_ANSWER),
    "an exit before the answer": ("import sys\nsys.exit(0)\nprint('right')", Verdict.WRONG_ANSWER),
    "a hard exit before the answer": ("import os\nos._exit(0)", Verdict.WRONG_ANSWER),
    "a right answer and a bad exit code": ("print('right')\nimport sys\nsys.exit(3)", Verdict.RUNTIME_ERROR),
    "a namespace of its own": (
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
        Verdict.RUNTIME_ERROR,
    ),
    "mounting": (
        "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/sandbox', b'tmpfs', 0, None) == 0",
        Verdict.RUNTIME_ERROR,
    ),
    "becoming root": ("import os\nos.setuid(0)", Verdict.RUNTIME_ERROR),
    "killing its parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", Verdict.WRONG_ANSWER),
    "killing everyone": ("import os, signal\nos.kill(-1, signal.SIGKILL)", None),
    "writing beside its folder": ("open('/usr/x', 'w')", Verdict.FORBIDDEN),
    "a link out of its folder": ("import os\nos.symlink('/usr/bin', 'out')\nopen('out/x', 'w')", Verdict.FORBIDDEN),
    "another process's memory": (
        "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) < 0: raise PermissionError(1, 'no')",
        Verdict.FORBIDDEN,
    ),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_costs_its_own_program_only_and_is_named(judge: CodeJudge, misdeed: str) -> None:
    program, expected = MISDEEDS[misdeed]
    found = judged(judge, program.replace("SLEEP", SLEEP))
    assert found.passed == 0
    assert expected is None or found.finding.verdict is expected, found
    assert judged(judge, "print('right')").passed == 1
    assert "SLEEP" not in program or left_over() == []


IDLE = {
    "an endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "waiting for input that never comes": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "a program that ignores signals": (
        "import signal\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "a loop in children": (
        "import os\nfor _ in range(3):\n if os.fork() == 0:\n  while True: pass\nimport time\ntime.sleep(600)"
    ),
}


@pytest.mark.parametrize("name", IDLE)
def test_a_program_that_does_not_end_is_ended(judge: CodeJudge, hasty: CodeJudge, name: str) -> None:
    began = time.monotonic()
    assert verdict(hasty, IDLE[name]) is Verdict.TIME_LIMIT
    assert time.monotonic() - began < 60
    assert judged(judge, "print('right')").passed == 1


DAEMON = """
import os, signal, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.closerange(0, 3)
        os.execv("/bin/sleep", ["sleep", "SLEEP"])
    os._exit(0)
os.wait()
print("right")
"""


def test_daemons_die_with_their_program(judge: CodeJudge) -> None:
    assert judged(judge, DAEMON.replace("SLEEP", SLEEP)).passed == 1
    assert left_over() == []


WATCHED = """
import os, resource, signal
for number in range(1, signal.NSIG):
    for pid in (1, os.getppid()):
        try:
            os.kill(pid, number)
        except (OSError, ValueError):
            pass
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
    try:
        resource.prlimit(os.getppid(), kind, (0, 0))
    except OSError:
        pass
try:
    os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))
    print("obeyed")
except OSError:
    pass
sum(range(10**6))
print("right")
"""


@pytest.mark.parametrize("without", [(), ("namespaces", "own_user")])
def test_a_program_cannot_stop_who_watches_it(without: tuple[str, ...]) -> None:
    """SIGINT, or a bound of processor time, for the first process of its namespace made the sample invalid: a way out."""
    with CodeJudge(SETTINGS, BUDGET_S, without) as judge:
        assert judged(judge, WATCHED).passed == 1


def test_nothing_reaches_the_network(judge: CodeJudge) -> None:
    """Neither a server on this machine nor a datagram; and the program is told so by an error it can catch."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("127.0.0.1", 0))
        program = f"""
import socket
for action in (
    lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]})).sendall(b"x"),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {datagrams.getsockname()[1]})),
    lambda: socket.socket(socket.AF_UNIX).connect("\\0anything"),
    lambda: socket.getaddrinfo("example.com", 80),
):
    try:
        action()
        print("through")
    except OSError:
        pass
print("right")
"""
        assert judged(judge, program).passed == 1
        for one in (server, datagrams):
            one.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
        with pytest.raises(TimeoutError):
            datagrams.recv(1)
    assert verdict(judge, "import socket\nsocket.create_connection(('127.0.0.1', 80))") is Verdict.FORBIDDEN


def test_files_of_this_machine_cannot_be_read_nor_written_not_even_through_a_link(
    judge: CodeJudge, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("told")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    program = f"""
import os
os.symlink({str(tmp_path)!r}, "out")
for path in ({str(secret)!r}, "out/secret", "/proc/1/root{secret}", "/etc/shadow", "/root/.bashrc"):
    try:
        print("read", open(path).read())
    except OSError:
        pass
for path in ({str(tmp_path / "new")!r}, "out/new"):
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
os.mkdir("closed")
open("closed/file", "w").write("x")
os.chmod("closed", 0)
print("right")
"""
    assert judged(judge, program).passed == 1
    assert sorted(tmp_path.iterdir()) == [secret]


def test_secrets_of_the_parent_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its environment nor what another program was given is found in a program's process."""
    monkeypatch.setenv("MESHLOOM_TEST_TOKEN", "secret-of-the-parent")
    program = f"""
import gc, glob, os
found = [os.environ.get("MESHLOOM_TEST_TOKEN")]
for path in ["/proc/{os.getpid()}/environ", *glob.glob("/proc/[0-9]*/environ")]:
    try:
        found.append("secret-of-the-parent".encode() in open(path, "rb").read() or None)
    except OSError:
        pass
texts = [one for one in gc.get_objects() if isinstance(one, (dict, list)) and "of an " + "earlier" in repr(one)[:10000]]
print("right" if not any(found) and not texts else "found")
"""
    with CodeJudge(SETTINGS, BUDGET_S) as judge:
        judged(judge, "x = 'source of an earlier program'", "answer of an earlier program")
        assert judged(judge, program).passed == 1


def test_programs_do_not_see_each_other_nor_what_others_left(judge: CodeJudge) -> None:
    assert judged(judge, "open('left', 'w').write('x')\nprint('right')").passed == 1
    alone = "not os.listdir('.') and len([p for p in os.listdir('/proc') if p.isdigit()]) == 2"
    program = f"import os\nprint('right' if {alone} else 'seen')"
    assert judged(judge, program).passed == 1


def test_the_same_program_does_the_same_each_time(judge: CodeJudge) -> None:
    """Hashes and unseeded random numbers do not change, so that rewards can be repeated."""
    program = "import random\nprint(hash('text'), random.random())"
    with CodeJudge(SETTINGS, BUDGET_S) as other:
        details = {judged(one, program).finding.detail for one in (judge, other, judge)}
    assert len(details) == 1


def test_the_server_dies_with_its_user_and_takes_all_programs_along() -> None:
    code = f"""
import os
from meshloom.config.code_settings import CodeSettings
from meshloom.rewards.code.judge import CodeJudge
from meshloom.rewards.code.tests import read_tests
judge = CodeJudge(CodeSettings(enabled=True, wall_s=50), 60)
print(judge.sandbox.pid, flush=True)
judge.judge("import os\\nos.execv('/bin/sleep', ['sleep', '{SLEEP}'])", read_tests([{{"stdin": "", "stdout": ""}}], {{}}))
"""
    user = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    server = int(user.stdout.readline())
    until = time.monotonic() + 60
    while not left_over() and time.monotonic() < until:
        time.sleep(0.05)
    assert left_over()
    user.send_signal(signal.SIGKILL)
    user.communicate()
    while (left_over() or psutil.pid_exists(server)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left_over() == []
    assert not psutil.pid_exists(server)


def test_a_server_that_was_killed_is_started_again() -> None:
    with CodeJudge(SETTINGS, BUDGET_S) as judge:
        os.kill(judge.sandbox.pid, signal.SIGKILL)
        assert judged(judge, "print('right')").passed == 1


def test_a_sandbox_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no interpreter here >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(SandboxFault, match="no interpreter here"):
        Sandbox(str(broken))


WALLS = {Isolation.NETWORK, Isolation.FILESYSTEM, Isolation.PROCESSES, Isolation.PROCESS_COUNT, Isolation.USER}


def test_isolation_is_what_attempts_show(judge: CodeJudge) -> None:
    """Without any means all attempts get through, and are found to; with those of this machine those it names do not."""
    nothing = find_isolation(SETTINGS, ("namespaces", "own_user", "landlock", "filter"))
    assert not nothing.achieved
    assert "programs can reach the network" in nothing.text()
    found = find_isolation(SETTINGS)
    assert found.means.namespaces == judge.sandbox.means.namespaces
    if found.means.namespaces:
        assert found.achieved >= WALLS
    for one in found.missing:
        assert one in found.record()["missing"]


def test_where_namespaces_are_not_permitted_the_rest_still_holds() -> None:
    """Rules on files, the filter of calls, and a look at what programs use; what is not held is named."""
    without = ("namespaces", "own_user")
    found = find_isolation(SETTINGS, without)
    if not (found.means.filter and found.means.landlock):
        pytest.skip("this kernel has neither")
    assert found.achieved == {Isolation.NETWORK, Isolation.FILESYSTEM, Isolation.SYSTEM_CALLS}
    with CodeJudge(SETTINGS, BUDGET_S, without) as judge:
        for name in (
            "a bomb of forks",
            "ten gigabytes",
            "many files that fill the disk",
            "killing its parent",
            "killing everyone",
        ):
            assert judged(judge, MISDEEDS[name][0].replace("SLEEP", SLEEP)).passed == 0, name
            assert left_over() == []
        assert judged(judge, DAEMON.replace("SLEEP", SLEEP)).passed == 1
        assert left_over() == []
        assert judged(judge, "print('right')").passed == 1


def test_a_user_of_its_own_holds_where_namespaces_are_not_permitted() -> None:
    """As in a container without rights over namespaces: the kernel then counts and kills by user."""
    python = "/usr/bin/python3"
    asked = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
    )
    if os.getuid() != 0 or asked.stdout.strip() != "True":
        pytest.skip("needs root, and an interpreter that all users can read")
    settings = SETTINGS.model_copy(update={"python": python})
    achieved = find_isolation(settings, ("namespaces",)).achieved
    assert achieved >= {Isolation.NETWORK, Isolation.PROCESSES, Isolation.PROCESS_COUNT, Isolation.USER}
    with CodeJudge(settings, BUDGET_S, ("namespaces",)) as judge:
        for name in ("a bomb of forks", "many files that fill the disk", "killing its parent", "killing everyone"):
            assert judged(judge, MISDEEDS[name][0].replace("SLEEP", SLEEP)).passed == 0, name
            assert left_over() == []
        assert judged(judge, DAEMON.replace("SLEEP", SLEEP)).passed == 1
        assert left_over() == []
        tests = read_tests(
            ["assert f(1) == 2", "assert f(2) == 2", "import time\ntime.sleep(0.2)\nassert f(2) == 2"], {}
        )
        for _ in range(3):  # the checker's end killed the program, and the program's the checker
            found = judge.judge("def f(x): return x", tests)
            assert (found.passed, found.finding.verdict) == (2, Verdict.WRONG_ANSWER), found.finding
        ended = judge.judge("import os\nif os.fork(): os._exit(0)", tests).finding
        assert ended.verdict is Verdict.WRONG_ANSWER, ended
    assert not list(Path(tempfile.gettempdir()).glob(f"meshloom-code-{judge.sandbox.pid}-*"))


MIXED = {
    "print('right')": 1.0,
    "print('wrong')": 0.0,
    "1/0": 0.0,
    "x = bytearray(10**10)": 0.0,
    "import os\nfor _ in range(100):\n os.write(1, b'x' * 10**6)": 0.0,
    "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)": 0.0,
    "while True: pass": 0.0,
    BOMB.replace("SLEEP", SLEEP): 0.0,
    DAEMON.replace("SLEEP", SLEEP): 1.0,
    "open('x', 'wb').write(b'a' * 10**8)": 0.0,
}


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_many_programs_side_by_side_cost_themselves_only(count: int) -> None:
    """Right, wrong and hostile ones, in a pool of four workers: each gets its reward and its reason; nothing is left."""
    before = {process.pid for process in psutil.process_iter()}
    code = SETTINGS.model_copy(update={"cpu_s": 0.5, "wall_s": 60.0})
    programs = [list(MIXED)[i % len(MIXED)] for i in range(count)]
    tests = [{"stdin": "", "stdout": "right"}]
    requests = [
        RewardRequest(
            response=f"```python\n{one}\n```", answer=tests, data_source="d", extra={}, prompt="", finish="stop"
        )
        for one in programs
    ]
    with RewardPool(RewardSettings(function="code", code=code, workers=4, deadline_s=300)) as pool:
        rewards = pool.score(requests)
    assert [reward.value for reward in rewards] == [MIXED[one] for one in programs]
    assert all(reward.detail for reward in rewards)
    assert left_over() == []
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before
