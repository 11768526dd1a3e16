"""A rank is killed at any moment: it is named, everything ends soon, and nothing is left. Opt-in: some minutes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from meshloom.config.errors import RunFault
from meshloom.fabric.faults import WorkerFault
from meshloom.fabric.local import LocalSite
from meshloom.fabric.watch import Patience
from meshloom.fabric.workers import Workers

ROOT = Path(__file__).parent.parent
HOST = "tests.fabric_hosts:Host"
ENDS_S = 20.0
RANKS = 2
MEGABYTE = bytes(2**20)
pytestmark = pytest.mark.slow

Strike = Callable[[], None]


@contextmanager
def struck(strike: Strike, after_s: float) -> Iterator[None]:
    """Strike from another thread, so many seconds from here."""
    timer = threading.Timer(after_s, strike)
    timer.start()
    yield
    timer.join()


def in_a_verb(workers: Workers, strike: Strike) -> None:
    call = workers.submit("sleep", phase="update", deadline_s=600)
    events = call.events()
    assert {next(events)[0] for _ in range(RANKS)} == set(range(RANKS))
    strike()
    call.result()


def idle(workers: Workers, strike: Strike) -> None:
    workers.call("where", phase="update", deadline_s=600)
    strike()
    workers.call("sleep", phase="update", deadline_s=600)


def in_a_collective(workers: Workers, strike: Strike) -> None:
    workers.call("summed", {"value": 1.0}, phase="update", deadline_s=600)
    with struck(strike, 0.3):
        workers.call("sum_on", phase="update", deadline_s=600)


def waited_for_in_a_collective(workers: Workers, strike: Strike) -> None:
    with struck(strike, 0.3):
        workers.call("wait_for_none", phase="update", deadline_s=600)


def emitting(workers: Workers, strike: Strike) -> None:
    call = workers.submit("count", {"times": 10**9}, phase="generate", deadline_s=600)
    with struck(strike, 0.3):
        for _ in call.events():
            pass


def reporting(workers: Workers, strike: Strike) -> None:
    with struck(strike, 0.2):
        while True:
            workers.call("report", {"size": 200 * 2**20}, phase="generate", deadline_s=600)


def being_told(workers: Workers, strike: Strike) -> None:
    with struck(strike, 0.2):
        while True:
            workers.call("same", {"value": [MEGABYTE] * 100}, phase="generate", deadline_s=600)


def between_calls(workers: Workers, strike: Strike) -> None:
    with struck(strike, 0.3):
        while True:
            workers.call("same", {"value": 1}, phase="generate", deadline_s=600)


STATES = [
    in_a_verb,
    idle,
    in_a_collective,
    waited_for_in_a_collective,
    emitting,
    reporting,
    being_told,
    between_calls,
]


def pids_there() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("state", STATES)
def test_a_killed_rank_is_named(state: Callable[[Workers, Strike], None], victim: int, tmp_path: Path) -> None:
    before = pids_there()
    struck_at: list[float] = []
    with LocalSite(["cpu"] * RANKS) as site, Workers(HOST, site=site, logs=tmp_path) as workers:
        pid = int(workers.peers[victim].hello["pid"])

        def strike() -> None:
            struck_at.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        with pytest.raises(WorkerFault, match=f"rank {victim} .* was killed by SIGKILL"):
            state(workers, strike)
        assert time.monotonic() - struck_at[0] < ENDS_S
    assert pids_there() == before


def test_whole_runs_end_and_go_on(tmp_path: Path) -> None:
    """Every moment is drawn once by ``--repeats 13``; here, some."""
    words = ["--repeats", "4", "--seed", "2", "--dir", str(tmp_path / "kills")]
    command = [sys.executable, "-m", "bench.kills", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0 and "4 of 4 clean" in done.stdout, done.stdout + done.stderr


def workers_of(attendant: psutil.Process) -> list[psutil.Process]:
    return [child for nursery in attendant.children() for child in nursery.children()]


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5, 2.5])
def test_a_rank_killed_while_it_starts_is_named(after_s: float, victim: int, tmp_path: Path) -> None:
    before = pids_there()
    with LocalSite(["cpu"] * RANKS) as site:
        attendant = psutil.Process(int(site.nodes[0].attendant.hello["pid"]))
        struck_at: list[float] = []

        def strike() -> None:
            while len(children := workers_of(attendant)) < RANKS:
                time.sleep(0.01)
            time.sleep(after_s)
            struck_at.append(time.monotonic())
            min(children, key=lambda child: child.pid if victim == 0 else -child.pid).kill()

        killer = threading.Thread(target=strike)
        killer.start()
        with (
            pytest.raises(RunFault, match=f"rank {victim} .* was killed by SIGKILL"),
            Workers(HOST, site=site, logs=tmp_path) as workers,
        ):
            workers.call("sleep", phase="generate", deadline_s=600)
        killer.join()
        assert time.monotonic() - struck_at[0] < ENDS_S
    assert pids_there() == before


@pytest.mark.parametrize("state", [in_a_verb, in_a_collective, waited_for_in_a_collective, emitting, between_calls])
def test_a_held_rank_is_named(state: Callable[[Workers, Strike], None], tmp_path: Path) -> None:
    before = pids_there()
    patience = Patience(lost_s=3.0)
    with LocalSite(["cpu"] * RANKS) as site, Workers(HOST, site=site, logs=tmp_path, patience=patience) as workers:
        pid = int(workers.peers[1].hello["pid"])
        with pytest.raises(WorkerFault, match=r"rank 1 .* held by a signal"):
            state(workers, lambda: os.kill(pid, signal.SIGSTOP))
    assert pids_there() == before
