"""The whole-step benchmark's own side: ``meshloom train`` as a user runs it, with a logger that notes clocks.

Usage: python bench/grpo_ours.py SPEC.json RESULT.json   (see ``grpo_step.py`` for what a spec holds)
"""

import json
import shutil
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from memory import peak_bytes

from meshloom.config.settings import TrainSettings
from meshloom.loop.train import run_training
from meshloom.observe.loggers import LoggerContext, register_logger

MARKS: list[dict[str, float]] = []


@register_logger("marks")
class MarksLogger:
    """Clocks and totals at the end of each step."""

    def __init__(self, context: LoggerContext) -> None:
        self.generate_s, self.tokens = 0.0, 0.0

    def log(self, record: Mapping[str, Any]) -> None:
        seconds = sum(record["phases"].values())
        self.generate_s += record["phases"]["generate"]
        self.tokens += record["metrics"]["response_tokens_per_second"] * seconds
        MARKS.append(
            {
                "clock": time.perf_counter(),
                "processor": time.process_time(),
                "generate": self.generate_s,
                "tokens": self.tokens,
                "peak_bytes": peak_bytes(),
            }
        )

    def close(self) -> None:
        pass


def settings_of(spec: dict[str, Any], run_dir: Path, prompts: Path) -> TrainSettings:
    """The spec as settings of a run: one update a step, no reference, nothing saved between the steps."""
    return TrainSettings.model_validate(
        {
            "run_dir": str(run_dir),
            "seed": spec["seed"],
            "device": "cpu",
            "model": {"path": spec["model"], "dtype": "float32"},
            "data": {"train": {"files": [str(prompts)]}},
            "reward": {"function": f"{Path(__file__).with_name('grpo_reward.py')}:score"},
            "rollout": {
                "max_response_tokens": spec["max_response_tokens"],
                "ignore_eos": spec["equal_lengths"],
                "max_sequences": spec["prompts_per_step"] * spec["samples_per_prompt"],
            },
            "batch": {
                "prompts_per_step": spec["prompts_per_step"],
                "samples_per_prompt": spec["samples_per_prompt"],
                "steps": spec["steps"],
                "tokens_per_microbatch": spec["ours"]["tokens_per_microbatch"],
            },
            "optimizer": {"lr": spec["lr"], "weight_decay": 0.0},
            "checkpoint": {"every_steps": 0},
            "logging": {"loggers": ["marks"], "table": False},
        }
    )


def main() -> None:
    spec, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(spec["threads"])
    imported = peak_bytes()
    run_dir, prompts = result.parent / "ours", result.parent / "prompts.jsonl"
    shutil.rmtree(run_dir, ignore_errors=True)
    lines = Path(spec["prompts"]).read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[: spec["prompts_per_step"]]))
    run_training(settings_of(spec, run_dir, prompts), resume=False)
    versions = {name: version(name) for name in ("meshloom", "torch", "transformers")}
    result.write_text(
        json.dumps({"marks": MARKS, "imported_bytes": imported, "end_bytes": peak_bytes(), "versions": versions})
    )


if __name__ == "__main__":
    main()
