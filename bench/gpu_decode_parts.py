"""The parts of a decode step's layers: what the engine does now against products of its own, cut up in several ways.

Usage: python bench/gpu_decode_parts.py [--sizes 1.5b 0.5b 7b] [--rows 256 128 64 32 16 512] [--budget-s 85]

Each part is a matrix product and the kernel behind it. It is recorded in a CUDA graph over weights that no cache holds and
replayed; the figures are µs of one part, first quartiles, as those processes and others may use the device meanwhile.
Candidates are compiled, and checked against float32, by processes beside this one; one that fails there is not timed. Then
whole layers but for their attention, attention itself, and the head. Last, what was fastest, if it makes whole layers faster,
for the table in ``meshloom/rollout/products.py``. The most important sizes come first, as the budget may end the script.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from decode_parts import SIZES, TINY_TILES, Layers, Part, PastTokens, choices_of, tiles_for
from gpu_common import Budget, common_arguments, console, require_gpu, synchronize, versions_line
from rich.console import Console
from torch import Tensor

from meshloom.rollout.paged_ops import TorchOps
from meshloom.rollout.products import Choices, Tile
from meshloom.rollout.triton_ops import TritonOps

ORDER = [("1.5b", 256), ("0.5b", 256), ("1.5b", 128), ("7b", 256), ("7b", 128), ("0.5b", 128)]
MOST_ERROR = 0.01
LEAST_GAIN = 0.96
"""Of a layer's time, below which tiles are taken."""
SEEN = 290
PATIENCE_S = 25.0
COPIES = 24


@dataclass(frozen=True)
class Job:
    """A candidate to be compiled and checked."""

    size: str
    rows: int
    part: Part
    tile: Tile


@dataclass(frozen=True)
class Checked:
    """How far from float32 a candidate is, and what was wrong with it."""

    error: float
    failure: str
    seconds: float


def device_of(tiny: bool) -> tuple[torch.device, torch.dtype]:
    # Triton's interpreter multiplies the bits of bfloat16.
    return (torch.device("cpu"), torch.float16) if tiny else (torch.device("cuda"), torch.bfloat16)


def check(job: Job) -> Checked:
    """Run a candidate once, on inputs of its own."""
    start = time.monotonic()
    device, dtype = device_of(job.size == "tiny")
    try:
        with torch.no_grad():
            size = SIZES[job.size]
            layers = Layers(size, job.rows, device, dtype, copies=1)
            expected = layers.in_float32().run(TorchOps(), job.part, 0)
            choices = choices_of(size, job.rows, {job.part: job.tile})
            error = distance(layers.run(TritonOps(device, choices), job.part, 0), expected)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except Exception as problem:  # noqa: BLE001  whatever a candidate fails with is its result
        return Checked(float("nan"), f"{type(problem).__name__}: {str(problem)[:200]}", time.monotonic() - start)
    return Checked(error, "" if error < MOST_ERROR else "wrong", time.monotonic() - start)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def microseconds(work: Callable[[int], object], count: int, tiny: bool) -> float:
    """µs of one of ``count`` pieces of work that are recorded together."""
    if tiny:
        start = time.perf_counter()
        work(0)
        return (time.perf_counter() - start) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            work(number)
    for _ in range(3):
        graph.replay()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(25)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    synchronize()
    return statistics.quantiles([begin.elapsed_time(end) for begin, end in marks], n=4)[0] * 1e3 / count


