"""Peers that start together and are measured one after another on one GPU, then ours: many peers in the time of one start.

Usage: python bench/gpu_together.py verl:1.5b:long-tailed trl:0.5b:exact vllm:7b meshloom:0.5b:exact ... --tokenizer DIR
       --peer-path PYTHONPATH [--trl-path PYTHONPATH] [--steps 3] [--start-s 400] [--side-s 150] [--after FILE]

A peer loads, compiles, captures and generates its first step, whose rewards then wait at a gate of its own. Once all wait
(``--after``: and a file is there), one gate after another is opened: the peer finishes its first step, which does not
count, and does the others while those still waiting sleep, and is ended before the next. Ours come last, each from its
start to its end alone. What waits holds memory, so vLLM gets a cache of a given size that holds all sequences of a step
instead of a share of the GPU; order the peers so that what waits leaves enough for what runs.

``vllm:SIZE`` is vLLM alone, as in ``gpu_engine.py``. ``meshloom:SIZE:LENGTHS`` are runs as in ``gpu_grpo.py``; of the last
step, which does not count, one is traced for the share without a kernel if ``--idle`` names its size.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import psutil
from gpu_common import (
    HERE,
    OFFLINE,
    Budget,
    Ended,
    common_arguments,
    console,
    print_ratio,
    print_table,
    tail_of,
    versions_line,
)
from gpu_grpo import HEADINGS, job_of, row_of, step_seconds, tokens_per_second
from gpu_idle import RESULT
from gpu_reward import GATE
from gpu_runs import SideRun, run_side, say
from gpu_sides import Job, Ours, Side, Step, Trl, Verl
from rich.console import Console

CACHE_BYTES_A_TOKEN = {"0.5b": 12288, "1.5b": 28672, "3b": 36864, "7b": 57344, "tiny": 1024}
"""Keys and values in bfloat16, of the shapes in ``gpu_models.py``."""
SPARE = 1.25
"""Of a cache over the tokens of all sequences: pages that are not full."""


@dataclass(frozen=True)
class Alone:
    """vLLM alone, as a side whose steps are its rounds."""

    path: str
    kv_cache_bytes: int
    sequences: int = 256
    name: str = "vLLM"

    def missing(self) -> str | None:
        return None

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": self.path}

    def command(self, job: Job) -> Sequence[object]:
        job.work.mkdir(parents=True, exist_ok=True)
        spec = {"model": str(job.model), "sequences": self.sequences, "tokens": job.max_tokens, "rounds": job.steps}
        own = {"utilization": 0.1, "kv_cache_bytes": self.kv_cache_bytes, "result": str(job.work / "result.json")}
        return [sys.executable, HERE / "gpu_vllm.py", json.dumps({**spec, **own})]

    def steps(self, job: Job) -> list[Step]:
        """All rounds, once the last has ended."""
        if not (file := job.work / "result.json").exists():
            return []
        tokens = float(self.sequences * job.max_tokens)
        rounds = json.loads(file.read_text())["seconds"]
        return [Step(number=i, seconds=took, tokens=tokens) for i, took in enumerate(rounds, start=1)]

    def is_over(self, job: Job) -> bool:
        return True


class Waiting:
    """A peer's process, from its start to its gate, and through it."""

    def __init__(self, name: str, side: Side, job: Job) -> None:
        self.name, self.side, self.job = name, side, job
        self.gate = job.work / "gate"
        shutil.rmtree(job.work, ignore_errors=True)
        command = [str(part) for part in side.command(job)]
        paths = [side.environment()["PYTHONPATH"], os.environ.get("PYTHONPATH")]
        # Sockets and compiled code apart from the others'; the path is short since a socket's may have 107 letters.
        self.aside = tempfile.mkdtemp(prefix="b", dir="/tmp")
        own = {"PYTHONPATH": ":".join(filter(None, paths)), GATE: str(self.gate), "TMPDIR": self.aside}
        own |= {"VLLM_CACHE_ROOT": f"{self.aside}/vllm", "MASTER_PORT": str(free_port())}
        job.work.mkdir(parents=True, exist_ok=True)
        with (job.work / "log").open("w") as log:
            self.process = psutil.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **OFFLINE, **side.environment(), **own},
            )
        self.started = time.time()

    @property
    def is_at_gate(self) -> bool:
        return self.gate.with_name("gate.reached").exists()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def pass_gate(self, out: Console, deadline_s: float) -> SideRun | None:
        """Let it do its steps; none if it did none that counts."""
        self.gate.touch()
        opened, seen = time.time(), 0
        while time.time() - opened < deadline_s and not self.has_ended and seen < self.job.steps:
            time.sleep(0.2)
            for step in self.side.steps(self.job)[seen:]:
                say(out, self.side, step, time.time() - opened)
                seen += 1
        steps = self.side.steps(self.job)
        if len(steps) < self.job.steps:
            out.print(f"{self.name}: {len(steps)} steps\n{tail_of(self.job.work / 'log')}", markup=False)
        ended = Ended(started=self.started, code=self.process.poll(), peak_device_bytes=0)
        return SideRun(name=self.side.name, steps=steps, clocks={}, ended=ended) if len(steps) > 1 else None

    def end(self) -> None:
        """End it and all that it started, also what no longer is its child."""
        family = set(self._children())
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(GATE) == str(self.gate):
                    family.add(process)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10.0)
        shutil.rmtree(self.aside, ignore_errors=True)

    def _children(self) -> list[psutil.Process]:
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def free_port() -> int:
    """A port for a peer's own process group: TRL's vLLM takes a fixed one unless told."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(out: Console, options: argparse.Namespace, spec: str) -> Waiting:
    """Start a peer given as KIND:SIZE[:LENGTHS]."""
    kind, size, lengths = (*spec.split(":"), "exact")[:3]
    options.size, options.lengths = size, lengths
    job = replace(job_of(options), work=options.work / "together" / spec.replace(":", "-"))
    path = options.peer_path
    tokens = job.prompts * job.samples * (job.max_prompt_tokens + min(job.max_tokens, 640))
    cache = int(SPARE * CACHE_BYTES_A_TOKEN[size] * tokens)
    engine = "actor_rollout_ref.rollout"
    sides: dict[str, Side] = {
        "verl": Verl(
            path,
            sets=(f"+{engine}.engine_kwargs.vllm.kv_cache_memory_bytes={cache}", *options.verl_sets),
            workers=options.verl_workers,
            utilization=0.1,
        ),
        "trl": Trl(options.trl_path or path, utilization=0.1, kv_cache_bytes=cache),
        "vllm": Alone(path, cache // 2),
    }
    out.print(f"{spec}: starting, a cache of {cache / 2**30:.1f} GiB", markup=False)
    return Waiting(spec, sides[kind], job)


def gather(out: Console, options: argparse.Namespace, peers: list[Waiting]) -> None:
    """Wait until all peers are at their gates or have failed."""
    began, told = time.time(), set()
    while time.time() - began < options.start_s and len(told) < len(peers):
        for peer in peers:
            if peer not in told and (peer.is_at_gate or peer.has_ended):
                told.add(peer)
                how = "waits" if peer.is_at_gate else f"failed\n{tail_of(peer.job.work / 'log')}"
                out.print(f"{peer.name} at {time.time() - peer.started:.0f} s: {how}", markup=False)
        time.sleep(0.5)
    out.print(f"{psutil.virtual_memory().available / 2**30:.0f} GiB of the host's memory are free")
    while options.after is not None and not options.after.exists():
        time.sleep(0.2)


def measure_ours(out: Console, options: argparse.Namespace, spec: str, left_s: float) -> SideRun | None:
    """One of our own runs, given as meshloom:SIZE:LENGTHS."""
    _, options.size, options.lengths = spec.split(":")
    is_traced = options.size in options.idle and options.lengths == "exact"
    job = job_of(options)
    job = replace(job, work=options.work / "together" / spec.replace(":", "-"), steps=job.steps + is_traced)
    shutil.rmtree(job.work, ignore_errors=True)
    sets = tuple(given.partition(":")[2] for given in options.sets if given.startswith(f"{options.size}:"))
    side = Ours(sets=sets)
    if is_traced:
        sets = (*sets, "logging.loggers=[idle]")
        side = Ours(sets=sets, script=HERE / "gpu_idle.py", awaits=RESULT)
        os.environ["BENCH_TRACED_STEP"] = str(job.steps)
    run = run_side(out, side, job, left_s)
    if run is not None and is_traced:
        run = replace(run, steps=run.steps[:-1])
        if (found := side.run_dir(job) / RESULT).exists():
            out.print(f"{spec}: {found.read_text()}", markup=False)
    return run


def print_ratio_of(out: Console, name: str, peer: SideRun, ours: SideRun) -> None:
    """A peer's step over ours, and tokens a second the other way round where lengths differ."""
    if "long-tailed" in name:
        by_tokens = tokens_per_second(ours) / tokens_per_second(peer)
        print_ratio(out, name, by_tokens, f"response tokens a second of a step, ours ÷ {peer.name}'s")
    print_ratio(out, name, step_seconds(peer) / step_seconds(ours), f"seconds a step, {peer.name}'s ÷ ours")


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("sides", nargs="+", help="KIND:SIZE[:LENGTHS], in the order of measuring")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--start-s", type=float, default=400, help="seconds until all must wait at their gates")
    parser.add_argument("--side-s", type=float, default=200, help="seconds that a side may take after its gate")
    parser.add_argument("--after", type=Path, help="file to wait for before the first gate is opened")
    parser.add_argument("--idle", nargs="*", default=[], help="sizes of ours of which a step is traced")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], help="SIZE:a.b=c, a setting of ours at a size"
    )
    parser.add_argument("--verl-set", dest="verl_sets", action="append", default=[], help="a setting of verl's, a.b=c")
    parser.add_argument("--verl-workers", type=int, default=8, help="agent loops, reward workers, storage units")
    parser.add_argument("--trl-path", default="", help="PYTHONPATH for TRL where it is not --peer-path")
    options = parser.parse_args()
    out, budget = console(), Budget(options.budget_s)
    options.work = options.work.resolve()
    ours = [spec for spec in options.sides if spec.startswith("meshloom:")]
    peers: list[Waiting] = []
    runs: dict[str, SideRun | None] = {}
    try:
        for spec in options.sides:
            if spec not in ours:
                peers.append(start(out, options, spec))
        gather(out, options, peers)
        for peer in list(peers):
            if peer.is_at_gate and not peer.has_ended:
                runs[peer.name] = peer.pass_gate(out, options.side_s)
                peer.end()
    finally:
        for peer in peers:
            peer.end()
    for spec in ours:
        runs[spec] = measure_ours(out, options, spec, min(budget.left_s, options.side_s))
    rows = [[spec, *row_of(run)[1:]] for spec, run in runs.items() if run is not None]
    print_table(out, "one after another on one GPU", HEADINGS, rows)
    out.print(versions_line(options.peer_path))
    for spec, run in runs.items():
        own = runs.get(f"meshloom:{spec.partition(':')[2]}")
        if run is not None and own is not None and run is not own and run.counted and own.counted:
            print_ratio_of(out, spec, run, own)


if __name__ == "__main__":
    main()
