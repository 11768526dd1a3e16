"""A whole GRPO step on one GPU: ours, verl's and TRL's seconds and tokens a second on the same weights and prompts.

Usage: python bench/gpu_grpo.py --peer verl|trl|both|none --size 0.5b --lengths exact|long-tailed --tokenizer DIR
       [--peer-path PYTHONPATH] [--steps 4] [--set a.b=c ...] [--verl-set a.b=c ...] [--idle]

A step is 64 prompts of about 34 tokens × 8 samples at temperature 1, a reward function, and one AdamW update at 1e-6 in
bfloat16. ``exact``: each response has 512 tokens by force. ``long-tailed``: lengths come from the weights themselves
(``gpu_models.py``), mean about 500, cut at 4,096, so every side runs with its plain settings. Sides run one after another,
each in a process of its own that gets the whole GPU. The first step is shown apart; the median of the others counts.
``--idle`` also traces one whole step of ours and says in which share of it no kernel ran.
"""

import argparse
import json
import shutil
import statistics
from dataclasses import replace

from gpu_common import HERE, Budget, common_arguments, console, print_ratio, print_table, require_gpu, versions_line
from gpu_idle import RESULT, TRACED_STEP
from gpu_models import Tail, prepared, questions, write_prompts
from gpu_runs import SideRun, run_side
from gpu_sides import Job, Ours, Side, Trl, Verl
from rich.console import Console

PHASES = ("generate", "score", "log_prob", "update", "weights")
HEADINGS = ("side", "first trained step s", "steps", "s/step", *PHASES, "response tokens", "tokens/s", "peak GiB")
MEAN_LENGTH, LONGEST, EXACT = 500, 4096, 512


def job_of(options: argparse.Namespace) -> Job:
    """The work of all sides, its model and prompts made."""
    exact, tiny = options.lengths == "exact", options.tiny
    size, mean = ("tiny", 12.0) if tiny else (options.size, float(MEAN_LENGTH))
    model = prepared(options.work, size, tokenizer=options.tokenizer, mean_length=None if exact else mean)
    data = options.work / "data"
    write_prompts(data, questions(8 if tiny else 2048))
    write_prompts(data, questions(4 if tiny else 64, seed=1), "test")
    work = options.work / f"grpo-{size}-{options.lengths}"
    if tiny:
        return Job(
            model=model, data=data, work=work, prompts=2, samples=2, max_tokens=48, exact=exact, steps=options.steps
        )
    return Job(
        model=model, data=data, work=work, max_tokens=EXACT if exact else LONGEST, exact=exact, steps=options.steps
    )


def sides_of(options: argparse.Namespace) -> list[Side]:
    """Ours first, so that its figures are there whatever the others do."""
    path = options.peer_path
    sides: list[Side] = [] if options.skip_ours else [Ours(sets=tuple(options.sets))]
    if options.peer in ("verl", "both"):
        sides.append(Verl(path, sets=tuple(options.verl_sets), workers=options.verl_workers))
    if options.peer in ("trl", "both"):
        sides.append(Trl(options.trl_path or path, samples_per_microbatch=options.trl_microbatch))
    return sides


def row_of(run: SideRun) -> list[str]:
    """A side's line of the table: medians over the steps that count."""
    counted = run.counted
    if not counted:
        return [run.name, f"{run.first_step_s:.1f}", "0", *["–"] * (len(PHASES) + 4)]
    phases = [[step.phases[name] for step in counted if name in step.phases] for name in PHASES]
    return [
        run.name,
        f"{run.first_step_s:.1f}",
        str(len(counted)),
        f"{step_seconds(run):.2f}",
        *(f"{statistics.median(seconds):.2f}" if seconds else "–" for seconds in phases),
        f"{statistics.mean(step.tokens for step in counted):,.0f}",
        f"{tokens_per_second(run):,.0f}",
        f"{run.ended.peak_device_bytes / 2**30:.1f}",
    ]


def step_seconds(run: SideRun) -> float:
    return statistics.median(step.seconds for step in run.counted)


