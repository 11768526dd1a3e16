"""What the GPU benchmarks share: this device's own ceilings, versions, tables, and processes that are watched.

Owns: measuring of the device, starting and ending of a side's process. Refuses to know: models, trainers. Always holds:
a process that was started here, and those it started, are gone when its side is done; a figure is printed as soon as it is
known.
"""

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import psutil
import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
POLL_S = 0.1
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}
PACKAGES = ("torch", "transformers", "vllm", "verl", "trl", "ray", "flash-attn", "liger-kernel")


def console() -> Console:
    """Wide enough for the tables, also in a log."""
    return Console(width=max(Console().width, 150), highlight=False)


def common_arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every script has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="a smoke run of seconds, on any device")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_gpu"), help="folder for models, data and runs")
    parser.add_argument("--tokenizer", type=Path, help="folder of a Qwen2 tokenizer (not needed with --tiny)")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of the processes that need the peers' packages")
    parser.add_argument(
        "--budget-s", type=float, default=1e9, help="seconds this script may take; sides then end early"
    )
    return parser


class Budget:
    """Seconds left of what a script may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


def print_table(out: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is a name and whose others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def print_ratio(out: Console, name: str, ratio: float, meaning: str) -> None:
    """The line a script ends with."""
    out.print(f"ratio ({name}): {ratio:.2f}  {meaning}")


def versions_line(path: str = "") -> str:
    """Names and versions of what was measured: the device, its driver, packages here and along a path of further ones."""
    own = {name: v for name in PACKAGES if (v := _version(name)) is not None}
    parts = [f"meshloom {meshloom.__version__}", device_name(), *(f"{name} {number}" for name, number in own.items())]
    if path:
        found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in distributions(path=path.split(":"))}
        parts += [f"{name} {found[name]} (peers)" for name in PACKAGES if name in found]
    return ", ".join(parts)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_name() -> str:
    """The GPU with its driver and CUDA, or the processor."""
    if not torch.cuda.is_available():
        return f"processor, {torch.get_num_threads()} threads"
    name, driver = _ask_driver("name,driver_version").split(", ")
    return f"{name}, driver {driver}, CUDA {torch.version.cuda}"


def _ask_driver(fields: str) -> str:
    """What the driver says of the GPU in use, without a context on it."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={index}"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of some work on this device; once before that does not count."""
    work()
    took = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        took.append(time.perf_counter() - start)
    return sorted(took)[len(took) // 2]


def require_gpu(is_smoke_run: bool) -> None:
    """Say so, where a measurement needs a GPU and there is none."""
    if not is_smoke_run and not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; --tiny, without --idle, is a smoke run on any device")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_bandwidth(tiny: bool = False) -> float:
    """Bytes a second that a large copy on this device reads and writes."""
    source = torch.randn((1 if tiny else 1024) * 2**20, device="cuda" if torch.cuda.is_available() else "cpu")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), 10)


def matrix_rate(tiny: bool = False) -> float:
    """Operations a second of a large bfloat16 matrix product."""
    size, device = 256 if tiny else 8192, "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, 10)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a side's process ended.

    Args:
        started: when, in seconds since the epoch.
        code: its exit code; none if it was ended here.
        peak_device_bytes: most bytes in use on the GPU, whoever held them, less those before; 0 without a GPU.
    """

    started: float
    code: int | None
    peak_device_bytes: int


def watch(
    command: Sequence[object],
    log: Path,
    *,
    done: Callable[[], bool],
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a side until it has ended, is done, or its time is over; then see that nothing of it is left.

    Args:
        command: program and arguments.
        log: file for its output.
        done: asked ten times a second; true ends the process, since what was to be measured has been.
        deadline_s: most seconds it may take.
        environment: variables besides this process's own.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    before, peak, looked = device_bytes(), 0, 0.0
    with log.open("w") as file:
        started, variables = time.time(), {**os.environ, **OFFLINE, **(environment or {})}
        # A side's own packages come first; what this process was given to find itself stays.
        paths = [(environment or {}).get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        variables["PYTHONPATH"] = ":".join(filter(None, paths))
        process = psutil.Popen(
            [str(part) for part in command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        family: set[psutil.Process] = {process}
        over = False
        usual = signal.signal(signal.SIGTERM, _leave)
        try:
            while process.poll() is None and time.time() - started < deadline_s and not (over := done()):
                time.sleep(POLL_S)
                if time.time() - looked > 1.0:
                    looked = time.time()
                    peak = max(peak, device_bytes() - before)
                    family.update(_descendants(process))
            code = process.poll()
        finally:
            family.update(_descendants(process))
            # What is done would still save its model if it were asked to leave: gigabytes that slow down the next side.
            _end(family, at_once=over)
            signal.signal(signal.SIGTERM, usual)
    done()
    return Ended(started=started, code=code, peak_device_bytes=peak)


def _leave(*_: object) -> None:
    """Ended from outside: what was started here is ended first."""
    raise SystemExit(143)


def device_bytes() -> int:
    """Bytes in use on the GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return int(_ask_driver("memory.used")) * 2**20


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(family: set[psutil.Process], at_once: bool) -> None:
    """End processes: a chance to leave, unless at once, then none."""
    for how, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0))[at_once:]:
        alive = [process for process in family if _is_alive(process)]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(how)
        psutil.wait_procs(alive, timeout=wait_s)


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended and that nobody collects does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_package(name: str, path: str) -> bool:
    """Whether a process with this path can import a package."""
    return bool(list(distributions(name=name, path=path.split(":"))) or list(distributions(name=name)))


def tail_of(log: Path, lines: int = 25) -> str:
    """The end of a log, for a side that failed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
