"""Ranks of whole runs are killed at chosen moments: ``python -m bench.kills --repeats 30 --seed 0 --dir runs/kills``.

Owns: drawing what is struck when, and judging how it ended. Refuses to know: how failures are noticed. Always holds: a moment
is the call that the controller has just made, after which the run's own process strikes; whatever a run started and left behind
becomes a child of this process, which finds it.

Each repeat draws a layout, a moment and a rank; the run trains a small model with a reference, a critic and a reward model on
two or three devices. It is clean if it ends within the limit with exit code 3, the killed rank named first, no process, file or
open port left, and goes on on fewer devices to its end. The repeats and their seconds are printed as a table; the exit code is
the number of repeats that were not clean.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from meshloom.config.settings import TrainSettings
from meshloom.fabric.processes import adopt_orphans
from meshloom.fabric.workers import Workers
from meshloom.observe.run_folder import SETTINGS_FILE, read_status
from tests.lesson_runs import _run, command, finish, go_on, lives, train_settings, whole_checkpoints, write_inputs
from tests.lesson_runs import write_reward_model as write_judge


@dataclass(frozen=True)
class Layout:
    """Where roles are, and what fewer devices a run may go on with.

    Args:
        devices: that there are.
        settings: that say where roles are.
        fewer: settings of fewer devices, one of which is drawn.
    """

    devices: int
    settings: tuple[str, ...]
    fewer: tuple[tuple[str, ...], ...]


TWO = "cluster.devices_per_node=2"
TRAINER_AND_ENGINE = ("placement.actor=[0]", "placement.reference=[0]", "placement.rollout=[1]")
LAG = "algorithm.max_lag_versions=2"
LAYOUTS = {
    "apart, with a lag": Layout(
        3,
        (*TRAINER_AND_ENGINE, "placement.critic=[2]", "placement.reward=[2]", LAG),
        ((TWO, *TRAINER_AND_ENGINE, "placement.critic=[0]", "placement.reward=[0]", LAG),),
    ),
    "two that share all": Layout(2, (), ((),)),
    "cut over two, critic beside": Layout(
        3,
        ("placement.actor=[0,1]", "placement.reference=[0,1]", "placement.rollout=[0,1]", "parallel.actor.tensor=2")
        + ("parallel.rollout.tensor=2", "placement.critic=[2]", "placement.reward=[2]"),
        ((), (TWO,)),
    ),
}
MOMENTS = {
    "start": ("", ""),
    "build": ("build", "start"),
    "generate": ("generate", "generate"),
    "score": ("score", "score"),
    "log-prob": ("forward", "log-prob"),
    "values": ("forward", "values"),
    "update": ("forward_backward", "update"),
    "optimizer": ("optim_step", "update"),
    "critic": ("forward_backward", "critic"),
    "sync": ("move_weights", "sync"),
    "hold": ("hold_snapshot", "save"),
    "save": ("write_snapshot", "save"),
    "report": ("memory", "report"),
}
"""Verb and phase of the call at which a rank is struck; at the start it is struck before there is any."""
LONGEST_DELAY_S, LONGEST_START_S = 0.03, 1.0
HUNG_FACTOR, MOMENT_S, RESUME_S = 3, 300.0, 300.0


@dataclass(frozen=True)
class Blow:
    """Which rank is struck when.

    Args:
        layout, moment: by name.
        rank: that is killed.
        number: of the call at which it is, counted from 1.
        delay_s: seconds after the call was made.
        seed: of the run.
        fewer: settings of the devices that the run goes on with.
    """

    layout: str
    moment: str
    rank: int
    number: int
    delay_s: float
    seed: int
    fewer: tuple[str, ...]

    @classmethod
    def drawn(cls, draw: random.Random, moment: str) -> "Blow":
        """One of many."""
        name = draw.choice(list(LAYOUTS))
        layout = LAYOUTS[name]
        if moment == "start":
            number, delay_s = 1, draw.uniform(0, LONGEST_START_S)
        else:
            number, delay_s = 1 if moment == "build" else draw.randint(1, 4), draw.uniform(0, LONGEST_DELAY_S)
        rank, seed = draw.randrange(layout.devices), draw.randrange(99)
        return cls(name, moment, rank, number, delay_s, seed, draw.choice(layout.fewer))

    @property
    def settings(self) -> tuple[str, ...]:
        """Of the devices and the roles on them."""
        layout = LAYOUTS[self.layout]
        return (f"cluster.devices_per_node={layout.devices}", *layout.settings)


class Striker:
    """In the run's process: sees the calls that are made, and kills the rank at the one that is meant.

    Args:
        blow: what is struck when.
        told: file that says when it was, and on which ports the run listens.
    """

    def __init__(self, blow: Blow, told: Path) -> None:
        self._blow, self._told, self._seen = blow, told, 0

    def install(self) -> None:
        """Look on at every call of this process."""
        submit, enter = Workers.submit, Workers.__enter__

        def submit_seen(workers: Workers, verb: str, *args: Any, phase: str, **more: Any) -> Any:
            call = submit(workers, verb, *args, phase=phase, **more)
            self._see(workers, verb, phase)
            return call

        def enter_seen(workers: Workers) -> Workers:
            if self._blow.moment == "start":
                threading.Thread(target=self._strike_as_it_starts, daemon=True).start()
            return enter(workers)

        Workers.submit, Workers.__enter__ = submit_seen, enter_seen  # type: ignore[method-assign]

    def _see(self, workers: Workers, verb: str, phase: str) -> None:
        if (verb, phase) == MOMENTS[self._blow.moment]:
            self._seen += 1
            if self._seen == self._blow.number:
                pid = int(workers.peers[self._blow.rank].hello["pid"])
                threading.Timer(self._blow.delay_s, self._strike, (pid,)).start()

    def _strike_as_it_starts(self) -> None:
        """Workers are forked in the order of their ranks."""
        while len(pids := sorted(child.pid for child in forked_workers())) <= self._blow.rank:
            time.sleep(0.001)
        time.sleep(self._blow.delay_s)
        self._strike(pids[self._blow.rank])

    def _strike(self, pid: int) -> None:
        ports = [one.laddr.port for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
        written = self._told.with_suffix(".new")
        written.write_text(json.dumps({"at": time.time(), "ports": ports}))
        written.rename(self._told)
        os.kill(pid, signal.SIGKILL)


def forked_workers() -> list[psutil.Process]:
    """The workers of this process's run."""
    attendants = [child for child in psutil.Process().children() if "meshloom.fabric.attendant" in child.cmdline()[2]]
    nurseries = [nursery for attendant in attendants for nursery in attendant.children()]
    return [worker for nursery in nurseries for worker in nursery.children()]


