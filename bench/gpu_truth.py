"""GRPO on real weights: accuracy on held-out problems before and after, three seeds; verl and TRL on the same task.

Usage: python bench/gpu_truth.py --write DIR                          (where reasoning-gym is; the problems, as files)
       python bench/gpu_truth.py --model DIR --problems DIR [--tasks sum product] [--sides meshloom verl trl]
       [--seeds 0 1 2] [--steps 40] [--peer-path PYTHONPATH] [--result curves.json]

The problems are two reasoning-gym tasks that a small model half knows (``TASKS``), written beforehand as files, so that
the machine with the GPU needs no reasoning-gym. Their answers are numbers, and their verifiers compare exactly: the reward
is 1 if the last number of the response is the answer. A step is 64 prompts × 8 samples of at most 64 tokens; accuracy is
greedy, on 256 held-out problems, as the task draws them: no question of theirs is trained on. verl and TRL get the same
model, prompts, samples, learning rate and number of seeds. verl validates itself; TRL's trained model is saved and judged
by ``meshloom eval``. The curves go to a JSON file; the last line is the gain in accuracy over that of the first peer.
"""

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_common import HERE, Budget, common_arguments, console, print_ratio, print_table, versions_line
from gpu_models import make_model, write_prompts
from gpu_runs import SideRun, run_side
from gpu_sides import Job, Ours, Side, Trl, Verl
from rich.console import Console

NUM_TRAIN, NUM_TEST, HELD_OUT_SHARE = 4096, 256, 0.1
SIDES = ("meshloom", "meshloom-vllm", "verl", "trl")


@dataclass(frozen=True)
class Task:
    """A reasoning-gym task whose answer is a number."""

    name: str
    arguments: dict[str, int]


TASKS = {
    "sum": Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "product": Task("products", {"min_digits": 1, "max_digits": 2}),
}


def write_problems(folder: Path) -> None:
    """Problems as often as the task draws them; a question is either trained on or held out."""
    from reasoning_gym import create_dataset

    for short, task in TASKS.items():
        made = create_dataset(task.name, size=2 * NUM_TRAIN, seed=11, **task.arguments)
        rows = [(entry["question"], str(entry["answer"])) for entry in made]
        questions = list(dict(rows))
        held_out = set(random.Random(0).sample(questions, round(HELD_OUT_SHARE * len(questions))))
        train = [row for row in rows if row[0] not in held_out][:NUM_TRAIN]
        test = [row for row in rows if row[0] in held_out][:NUM_TEST]
        write_prompts(folder / short, train)
        write_prompts(folder / short, test, "test")
        print(f"{folder / short}: {len(train)} to train on, {len(test)} held out ({len(dict(test))} different)")


def side_of(name: str, options: argparse.Namespace) -> Side:
    """A trainer by its name."""
    cache, sets = options.kv_cache_bytes, tuple(options.sets)
    # What vLLM is given as bytes it need not find as a share of the GPU, which other runs may use too.
    share = {"utilization": 0.1} if cache else {}
    if cache:
        sets = (f"rollout.kv_cache_bytes={cache}", "rollout.vllm.gpu_memory_utilization=0.1", *sets)
    if name == "verl":
        engine = "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"
        own = (*((f"{engine}={cache}",) if cache else ()), *options.verl_sets)
        return Verl(options.peer_path, sets=own, workers=options.verl_workers, **share)
    if name == "trl":
        return Trl(options.trl_path or options.peer_path, kv_cache_bytes=cache, **share)
    if name == "meshloom-vllm":
        return Ours(sets=("rollout.engine=vllm", *sets), path=options.peer_path, name=name)
    return Ours(sets=sets)


def job_of(options: argparse.Namespace, side: str, task: str, seed: int) -> Job:
    """A run of a side on a task with a seed."""
    tiny = options.tiny
    return Job(
        model=options.model,
        data=options.problems / task,
        work=options.work / "truth" / f"{task}-{side}-{seed}",
        prompts=2 if tiny else options.prompts,
        samples=2 if tiny else 8,
        max_tokens=8 if tiny else 64,
        exact=False,
        steps=options.steps,
        lr=options.lr,
        seed=seed,
        reward="last_number",
        validate_every=options.validate_every,
    )


def curves_of(run: SideRun, job: Job) -> dict[str, Any]:
    """What is kept of a run: reward of each step, accuracy where it was measured, seconds."""
    steps = [step for step in run.steps if step.number > 0]
    return {
        "reward": [[step.number, step.reward] for step in steps],
        "accuracy": [[step.number, step.accuracy] for step in run.steps if step.accuracy is not None],
        "seconds_a_step": statistics.median(step.seconds for step in run.counted) if run.counted else None,
        "seconds": run.clocks.get(job.steps),
        "tokens_a_sample": [[step.number, step.tokens / (job.prompts * job.samples)] for step in steps],
    }


def judge(model: Path, job: Job, cache: int) -> float:
    """Greedy accuracy of a folder on the held-out problems, by ``meshloom eval``; with a cache of so many bytes, if not 0."""
    settings = {
        "run_dir": str(job.work / "eval"),
        "model": {"path": str(model)},
        "data": {"validation": {"files": [str(job.data / "test.jsonl")]}},
        "reward": {"function": f"{HERE / 'gpu_reward.py'}:{job.reward}"},
        "rollout": {"max_response_tokens": job.max_tokens, "kv_cache_bytes": cache or None},
    }
    shutil.rmtree(job.work / "eval", ignore_errors=True)
    file = job.work / "eval.yaml"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "meshloom", "eval", str(file)]
    subprocess.run(command, check=True, capture_output=True, cwd=HERE.parent)
    records = [json.loads(line) for line in (job.work / "eval" / "metrics.jsonl").read_text().splitlines()]
    return records[-1]["metrics"]["accuracy"]


