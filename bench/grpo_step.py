"""A whole GRPO step against TRL's GRPOTrainer: seconds, tokens a second and peak memory on the same model and prompts.

Usage: python bench/grpo_step.py [--tiny] [--only-ours] [--threads N] [--workloads lesson long-tailed equal]

Both sides load the same folder, take all prompts in each step, draw the same number of samples from the same distribution
(temperature 1), score them with the same function and make one update without a reference, in float32 on the processor
with the same number of threads and the same OpenMP settings. Lengths are equal by force, or as the model gives them: then
both sides draw from the same distribution of lengths, and tokens a second are compared as well as seconds a step. Our side
is ``meshloom train`` (``grpo_ours.py``); TRL (``grpo_trl.py``) runs in an environment of its own that is made on
first use. Each of TRL's settings in ``TRL_VARIANTS`` is tried once; its fastest then takes turns with ours, in fresh
processes. A step is the time from the end of one to the end of the next, everything included; the first steps do not count.
Peak memory is that of the main process at the end of its last step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
TRL_FOLDER = ROOT / ".venv-trl"
# Torch first: the build that is there already, or that the index gives, is not replaced by what TRL asks for.
TRL_PACKAGES = (
    ["torch==2.13.0", "numpy==2.4.6"],
    ["trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0"],
)
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
# ``tokens`` is our tokens_per_microbatch: the default's 16384 for the small model, few for the larger one to save memory.
WORKLOADS: dict[str, dict[str, Any]] = {
    "lesson": dict(model="lesson", prompts_per_step=64, max_response_tokens=40, equal_lengths=False, tokens=16384),
    "lesson-equal": dict(model="lesson", prompts_per_step=64, max_response_tokens=32, equal_lengths=True, tokens=16384),
    "long-tailed": dict(model="large", prompts_per_step=6, max_response_tokens=192, equal_lengths=False, tokens=1024),
    "equal": dict(model="large", prompts_per_step=6, max_response_tokens=64, equal_lengths=True, tokens=1024),
    "tiny": dict(model="tiny", prompts_per_step=2, max_response_tokens=16, equal_lengths=False, tokens=1024),
}
# Samples of a backward pass, as a share of a step's, and the ways TRL generates and keeps activations. The last one is not
# tried unless named: on a processor, continuous batching takes many times as long and gigabytes for its cache.
TRL_VARIANTS: dict[str, dict[str, Any]] = {
    "whole batch": dict(share=1, continuous_batching=False, gradient_checkpointing=False),
    "1/4 of it": dict(share=4, continuous_batching=False, gradient_checkpointing=False),
    "1/16 of it": dict(share=16, continuous_batching=False, gradient_checkpointing=False),
    "1/16, recomputed": dict(share=16, continuous_batching=False, gradient_checkpointing=True),
    "1/4, continuous": dict(share=4, continuous_batching=True, gradient_checkpointing=False),
}


@dataclass
class Measured:
    """What steps of one side took, over all of its processes."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    generate: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    end_bytes: int = 0
    imported_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, result: dict[str, Any], warm_up: int) -> None:
        for before, after in pairwise(result["marks"][warm_up - 1 :]):
            self.seconds.append(after["clock"] - before["clock"])
            self.processor.append(after["processor"] - before["processor"])
            self.generate.append(after["generate"] - before["generate"])
            self.tokens.append(after["tokens"] - before["tokens"])
        self.peak_bytes = max(self.peak_bytes, result["marks"][-1]["peak_bytes"])
        self.end_bytes = max(self.end_bytes, result["end_bytes"])
        self.imported_bytes = max(self.imported_bytes, result["imported_bytes"])
        self.versions = result["versions"]

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def step_processor(self) -> float:
        return statistics.median(self.processor)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def tokens_per_processor_second(self) -> float:
        return sum(self.tokens) / sum(self.processor)


def make_trl() -> Path:
    """The Python of TRL's environment, made if it is not there."""
    python, ready = TRL_FOLDER / "bin" / "python", TRL_FOLDER / ".installed"
    if not ready.exists():
        venv.create(TRL_FOLDER, with_pip=True)
        for packages in TRL_PACKAGES:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        ready.touch()
    return python


def prepare(model: str, work: Path) -> Path:
    """The folder of a workload's model and prompts, made once."""
    folder = work / model
    if not (folder / "prompts.jsonl").exists():
        run([sys.executable, HERE / "grpo_models.py", model, folder], folder.with_suffix(".log"))
    return folder