def struck_run(blow: Blow, args: Sequence[str], output: str, told: str, scratch: str) -> None:
    """A run's process: its scratch files are in a folder of their own."""
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    if told:
        Striker(blow, Path(told)).install()
    _run(list(args), output)


@dataclass
class Outcome:
    """How a repeat went.

    Args:
        blow: what was struck.
        seconds: from the kill to the end of the run's process; none if nothing was struck, or it did not end.
        faults: what was not as it should be.
        said: the first line of the error.
        resumed: from which step to which, on what.
    """

    blow: Blow
    seconds: float | None
    faults: list[str]
    said: str = ""
    resumed: str = ""


def one_repeat(blow: Blow, inputs: Path, folder: Path, limit_s: float) -> Outcome:
    """A run that is struck, what it leaves, and the run that goes on."""
    folder.mkdir(parents=True)
    run_dir, output, told, scratch = folder / "run", folder / "out", folder / "told", folder / "scratch"
    scratch.mkdir()
    there, shared = set(descendants()), set(Path("/dev/shm").iterdir())
    settings = settings_of(inputs, run_dir, blow, *blow.settings, "batch.steps=400")
    process = started(blow, command(settings), output, told, scratch)
    until = time.monotonic() + MOMENT_S
    while not told.exists() and process.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    process.join(HUNG_FACTOR * limit_s if told.exists() else 0)
    outcome = Outcome(blow, None, [])
    if process.exitcode is None:
        outcome.faults.append("it hangs" if told.exists() else "the moment never came")
        process.kill()
        process.join()
    elif not told.exists():
        outcome.faults.append("it ended by itself")
    else:
        outcome.seconds = time.time() - json.loads(told.read_text())["at"]
        judge_end(outcome, process.exitcode, output.read_text(), limit_s)
        outcome.faults += left_behind(there, shared, scratch, json.loads(told.read_text())["ports"])
    if (run_dir / SETTINGS_FILE).exists() and read_status(run_dir)["state"] != "failed":
        outcome.faults.append(f"state {read_status(run_dir)['state']}")
    outcome.resumed = resume(outcome, inputs, run_dir, folder)
    return outcome


def judge_end(outcome: Outcome, code: int, text: str, limit_s: float) -> None:
    """Exit code, name and seconds of an end."""
    found = re.search(r"^error: (.*)$", text, re.M)
    outcome.said = found[1] if found else text.strip()[-200:]
    if code != 3:
        outcome.faults.append(f"exit code {code}")
    if not re.match(rf"rank {outcome.blow.rank} \(.*was killed by SIGKILL", outcome.said):
        outcome.faults.append("another cause")
    if (outcome.seconds or 0.0) > limit_s:
        outcome.faults.append("late")