def run_one(
    out: Console, options: argparse.Namespace, name: str, task: str, seed: int, left_s: float
) -> dict[str, Any] | None:
    """One run: its curves; none if it could not be made."""
    side, job = side_of(name, options), job_of(options, name, task, seed)
    shutil.rmtree(job.work, ignore_errors=True)
    run = run_side(out, side, job, left_s)
    if run is None:
        return None
    curves = curves_of(run, job)
    trained = job.work / "trained"
    if trained.exists():
        folders = {0: options.model, job.steps: trained}
        curves["accuracy"] = [[step, judge(folder, job, options.kv_cache_bytes)] for step, folder in folders.items()]
    return {"side": name, "task": task, "seed": seed, **curves}


def row_of(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """A side on a task: means over seeds, and each seed's accuracy at the end."""
    first, last = ([run["accuracy"][i][1] for run in runs if run["accuracy"]] for i in (0, -1))
    begin, end = (
        [statistics.mean(value for _, value in part) for run in runs if (part := run["reward"][where])]
        for where in (slice(0, 5), slice(-5, None))
    )
    seconds = [run["seconds_a_step"] for run in runs if run["seconds_a_step"] is not None]
    return [
        name,
        str(len(runs)),
        f"{statistics.mean(first):.3f}" if first else "–",
        f"{statistics.mean(last):.3f}" if last else "–",
        " ".join(f"{value:.3f}" for value in last),
        f"{statistics.mean(begin):.3f}",
        f"{statistics.mean(end):.3f}",
        f"{statistics.median(seconds):.2f}" if seconds else "–",
    ]


def report(out: Console, runs: list[dict[str, Any]], task: str) -> None:
    """A task's table of what is known so far."""
    headings = [
        "side",
        "seeds",
        "accuracy before",
        "after",
        "of each seed",
        "reward, first 5 steps",
        "last 5",
        "s/step",
    ]
    by_side = {side: [run for run in runs if run["side"] == side and run["task"] == task] for side in SIDES}
    print_table(out, task, headings, [row_of(side, found) for side, found in by_side.items() if found])


def gain(runs: list[dict[str, Any]], side: str, task: str) -> float:
    """Mean gain in accuracy over the seeds of a side."""
    gains = [
        run["accuracy"][-1][1] - run["accuracy"][0][1]
        for run in runs
        if run["side"] == side and run["task"] == task and run["accuracy"]
    ]
    return statistics.mean(gains) if gains else math.nan


def prepare_tiny(options: argparse.Namespace) -> None:
    """A smoke run's model and problems."""
    options.model = make_model(options.work / "tiny", "tiny", tokenizer=options.tokenizer)
    options.problems, options.tasks = options.work / "problems", ["sum"]
    rows = [(f"What is {i}+{i + 1}?", str(2 * i + 1)) for i in range(12)]
    write_prompts(options.problems / "sum", rows[:8])
    write_prompts(options.problems / "sum", rows[8:], "test")
    options.steps, options.validate_every, options.seeds = 2, 2, options.seeds[:1]


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="write the problems into this folder, and end")
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--problems", type=Path, help="folder that --write wrote")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["meshloom"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=64, help="prompts a step, 8 samples each")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--validate-every", type=int, default=20)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a setting of ours, a.b=c")
    parser.add_argument("--verl-set", dest="verl_sets", action="append", default=[], help="a setting of verl's, a.b=c")
    parser.add_argument("--verl-workers", type=int, default=2, help="agent loops, reward workers, storage units")
    parser.add_argument(
        "--kv-cache-bytes", type=int, default=0, help="of each engine; 0: what a share of the GPU leaves"
    )
    parser.add_argument("--trl-path", default="", help="PYTHONPATH for TRL where it is not --peer-path")
    parser.add_argument("--result", type=Path, help="JSON file for the curves")
    options = parser.parse_args()
    if options.write:
        write_problems(options.write)
        return
    out, budget = console(), Budget(options.budget_s)
    options.work = options.work.resolve()
    if options.tiny:
        prepare_tiny(options)
    options.model, options.problems = options.model.resolve(), options.problems.resolve()
    runs: list[dict[str, Any]] = []
    for task in options.tasks:
        for side in options.sides:
            for seed in options.seeds:
                found = run_one(out, options, side, task, seed, budget.left_s)
                if found is None:
                    break
                runs.append(found)
                if options.result:
                    options.result.write_text(json.dumps(runs))
        report(out, runs, task)
    out.print(versions_line(options.peer_path))
    peers = [side for side in options.sides if not side.startswith("meshloom")]
    for task in options.tasks:
        ratio = gain(runs, "meshloom", task) / gain(runs, peers[0], task) if peers else math.nan
        print_ratio(out, task, ratio, f"gain in accuracy, ours ÷ {peers[0] if peers else 'no peer'}")


if __name__ == "__main__":
    main()
