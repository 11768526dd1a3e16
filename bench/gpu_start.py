"""Seconds from the command to the first trained step, with each engine of ours.

Usage: python bench/gpu_start.py --size 1.5b --tokenizer DIR [--engines torch vllm] [--peer-path PYTHONPATH]

``meshloom train`` on one GPU, as in ``gpu_grpo.py`` (64 prompts × 8 samples of exactly 512 tokens), until its first step has
been trained: imports, loading, compiling, capturing, generating, scoring, updating. The run is started ``--rounds`` times;
the first time, caches of compiled code may be empty. The vLLM engine needs vLLM on ``--peer-path``. The last line is the
embedded engine's seconds over vLLM's.
"""

import argparse
import shutil
from dataclasses import replace

from gpu_common import Budget, common_arguments, console, print_ratio, print_table, versions_line
from gpu_grpo import job_of
from gpu_runs import SideRun, run_side
from gpu_sides import Ours


def side_of(engine: str, options: argparse.Namespace) -> Ours:
    """A run with an engine; what vLLM needs is only in the path of the run that needs it."""
    path = options.peer_path if engine == "vllm" else ""
    return Ours(sets=(f"rollout.engine={engine}", *options.sets), path=path, name=f"engine {engine}")


def row_of(run: SideRun) -> list[str]:
    """When the first step ended, and what it took itself."""
    phases = next(step for step in run.steps if step.number == 1).phases
    step = sum(phases.values())
    return [
        run.name,
        f"{run.first_step_s:.1f}",
        f"{run.first_step_s - step:.1f}",
        *(f"{phases.get(name, 0.0):.1f}" for name in ("generate", "update")),
    ]


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["0.5b", "1.5b", "3b", "7b"], default="1.5b")
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=["torch", "vllm"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a setting, a.b=c")
    options = parser.parse_args()
    out, budget = console(), Budget(options.budget_s)
    options.work, options.lengths, options.steps = options.work.resolve(), "exact", 1
    job, best, rows = job_of(options), {}, []
    for number in range(options.rounds):
        for engine in options.engines:
            own = replace(job, work=options.work / f"start-{engine}")
            shutil.rmtree(own.work, ignore_errors=True)
            run = run_side(out, side_of(engine, options), own, budget.left_s)
            if run is not None:
                best[engine] = min(best.get(engine, run.first_step_s), run.first_step_s)
                rows.append([f"round {number + 1}, {row_of(run)[0]}", *row_of(run)[1:]])
    headings = ["run", "command to first trained step s", "before its first phase s", "generate s", "update s"]
    print_table(out, f"{'tiny' if options.tiny else options.size}: start of a run", headings, rows)
    out.print(versions_line(options.peer_path))
    for engine, seconds in best.items():
        out.print(f"seconds to the first trained step, engine {engine}: {seconds:.1f}")
    if len(best) == 2:
        print_ratio(out, options.size, best["torch"] / best["vllm"], "seconds to the first step, embedded ÷ vLLM")


if __name__ == "__main__":
    main()
