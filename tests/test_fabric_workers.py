"""Calls, results and failures of worker processes on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from meshloom.config.errors import RunFault, UserError
from meshloom.fabric.dispatch import GroupLayout
from meshloom.fabric.faults import Cause, WorkerFault
from meshloom.fabric.groups import WorkerGroup
from meshloom.fabric.local import LocalSite
from meshloom.fabric.seats import Seat
from meshloom.fabric.site import Peer
from meshloom.fabric.stacks import python_stack, spied
from meshloom.fabric.watch import Patience, Watch
from meshloom.fabric.workers import Workers
from meshloom.loop import remote
from meshloom.samples.ragged import Samples
from tests.fabric_hosts import Host

HOST = "tests.fabric_hosts:Host"
ENDS_S = 20.0
"""Seconds in which a failure must have ended everything."""


@contextmanager
def workers_of(logs: Path, number: int = 2, **options: Any) -> Iterator[Workers]:
    with LocalSite(["cpu"] * number) as site, Workers(HOST, {"greeting": "hi"}, site=site, logs=logs, **options) as it:
        yield it


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def pids_of(workers: Workers) -> list[int]:
    return [int(peer.hello["pid"]) for _, peer in sorted(workers.peers.items())]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with workers_of(tmp_path_factory.mktemp("two")) as workers:
        yield workers


def test_every_rank_answers_from_its_own_seat(two: Workers) -> None:
    found = two.call("where", phase="test", deadline_s=60)
    assert [it["seat"] for it in found] == [Seat(0, 2, "node1", 0, 0, "cpu"), Seat(1, 2, "node1", 0, 1, "cpu")]
    assert [it["seat"] for it in found] == list(two.seats)
    assert len({it["pid"] for it in found} | {os.getpid()}) == 3
    assert {it["greeting"] for it in found} == {"hi"}


def test_ranks_are_in_one_process_group(two: Workers) -> None:
    found = two.call("group", phase="test", deadline_s=60)
    assert found == [{"backend": "gloo", "size": 2, "threads": found[0]["threads"]}] * 2
    assert two.call("summed", [{"value": 1.0}, {"value": 2.5}], phase="test", deadline_s=60) == [3.5, 3.5]


def test_arguments_differ_by_rank_and_some_ranks_are_called_alone(two: Workers) -> None:
    values = [{"value": "for 1"}, {"value": "for 0"}]
    assert two.call("same", values, ranks=[1, 0], phase="test", deadline_s=60) == ["for 1", "for 0"]
    assert two.call("same", {"value": 7}, ranks=[1], phase="test", deadline_s=60) == [7]
    assert two.call("same", {"value": 7}, ranks=[], phase="test", deadline_s=60) == []
    with pytest.raises(ValueError, match="1 ranks, but 2"):
        two.call("same", [{"value": 1}], phase="test", deadline_s=60)
    with pytest.raises(ValueError, match="different ranks"):
        two.call("same", {"value": 1}, ranks=[2], phase="test", deadline_s=60)


def test_what_cannot_travel_is_refused_before_anything_is_sent(two: Workers) -> None:
    with pytest.raises(TypeError, match=r"value\['value'\]\[1\] is a builtins:object"):
        two.call("same", {"value": [1, object()]}, phase="test", deadline_s=60)
    assert two.call("same", {"value": 1}, phase="test", deadline_s=60) == [1, 1]


def test_samples_and_tensors_travel_whole(two: Workers) -> None:
    ids = torch.arange(5)
    samples = Samples(
        torch.tensor([2, 3]), {"ids": ids}, {"reward": torch.tensor([0.5, float("nan")])}, {"id": ["a", 2]}
    )
    large = torch.randn(3_000_000, dtype=torch.float64).to(torch.bfloat16)
    for found in two.call("same", {"value": (samples, large, [ids, ids])}, phase="test", deadline_s=60):
        back, tensor, pair = found
        assert torch.equal(back.lengths, samples.lengths) and torch.equal(back["ids"], ids)
        assert back.meta == samples.meta and back["reward"].isnan().tolist() == [False, True]
        assert tensor.dtype is torch.bfloat16 and torch.equal(tensor, large)
        assert torch.equal(pair[0], ids) and pair[0].data_ptr() == pair[1].data_ptr()


def test_a_verb_emits_before_it_returns(two: Workers) -> None:
    call = two.submit("count", {"times": 3}, phase="test", deadline_s=60)
    events = list(call.events())
    assert call.done and call.result() == ["done", "done"]
    for rank in (0, 1):
        assert [value for from_rank, value in events if from_rank == rank] == [0, 1, 2]


def test_calls_queue_in_order(two: Workers) -> None:
    calls = [two.submit("same", {"value": number}, phase="test", deadline_s=60) for number in range(50)]
    assert [call.result() for call in calls] == [[number, number] for number in range(50)]


def test_a_group_dispatches_and_collects_as_its_verb_declares(two: Workers) -> None:
    replicas = WorkerGroup(two, GroupLayout.data_parallel([0, 1]), Host)
    assert replicas.call("total", {"numbers": [1, 2, 4], "plus": 10}, phase="test", deadline_s=60) == [13, 14]
    one_replica = WorkerGroup(two, GroupLayout((0, 1), (0, 0)), Host)
    assert one_replica.call("total", {"numbers": [1, 2, 4]}, phase="test", deadline_s=60) == [7]
    with pytest.raises(ValueError, match="no verb 'hidden'"):
        replicas.call("hidden", phase="test", deadline_s=60)


def test_a_disk_that_does_not_answer_ends_the_wait_for_a_checkpoint(
    two: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the ranks that write had a deadline, and the looks had no end."""
    monkeypatch.setattr(remote, "_SAVE_DEADLINE_S", 3.0)
    group = WorkerGroup(two, GroupLayout.data_parallel([0, 1]), Host)
    with pytest.raises(RunFault, match="not written within 3 s"):
        remote.RemoteSnapshot(group, {}, None, "much").write(tmp_path)