def left_behind(there: set[psutil.Process], shared: set[Path], scratch: Path, ports: Sequence[int]) -> list[str]:
    """What a run that has ended left: processes, shared memory, scratch files, open ports."""
    alive = [one for one in descendants() if one not in there and lives(one)]
    faults = [f"process {one.pid} {called(one)}" for one in alive]
    faults += [str(file) for file in set(Path("/dev/shm").iterdir()) - shared if not is_in_use(file)]
    faults += [f"scratch {file.name}" for file in scratch.iterdir()]
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                faults.append(f"port {port} is open")
    return faults


def called(process: psutil.Process) -> str:
    """The beginning of a process's command, if it has not just ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:60]
    return "that has just ended"


def is_in_use(file: Path) -> bool:
    """Whether a process has a file in its memory: another program's, since all of the run's have ended."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(file) in maps.read_text():
                return True
    return not file.exists()


def descendants() -> list[psutil.Process]:
    """Everything that descends from this process; orphans of it are its children."""
    return psutil.Process().children(recursive=True)


def resume(outcome: Outcome, inputs: Path, run_dir: Path, folder: Path) -> str:
    """Let the run go on on fewer devices, two steps beyond its newest checkpoint; what it did."""
    saved = max(whole_checkpoints(run_dir), default=0)
    blow, output, scratch = outcome.blow, folder / "resumed", folder / "scratch2"
    scratch.mkdir()
    settings = settings_of(inputs, run_dir, blow, *blow.fewer, f"batch.steps={saved + 2}")
    process = started(blow, go_on(settings), output, None, scratch)
    process.join(RESUME_S)
    if process.exitcode != 0:
        process.kill()
        process.join()
        outcome.faults.append(f"did not go on: exit code {process.exitcode}")
    elif whole_checkpoints(run_dir)[-1] != saved + 2:
        outcome.faults.append(f"went on to {whole_checkpoints(run_dir)[-1]}")
    return f"{saved} → {saved + 2} on {2 if TWO in blow.fewer else 1}"


def started(blow: Blow, args: Sequence[str], output: Path, told: Path | None, scratch: Path) -> Any:
    context = multiprocessing.get_context("forkserver")
    words = (blow, list(args), str(output), str(told or ""), str(scratch))
    process = context.Process(target=struck_run, args=words)
    process.start()
    return process


def settings_of(inputs: Path, run_dir: Path, blow: Blow, *changes: str) -> TrainSettings:
    """A run with every role; long, unless ``changes`` end it."""
    return train_settings(
        inputs,
        run_dir,
        "algorithm.advantage=gae",
        "reward.function=null",
        f"reward.components.task.function={inputs / 'reward.py'}:score",
        f"reward.components.quality.model.path={inputs / 'judge'}",
        "algorithm.max_sampler_gap=null",
        "optimizer.schedule=constant",
        "optimizer.lr=1e-4",
        "validation.every_steps=3",
        "checkpoint.keep_best=0",
        f"seed={blow.seed}",
        *changes,
    )


def tabled(outcomes: Sequence[Outcome]) -> Table:
    table = Table("", "layout", "moment", "call", "rank", "ended after", "went on", "what was not clean")
    for number, one in enumerate(outcomes):
        blow, seconds = one.blow, "-" if one.seconds is None else f"{one.seconds:.1f} s"
        words = [str(number), blow.layout, blow.moment, str(blow.number), str(blow.rank), seconds, one.resumed]
        table.add_row(*words, "; ".join(one.faults))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="in which a run must have ended")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--dir", type=Path, default=Path("runs/kills"))
    given = parser.parse_args()
    adopt_orphans()
    inputs = write_inputs(given.dir / "inputs")
    write_judge(inputs / "judge", inputs / "model")
    finish([], given.dir / "server")  # the server that runs are forked from stays; it is nothing that a run leaves
    draw, outcomes = random.Random(given.seed), []
    moments: list[str] = []
    while len(moments) < given.repeats:
        moments += draw.sample(given.moments, len(given.moments))
    for number, moment in enumerate(moments[: given.repeats]):
        blow = Blow.drawn(draw, moment)
        outcomes.append(one_repeat(blow, inputs.absolute(), given.dir.absolute() / f"{number:03d}", given.limit))
        one = outcomes[-1]
        print(number, blow.layout, blow.moment, blow.rank, one.seconds, one.resumed, one.faults, one.said, flush=True)
    unclean = sum(bool(one.faults) for one in outcomes)
    Console(width=160).print(tabled(outcomes))
    slowest = max((one.seconds for one in outcomes if one.seconds is not None), default=0.0)
    print(f"{len(outcomes) - unclean} of {len(outcomes)} clean; the slowest end took {slowest:.1f} s")
    return unclean


if __name__ == "__main__":
    sys.exit(main())