def run(command: list[Any], log: Path) -> None:
    """Run a side; its output goes to a file, whose end is shown if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}
        )
    if done.returncode:
        raise RuntimeError(f"{command[1]} failed:\n{log.read_text()[-2000:]}")


class Bench:
    """One workload: its spec, and running a side on it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.folder = options.work / name
        chosen = dict(WORKLOADS[name])
        model, tokens = prepare(chosen.pop("model"), options.work), chosen.pop("tokens")
        self.spec = {
            **chosen,
            "model": str(model / "model"),
            "prompts": str(model / "prompts.jsonl"),
            "samples_per_prompt": 8,
            "steps": options.warm_up + options.steps,
            "lr": 1e-6,
            "threads": options.threads,
            "seed": 0,
            "ours": {"tokens_per_microbatch": options.tokens_per_microbatch or tokens},
        }

    def side(self, python: Path | str, script: str, into: Measured, **more: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        spec, result = self.folder / "spec.json", self.folder / "result.json"
        spec.write_text(json.dumps({**self.spec, **more}))
        run([python, HERE / script, spec, result], self.folder / f"{script}.log")
        into.add(json.loads(result.read_text()), self.options.warm_up)

    def ours(self, into: Measured) -> None:
        self.side(sys.executable, "grpo_ours.py", into)

    def trl(self, python: Path, variant: str, into: Measured) -> None:
        chosen = dict(TRL_VARIANTS[variant])
        samples = self.spec["prompts_per_step"] * self.spec["samples_per_prompt"]
        chosen["per_device_train_batch_size"] = max(1, samples // chosen.pop("share"))
        self.side(python, "grpo_trl.py", into, trl=chosen)


def compare(console: Console, bench: Bench, python: Path | None) -> None:
    """Try TRL's settings, let its fastest take turns with ours, and print both."""
    ours, variants = Measured(), {}
    if python is not None:
        for name in bench.options.variants:
            bench.trl(python, name, variants.setdefault(name, Measured()))
    best = max(variants, key=lambda name: variants[name].tokens_per_processor_second, default=None)
    ratios = []
    for _ in range(bench.options.rounds):
        own_round, their_round = Measured(), Measured()
        bench.ours(own_round)
        if best is not None:
            bench.trl(python, best, their_round)
            ratios.append(own_round.tokens_per_second / their_round.tokens_per_second)
        for total, part in ((ours, own_round), (variants.get(best), their_round)):
            if total is not None and part.seconds:
                merge(total, part)
    report(console, bench, {"meshloom": ours, **{f"TRL, {name}": m for name, m in variants.items()}})
    if best is not None:
        summary(console, bench.name, ours, best, variants[best], ratios)


def merge(total: Measured, part: Measured) -> None:
    for name in ("seconds", "processor", "generate", "tokens"):
        getattr(total, name).extend(getattr(part, name))
    for name in ("peak_bytes", "end_bytes", "imported_bytes"):
        setattr(total, name, max(getattr(total, name), getattr(part, name)))
    total.versions = part.versions


def report(console: Console, bench: Bench, sides: dict[str, Measured]) -> None:
    spec = bench.spec
    lengths = "equal by force" if spec["equal_lengths"] else "as the model gives them"
    console.print(
        f"{bench.name}: {spec['prompts_per_step']} prompts × {spec['samples_per_prompt']} samples a step, "
        f"at most {spec['max_response_tokens']} tokens, lengths {lengths}; {spec['threads']} threads",
        highlight=False,
    )
    table = Table()
    headings = (
        "steps",
        "s/step",
        "generate s",
        "processor s",
        "response tokens",
        "tokens/s",
        "peak MiB",
        "of it imports",
    )
    for heading in ("side", *headings):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for name, m in sides.items():
        table.add_row(
            name,
            str(len(m.seconds)),
            f"{m.step:.2f}",
            f"{statistics.median(m.generate):.2f}",
            f"{m.step_processor:.2f}",
            f"{statistics.mean(m.tokens):,.0f}",
            f"{m.tokens_per_second:,.0f}",
            f"{m.peak_bytes / 2**20:,.0f}",
            f"{m.imported_bytes / 2**20:,.0f}",
        )
    console.print(table)
    for side in sides.values():
        versions = ", ".join(f"{name} {number}" for name, number in side.versions.items())
        console.print(f"{versions}; {side.end_bytes / 2**20:,.0f} MiB at the end of the process", highlight=False)


def summary(console: Console, name: str, ours: Measured, best: str, theirs: Measured, ratios: list[float]) -> None:
    per_processor = ours.tokens_per_processor_second / theirs.tokens_per_processor_second
    rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    console.print(
        f"ratio ({name}): tokens a second ÷ TRL's ({best}) = {statistics.median(ratios):.2f} on the clock "
        f"(rounds: {rounds}), {per_processor:.2f} in processor time; seconds a step: {theirs.step / ours.step:.2f}; "
        f"peak memory ÷ TRL's = {ours.peak_bytes / theirs.peak_bytes:.2f}\n",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a smoke run")
    parser.add_argument("--only-ours", action="store_true", help="without TRL")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", default=list(TRL_VARIANTS)[:-1], choices=list(TRL_VARIANTS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--warm-up", type=int, default=1, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=2, help="steps of a process that count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens-per-microbatch", type=int)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench", help="folder for models and results")
    options = parser.parse_args()
    options.work = options.work.resolve()
    if options.tiny:
        options.steps, options.rounds = 1, 1
    console = Console(width=max(Console().width, 128))
    python = None if options.only_ours else make_trl()
    default = ["tiny"] if options.tiny else [name for name in WORKLOADS if name != "tiny"]
    for name in options.workloads or default:
        compare(console, Bench(name, options), python)


if __name__ == "__main__":
    main()