def test_a_rank_may_hear_where_the_store_is_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It threw that away, and all waited for it for ever, if rank 0 was quick and the controller slow."""
    send, joined = Peer.send, threading.Event()

    def send_begin_last(peer: Peer, message: dict[str, Any], blobs: Sequence[Any] = ()) -> None:
        if message["kind"] == "begin" and peer.hello["rank"] == 1:
            assert joined.wait(120)
        send(peer, message, blobs)
        if message["kind"] == "join":
            joined.set()

    monkeypatch.setattr(Peer, "send", send_begin_last)
    with workers_of(tmp_path, patience=Patience(start_s=200.0)) as workers:
        assert workers.call("summed", {"value": 1.0}, phase="test", deadline_s=60) == [2.0, 2.0]


def test_leaving_ends_every_process(tmp_path: Path) -> None:
    before = descendants()
    with workers_of(tmp_path, collectives=False) as workers:
        assert len(descendants()) == len(before) + 4  # an attendant, a nursery, two workers
        log = tmp_path / "rank-1.log"
        workers.call("where", phase="test", deadline_s=60)
        assert log.read_text() == "host of rank 1 is made\n"
    assert log.read_text() == "host of rank 1 is made\nhost of rank 1 is closed\n"
    assert descendants() == before
    with pytest.raises(RuntimeError, match="closed"):
        workers.call("where", phase="test", deadline_s=60)


def test_a_host_whose_module_starts_threads_is_not_forked(tmp_path: Path) -> None:
    with LocalSite(["cpu"]) as site, Workers("tests.fabric_threads:Host", site=site, logs=tmp_path) as workers:
        assert workers.call("summed", {"value": 1.5}, phase="test", deadline_s=60) == [1.5]
        (pid,) = pids_of(workers)
        assert "from meshloom.fabric.worker import main" in " ".join(psutil.Process(pid).cmdline())


def test_a_list_of_processes_shows_which_worker_is_which(two: Workers) -> None:
    told = [" ".join(psutil.Process(pid).cmdline()) for pid in pids_of(two)]
    assert [text.partition("meshloom.fabric.worker ")[2].strip() for text in told] == [
        "rank 0 on node1, cpu",
        "rank 1 on node1, cpu",
    ]


def fault_of(workers: Workers, verb: str, arguments: dict[str, Any], deadline_s: float = 120.0) -> WorkerFault:
    """The error that a call ends with, after which no worker is left."""
    began = time.monotonic()
    pids = pids_of(workers)
    with pytest.raises(WorkerFault) as raised:
        workers.call(verb, arguments, phase="update", deadline_s=deadline_s)
    assert time.monotonic() - began < ENDS_S + (deadline_s if raised.value.cause is Cause.LATE else 0)
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(WorkerFault) as again:
        workers.call("where", phase="update", deadline_s=deadline_s)
    assert again.value is raised.value
    return raised.value


def test_workers_leave_sigterm_to_the_controller_and_what_they_start_does_not(tmp_path: Path) -> None:
    """Who tells every process of a run to end, as service managers do, killed the workers of a run that was about to save."""
    with workers_of(tmp_path, number=1, collectives=False) as workers:
        worker = psutil.Process(pids_of(workers)[0])
        for process in (worker, worker.parent()):
            process.terminate()
        assert workers.call("ends_of_children", phase="test", deadline_s=60) == [[-signal.SIGTERM] * 2]
        began = time.monotonic()
    assert time.monotonic() - began < ENDS_S and not psutil.pid_exists(worker.pid)


def test_an_error_of_one_rank_is_named_and_not_the_collective_that_failed_for_it(tmp_path: Path) -> None:
    with workers_of(tmp_path, roles={1: "actor, rollout"}) as workers:
        fault = fault_of(workers, "fail", {"rank": 1, "user": False, "wait": True})
    assert (fault.rank, fault.cause, fault.phase, fault.verb) == (1, Cause.RAISED, "update", "fail")
    assert fault.exit_code == 3 and isinstance(fault, RunFault)
    for text in ("rank 1", "node1", "actor, rollout", "lost key", "in fail", "rank-1.log", "host of rank 1 is made"):
        assert text in str(fault)
    assert "fabric/worker.py" not in str(fault)


def test_a_killed_rank_is_named_and_not_those_that_waited_for_it(tmp_path: Path) -> None:
    with workers_of(tmp_path) as workers:
        fault = fault_of(workers, "kill", {"rank": 1})
    assert (fault.rank, fault.cause, fault.verb) == (1, Cause.DIED, "kill")
    assert "was killed by SIGKILL" in str(fault) and "host of rank 1 is made" in str(fault)


def test_of_late_ranks_the_one_outside_of_the_collective_is_named_with_its_stack(tmp_path: Path) -> None:
    with workers_of(tmp_path) as workers:
        workers.call("summed", {"value": 1.0}, phase="test", deadline_s=60)
        fault = fault_of(workers, "hang", {"rank": 1}, deadline_s=2.0)
    assert (fault.rank, fault.cause) == (1, Cause.LATE)
    assert fault.look.stack[0].startswith("sleep (tests/fabric_hosts.py")
    assert "rank 0 waits in all_reduce" in str(fault) and "deadline of 2 s" in str(fault)


def test_who_waits_is_told_if_the_watch_itself_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would notice a deadline any more."""

    def fail(watch: Watch, now: float) -> None:
        raise OSError("no more descriptors")

    with workers_of(tmp_path, number=1, collectives=False) as workers:
        ended = threading.Event()
        workers.on_failure(ended.set)
        call = workers.submit("sleep", phase="update", deadline_s=600)
        next(call.events())
        monkeypatch.setattr(Watch, "_look_for_deadlines", fail)
        with pytest.raises(RunFault, match=r"(?s)not watched.*no more descriptors"):
            call.result()
        assert ended.wait(60)
        pids = pids_of(workers)
    assert not any(map(psutil.pid_exists, pids))


