"""The plan against one GPU: predicted peaks of memory and seconds of a step, and what a run of the same settings measured.

Usage: python bench/gpu_plan.py --sizes 0.5b 1.5b 3b --fit 1.5b --tokenizer DIR [--steps 3] [--tokens 16384] [--set a.b=c ...]

For each size a few steps of ``meshloom train`` run with random weights of the shape: 32 prompts of about 34 tokens × 8 samples
of exactly 512 tokens, two updates a step, so that log-probs are computed before the first of them. The run's records have
the seconds and the peak of memory of each phase; the first step does not count. Peaks are compared with what the memory
ledger holds in the phase. Seconds are compared with the cost model, with the constants that it comes with and with constants
that ``meshloom calibrate`` fits to the one size of ``--fit`` and that are then used for all.
"""

import argparse
import shutil
from pathlib import Path

from gpu_common import Budget, common_arguments, console, print_ratio, print_table, require_gpu, versions_line
from gpu_models import SHAPES, config_of, prepared, questions, write_prompts
from gpu_runs import run_side
from gpu_sides import Job, Ours
from rich.console import Console

from meshloom.observe.measured_run import read_measured_run
from meshloom.plan.calibration import Held, MeasuredRun, calibrate, compare, held
from meshloom.plan.calibration_report import print_calibration
from meshloom.plan.constants import Constants
from meshloom.plan.parameters import count_parameters

PROMPT_TOKENS, PEAKS = 64, ("generate", "log_prob", "update")
WANTED_MEMORY, WANTED_TIME = 0.10, 0.20
BYTES_ON_DISK = 17
"""Of a parameter: a model folder and a checkpoint, in bfloat16 with float32 masters and moments, and some to spare."""
SMOKE_DEVICE = "h200"
"""What the processor of a smoke run stands for; its figures mean nothing."""


def parameters_of(size: str) -> int:
    shape = SHAPES[size]
    return count_parameters(config_of(shape, max(shape.vocabulary, 1)).to_dict()).total


def place_of(options: argparse.Namespace, size: str) -> Path:
    """The work folder, or one in memory where the disk has no room: a run asks for that of its last checkpoint at the start."""
    needed = BYTES_ON_DISK * parameters_of(size)
    places = [options.work, *(shared / options.work.name for shared in [Path("/dev/shm")] if shared.is_dir())]
    roomy = [place for place in places if shutil.disk_usage(place if place.exists() else place.parent).free > needed]
    return (roomy or places)[0]


def job_of(options: argparse.Namespace, size: str) -> Job:
    """The work of a size, its model and prompts made."""
    place = place_of(options, size)
    place.mkdir(parents=True, exist_ok=True)
    model = prepared(place, size, tokenizer=options.tokenizer)
    data = place / "data"
    write_prompts(data, questions(8 if options.tiny else 2048))
    small = {"prompts": 4, "samples": 2, "max_tokens": 16} if options.tiny else {"prompts": 32}
    work = place / f"plan-{size}"
    return Job(model=model, data=data, work=work, steps=options.steps, max_prompt_tokens=PROMPT_TOKENS, **small)


def measure(out: Console, options: argparse.Namespace, size: str, left_s: float) -> MeasuredRun | None:
    """Run a size; none if it did not come to a step that counts."""
    job = job_of(options, size)
    shutil.rmtree(job.work, ignore_errors=True)
    sets = (f"batch.prompts_per_update={job.prompts // 2}", f"batch.tokens_per_microbatch={options.tokens}")
    side = Ours(sets=(*sets, *options.sets), name=f"meshloom {size}")
    run = run_side(out, side, job, left_s)
    if run is None or not run.counted:
        return None
    return read_measured_run(side.run_dir(job), device_kind=SMOKE_DEVICE if options.tiny else None)


def print_memory(out: Console, runs: dict[str, MeasuredRun]) -> dict[str, list[Held]]:
    """Peaks of the phases that are compared, by size."""
    found = {size: [row for row in held(run) if row.part in PEAKS] for size, run in runs.items()}
    rows = [
        [
            size,
            row.part,
            f"{row.predicted / 2**30:.2f}",
            f"{row.measured / 2**30:.2f}",
            f"{row.predicted / row.measured:.3f}",
        ]
        for size, each in found.items()
        for row in each
    ]
    if rows:
        headings = ["size", "phase", "predicted GiB", "measured GiB", "predicted ÷ measured"]
        print_table(out, "most bytes of tensors at once", headings, rows)
    else:
        out.print("peaks of memory: not measured, there is no GPU")
    for size, run in runs.items():
        lines = [line for group in run.forecast(Constants()).groups for line in group.ledger.lines()]
        parts = [f"{line.name} {(line.value or 0) / 2**30:.2f}" for line in lines if line.phases and line.value]
        out.print(f"{size}, ledger in GiB: {', '.join(parts)}", markup=False)
    return found


def print_seconds(out: Console, size: str, run: MeasuredRun, constants: Constants) -> None:
    """Each part of a step, as soon as it is known."""
    rows = compare(run, constants, constants)
    parts = [f"{row.part} {row.after:.3f} ÷ {row.measured:.3f} s" for row in rows]
    out.print(f"{size}, predicted ÷ measured: {', '.join(parts)}", markup=False)


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=["0.5b", "1.5b", "3b", "7b"], default=["1.5b", "0.5b", "3b"])
    parser.add_argument("--fit", choices=["0.5b", "1.5b", "3b", "7b"], default="1.5b", help="size to fit constants to")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a further setting, a.b=c")
    options = parser.parse_args()
    require_gpu(options.tiny)
    options.work = Path(options.work).resolve()
    sizes, fit = (["tiny"], "tiny") if options.tiny else (list(options.sizes), options.fit)
    if fit not in sizes:
        parser.error(f"--fit {fit} is none of --sizes {' '.join(sizes)}")
    out, budget, runs = console(), Budget(options.budget_s), {}
    options.work.mkdir(parents=True, exist_ok=True)
    for size in sorted(sizes, key=parameters_of, reverse=True):  # the largest needs most room on the disk
        run = measure(out, options, size, budget.left_s)
        if run is not None:
            runs[size] = run
            print_memory(out, {size: run})
            print_seconds(out, size, run, Constants())
    report(out, runs, fit)


def report(out: Console, runs: dict[str, MeasuredRun], fit: str) -> None:
    """The tables, and the ratios last."""
    if not runs:
        raise SystemExit("nothing was measured")
    memory = print_memory(out, runs)
    fitted = Constants()
    if fit in runs:
        found = calibrate([runs[fit]])
        fitted = found.constants
        rows = [row for run in runs.values() for row in compare(run, Constants(), fitted)]
        print_calibration(out, [runs[fit]], Constants(), found, rows, {})
    out.print(versions_line())
    for size, each in memory.items():
        for row in each:
            ratio = row.predicted / row.measured
            print_ratio(
                out, f"{size}, memory of {row.part}", ratio, f"predicted ÷ measured; wanted 1 ± {WANTED_MEMORY:g}"
            )
    for size, run in runs.items():
        (step,) = (row for row in compare(run, Constants(), fitted) if row.part == "step")
        print_ratio(out, f"{size}, seconds of a step", step.before / step.measured, "as it comes, predicted ÷ measured")
        words = f"fitted to {fit}, predicted ÷ measured; wanted 1 ± {WANTED_TIME:g}"
        print_ratio(out, f"{size}, seconds of a step", step.after / step.measured, words)


if __name__ == "__main__":
    main()