@contextmanager
def library(name: str):
    """Which library torch multiplies with, meanwhile."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    yield
    torch.backends.cuda.preferred_blas_library(before)


@dataclass
class Group:
    """A size at a number of rows: its inputs, what was checked, what was fastest."""

    out: Console
    size: str
    rows: int
    tiny: bool
    checked: Mapping[Job, AsyncResult | Checked]

    def measure(self, budget: Budget) -> dict[Part, Tile]:
        """Print the parts, then whole layers; returns the tiles that beat the library in them."""
        device, dtype = device_of(self.tiny)
        self._layers = Layers(SIZES[self.size], self.rows, device, dtype, COPIES)
        best: dict[Part, Tile] = {}
        for part in Part:
            if budget.left_s == 0:
                break
            now = self._now(part)
            times = self._candidates(part, now, budget)
            if times and min(times.values()) < now:
                best[part] = min(times, key=times.__getitem__)
        return best if self._is_faster(best) else {}

    def _time(self, choices: Choices, work: Callable[[TritonOps, int], object], count: int) -> float:
        """µs of a piece of work."""
        ops = TritonOps(self._layers.x_TE.device, choices)
        return microseconds(lambda number: work(ops, number), count, self.tiny)

    def _part(self, part: Part, choices: Choices) -> float:
        return self._time(choices, lambda ops, number: self._layers.run(ops, part, number), COPIES)

    def _line(self, name: str, took: float, now: float, more: str = "") -> None:
        start = f"{self.size} {self.rows:>4}  {name:<74}"
        self.out.print(f"{start} {took:8.2f} µs  {now / took:5.2f}×  {more}", markup=False, soft_wrap=True)

    def _now(self, part: Part) -> float:
        """Print what the library takes; returns it."""
        now = self._part(part, Choices())
        self._line(f"{part}: now", now, now)
        if not self.tiny:
            with library("cublaslt"):
                self._line(f"{part}: now, cublasLt", self._part(part, Choices()), now)
        return now

    def _candidates(self, part: Part, now: float, budget: Budget) -> dict[Tile, float]:
        """Print the candidates; returns their times."""
        times: dict[Tile, float] = {}
        for job, result in self.checked.items():
            if (job.size, job.rows, job.part) != (self.size, self.rows, part):
                continue
            found, name = _result(result, budget), f"{part}: {_short(job.tile)}"
            if found.failure:
                self.out.print(f"{self.size} {self.rows:>4}  {name}: {found.failure}", markup=False)
                continue
            times[job.tile] = self._part(part, choices_of(SIZES[self.size], self.rows, {part: job.tile}))
            self._line(name, times[job.tile], now, f"off by {found.error:.4f}, {found.seconds:.1f} s to compile")
        return times

    def _is_faster(self, best: dict[Part, Tile]) -> bool:
        """Print layers as they are now and with the best tiles; whether those save enough to be no chance."""
        layers, size, device = self._layers, SIZES[self.size], self._layers.x_TE.device
        count = 1 if self.tiny else 8
        expected = layers.in_float32().run_all(TorchOps(), 1)
        times = []
        for name, choices in {"now": Choices(), "best tiles": choices_of(size, self.rows, best)}.items():
            times.append(self._time(choices, lambda ops, _: layers.run_all(ops, count), 1) / count)
            error = distance(layers.run_all(TritonOps(device, choices), 1), expected)
            saved = f"off by {error:.4f}, {(times[0] - times[-1]) * size.layers / 1e3:.3f} ms a step saved"
            self._line(f"layer without attention: {name}", times[-1], times[0], saved)
        return times[-1] < LEAST_GAIN * times[0]

    def attention(self) -> None:
        """Attention, and the head with both libraries."""
        size, device = SIZES[self.size], self._layers.x_TE.device
        past = PastTokens(size, self.rows, SEEN, 3, device)
        needed = 2 * SEEN * self.rows * size.kv_heads * size.head_dim * 2
        now = self._time(Choices(), past.run, 6)
        self._line(f"attention, {SEEN} tokens: now", now, now, f"{needed / now / 1e6:.2f} TB/s")
        weight = torch.randn(size.vocabulary, size.hidden, device=device, dtype=torch.bfloat16)
        x = self._layers.x_TE
        for name in ("cublas", "cublaslt"):
            with library(name):
                took = microseconds(lambda _: torch.mm(x, weight.T, out_dtype=torch.float32), 3, self.tiny)
            self._line(f"head: {name}", took, took, f"{weight.nbytes / took / 1e6:.2f} TB/s")


def _result(result: AsyncResult | Checked, budget: Budget) -> Checked:
    if isinstance(result, Checked):
        return result
    try:
        return result.get(timeout=min(PATIENCE_S, budget.left_s))
    except multiprocessing.TimeoutError:
        return Checked(float("nan"), "not ready in time", 0.0)


def _short(some: Tile) -> str:
    return " ".join(f"{name}={value}" for name, value in vars(some).items())


def jobs_for(groups: Sequence[tuple[str, int]]) -> list[Job]:
    found: list[Job] = []
    for size, rows in groups:
        for part in Part:
            tiles = TINY_TILES[part.kind] if size == "tiny" else tiles_for(SIZES[size], part, rows)
            found += [Job(size, rows, part, tile) for tile in tiles]
    return found


def entries(found: Mapping[tuple[str, int], Mapping[Part, Tile]]) -> list[str]:
    """What was fastest, as lines of ``Choices.tiles``."""
    table: dict[str, list[str]] = {}
    for (size, rows), best in sorted(found.items()):
        for part, tile in best.items():
            columns, inner = SIZES[size].product(part)
            settings = ", ".join(f"{name}={value}" for name, value in vars(tile).items())
            table.setdefault(f"(Kind.{part.kind.name}, {columns}, {inner})", []).append(f"({rows}, Tile({settings}))")
    return [f"    {shape}: ({', '.join(tiles)},)," for shape, tiles in table.items()]


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=["0.5b", "1.5b", "7b"], default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 128, 64, 32, 16, 512])
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    options = parser.parse_args()
    wanted = [*ORDER, *((size, rows) for rows in (64, 16, 32, 512) for size in ("1.5b", "0.5b", "7b"))]
    groups = [(size, rows) for size, rows in wanted if size in options.sizes and rows in options.rows]
    out, budget = console(), Budget(options.budget_s)
    if options.tiny:
        groups = [("tiny", 16)]
        measure(out, budget, groups, {job: check(job) for job in jobs_for(groups)}, tiny=True)
        return
    # Workers are forked before this process touches the GPU: each has a context of its own, and imports nothing again.
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        checked = {job: pool.apply_async(check, (job,)) for job in jobs_for(groups)}
        measure(out, budget, groups, checked, tiny=False)
        out.print(versions_line())
        pool.terminate()


def measure(
    out: Console,
    budget: Budget,
    groups: Sequence[tuple[str, int]],
    checked: Mapping[Job, AsyncResult | Checked],
    tiny: bool,
) -> None:
    require_gpu(tiny)
    found: dict[tuple[str, int], dict[Part, Tile]] = {}
    with torch.no_grad():
        for size, count in groups:
            if budget.left_s < 3:
                out.print(f"{size} {count}: no time left")
                continue
            group = Group(out, size, count, tiny, checked)
            found[size, count] = group.measure(budget)
            if not tiny and count <= 256 and budget.left_s > 3:
                group.attention()
            out.print(f"– {budget.left_s:.0f} s left", markup=False)
    out.print("faster than the library, with what is behind the product:", *entries(found), sep="\n", soft_wrap=True)


if __name__ == "__main__":
    main()