def test_a_user_error_comes_back_as_it_was_raised(tmp_path: Path) -> None:
    with workers_of(tmp_path, collectives=False) as workers, pytest.raises(UserError) as raised:
        workers.call("fail", {"rank": 1, "user": True, "wait": False}, phase="start", deadline_s=60)
    error = raised.value
    assert type(error) is UserError and error.exit_code == 2
    assert (error.what, error.where, error.why, error.fix) == (
        "no such file",
        "data.files",
        "it is gone",
        "name another",
    )


def test_a_host_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    before = descendants()
    with (
        LocalSite(["cpu"]) as site,
        pytest.raises(WorkerFault, match=r"(?s)No module named 'no_such_module'.*phase start"),
        Workers("no_such_module:Host", site=site, logs=tmp_path, collectives=False),
    ):
        pass
    assert descendants() == before


def test_an_error_is_told_though_the_log_s_disk_is_full(tmp_path: Path) -> None:
    """The worker died of the line it could not write: what had gone wrong, most likely for the same disk, was lost."""
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    with (
        pytest.raises(WorkerFault, match=r"(?s)raised OSError: .*No space left.*in __init__"),
        workers_of(tmp_path, number=1, collectives=False),  # its host prints a line
    ):
        pass


def test_workers_that_cannot_be_started_say_why(tmp_path: Path) -> None:
    """Their attendant ended, and the controller knew no more than that its node was lost."""
    (tmp_path / "file").touch()
    before = descendants()
    with (
        LocalSite(["cpu"]) as site,
        pytest.raises(WorkerFault, match=r"rank 0 .* could not be started: .*Not a directory"),
        Workers(HOST, site=site, logs=tmp_path / "file" / "logs", collectives=False),
    ):
        pass
    assert descendants() == before


def test_a_rank_killed_while_idle_ends_the_next_call(tmp_path: Path) -> None:
    with workers_of(tmp_path, collectives=False) as workers:
        workers.call("where", phase="generate", deadline_s=60)
        os.kill(pids_of(workers)[0], signal.SIGKILL)
        with pytest.raises(WorkerFault, match="rank 0 .* was killed by SIGKILL") as raised:
            while True:
                workers.call("same", {"value": 1}, ranks=[1], phase="update", deadline_s=60)
    assert raised.value.phase == "generate" and raised.value.verb == ""