def tokens_per_second(run: SideRun) -> float:
    return sum(step.tokens for step in run.counted) / sum(step.seconds for step in run.counted)


def report(out: Console, options: argparse.Namespace, job: Job, runs: list[SideRun]) -> None:
    """The table of what is known so far."""
    lengths = f"exactly {job.max_tokens} tokens"
    if not job.exact:
        expected = Tail.of_mean(12 if options.tiny else MEAN_LENGTH).expected(job.max_tokens)
        lengths = f"long-tailed lengths, expected mean {expected:.0f}, at most {job.max_tokens}"
    title = f"{options.size}: {job.prompts} prompts × {job.samples} samples, {lengths}, one update"
    print_table(out, title, HEADINGS, [row_of(run) for run in runs])


def trace_idle(out: Console, options: argparse.Namespace, job: Job, budget: Budget) -> None:
    """One traced run of ours."""
    traced = replace(job, steps=TRACED_STEP, work=job.work / "idle")
    sets = (*options.sets, "logging.loggers=[idle]")
    side = Ours(sets=sets, script=HERE / "gpu_idle.py", awaits=RESULT, name="meshloom under the profiler")
    shutil.rmtree(traced.work, ignore_errors=True)
    if run_side(out, side, traced, budget.left_s) is None or not (found := side.run_dir(traced) / RESULT).exists():
        out.print("share of a step with no kernel running: not measured")
        return
    shares = json.loads(found.read_text())
    out.print(
        f"share of a step with no kernel running: {shares['no_kernel']:.1%} ({shares['no_kernel_or_copy']:.1%} without copies "
        f"either) of {shares['seconds']:.2f} s under the profiler, {shares['kernels']:,.0f} kernels"
    )


def print_ratios(out: Console, options: argparse.Namespace, runs: list[SideRun]) -> None:
    """Last lines: each peer's step over ours."""
    ours = next((run for run in runs if run.name == "meshloom" and run.counted), None)
    name = f"{options.size}, {options.lengths}"
    for run in runs:
        if ours is None or run is ours or not run.counted:
            continue
        if options.lengths != "exact":
            by_tokens = tokens_per_second(ours) / tokens_per_second(run)
            print_ratio(out, name, by_tokens, f"response tokens a second of a step, ours ÷ {run.name}'s")
        print_ratio(out, name, step_seconds(run) / step_seconds(ours), f"seconds a step, {run.name}'s ÷ ours")
    if ours is not None and len(runs) == 1:
        out.print(f"ratio ({name}): not measured, there was no peer")


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=["verl", "trl", "both", "none"], default="none")
    parser.add_argument("--size", choices=["0.5b", "1.5b", "3b", "7b"], default="0.5b")
    parser.add_argument("--lengths", choices=["exact", "long-tailed"], default="exact")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a setting of ours, a.b=c")
    parser.add_argument("--verl-set", dest="verl_sets", action="append", default=[], help="a setting of verl's, a.b=c")
    parser.add_argument("--verl-workers", type=int, default=2, help="agent loops, reward workers, storage units")
    parser.add_argument("--trl-path", default="", help="PYTHONPATH for TRL where it is not --peer-path")
    parser.add_argument("--trl-microbatch", type=int, default=32, help="samples of TRL's backward passes")
    parser.add_argument("--skip-ours", action="store_true")
    parser.add_argument("--idle", action="store_true", help="trace a step of ours (needs a GPU)")
    options = parser.parse_args()
    require_gpu(options.tiny and not options.idle)
    if options.tiny:
        options.size = "tiny"
    out, budget = console(), Budget(options.budget_s)
    options.work = options.work.resolve()
    job, runs = job_of(options), []
    for side in sides_of(options):
        own = replace(job, work=job.work / side.name)
        shutil.rmtree(own.work, ignore_errors=True)
        run = run_side(out, side, own, budget.left_s)
        if run is not None:
            runs.append(run)
            report(out, options, job, runs)
    if options.idle:
        trace_idle(out, options, job, budget)
    out.print(versions_line(options.peer_path))
    print_ratios(out, options, runs)


if __name__ == "__main__":
    main()