def test_a_rank_killed_while_another_reports_is_named(tmp_path: Path) -> None:
    with workers_of(tmp_path, collectives=False) as workers:
        call = workers.submit("report", {"size": 400_000_000}, ranks=[0], phase="generate", deadline_s=60)
        os.kill(pids_of(workers)[1], signal.SIGKILL)
        with pytest.raises(WorkerFault, match="rank 1 .* was killed by SIGKILL"):
            call.result()
            while True:
                workers.call("same", {"value": 1}, ranks=[0], phase="generate", deadline_s=60)


def test_a_rank_held_by_a_signal_is_named(tmp_path: Path) -> None:
    patience = Patience(lost_s=2.0)
    with workers_of(tmp_path, collectives=False, patience=patience) as workers:
        call = workers.submit("sleep", phase="generate", deadline_s=600)
        events = call.events()
        assert {next(events)[0], next(events)[0]} == {0, 1}
        time.sleep(0.5)  # until it is past sending what was just received
        os.kill(pids_of(workers)[1], signal.SIGSTOP)
        with pytest.raises(WorkerFault, match="rank 1 .* does not answer") as raised:
            call.result()
    assert raised.value.cause is Cause.STOPPED and "fabric_hosts.py" in raised.value.look.stack[0]


def test_the_main_thread_is_found_in_what_py_spy_prints() -> None:
    """Named, or, in a process that has made no threads, by its number."""
    other = 'Thread 8 (idle): "beat"\n    Thread.run (threading.py:982)\n'
    head = "Process 7: python\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
    frames = "    Host.sleep (tests/fabric_hosts.py:76)\n    _Worker._call (meshloom/fabric/worker.py:155)\n"
    for name in (': "MainThread"', ""):
        for text in (f"Thread 7 (idle){name}\n{frames}{other}", f"{other}Thread 7 (active){name}\n{frames}"):
            assert spied(head + text, 7) == ["Host.sleep (tests/fabric_hosts.py:76)"]
    assert spied(head + other, 7) == spied("", 7) == []


@pytest.mark.slow
def test_py_spy_tells_where_a_held_rank_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the stack from outside: a process that is held stays so."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "spy"), "py-spy"]
    subprocess.run(install, check=True, timeout=300)
    monkeypatch.setenv("PATH", f"{tmp_path / 'spy' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with workers_of(tmp_path, collectives=False, patience=Patience(lost_s=600.0)) as workers:
        call = workers.submit("sleep", phase="generate", deadline_s=600)
        events = call.events()
        assert {next(events)[0], next(events)[0]} == {0, 1}
        held = psutil.Process(pids_of(workers)[1])
        held.suspend()
        with (tmp_path / "silent").open("wb") as silent:
            assert "fabric_hosts.py" in python_stack(held.pid, silent.fileno())[0]
        assert held.status() == psutil.STATUS_STOPPED
        held.resume()
        os.kill(held.pid, signal.SIGKILL)
        with pytest.raises(WorkerFault, match="rank 1"):
            call.result()


def test_a_held_attendant_is_a_lost_node(tmp_path: Path) -> None:
    with workers_of(tmp_path, collectives=False, patience=Patience(lost_s=2.0)) as workers:
        pids = pids_of(workers)
        call = workers.submit("sleep", phase="generate", deadline_s=600)
        attendant = psutil.Process(pids[0]).parents()[1]
        began = time.monotonic()
        attendant.suspend()
        with pytest.raises(WorkerFault, match="rank 0 .* was lost with its node"):
            call.result()
        assert time.monotonic() - began < ENDS_S
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    assert alive == []


CONTROLLER = """
import sys, time
from pathlib import Path
from meshloom.fabric.local import LocalSite
from meshloom.fabric.workers import Workers
logs = Path(sys.argv[1])
with LocalSite(["cpu"] * 2) as site, Workers("tests.fabric_hosts:Host", site=site, logs=logs, collectives=False) as workers:
    call = workers.submit("sleep", phase="generate", deadline_s=600)
    next(call.events())
    print("ready", flush=True)
    call.result()
"""


@pytest.mark.parametrize("who", ["controller", "attendant", "nursery"])
def test_workers_do_not_outlive(who: str, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path)],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None and controller.stdout.readline() == "ready\n"
    processes = psutil.Process(controller.pid).children(recursive=True)
    assert len(processes) == 4
    victims = {"controller": psutil.Process(controller.pid), "attendant": processes[0], "nursery": processes[1]}
    victims[who].kill()
    _, alive = psutil.wait_procs(processes, timeout=ENDS_S)
    assert alive == []
    _, errors = controller.communicate(timeout=ENDS_S)
    told = {"attendant": "was lost with its node", "nursery": "rank 0 (on node1", "controller": ""}
    assert told[who] in errors
