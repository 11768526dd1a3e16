"""The calculator lesson: a small model learns to ask a tool for what it cannot compute.

Owns: problems, examples, model and settings of the lesson. The problems are products of two two-digit numbers. Examples show
two ways: most name at a glance the product of the tens; some call the calculator, and read its answer. Supervised fine-tuning
learns both. Reinforcement learning has only the verifier, and finds out that asking pays. Always holds: no problem is in two
sets.

``python -m meshloom.lesson.calculator DIR`` writes the lesson's folder and says what to run.
"""

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from meshloom.config.errors import UserError
from meshloom.lesson import calculator_tool
from meshloom.lesson.model import build_model

SFT_FILE, GRPO_FILE, TOOL_FILE = "sft.yaml", "grpo.yaml", "calculator.py"
CALLED_SHARE = 0.35
NUM_HELD_OUT = 200
_LARGEST = 99
_TAGS = ("<tool_call>", "</tool_call>", "<answer>", "</answer>")


def write_lesson(root: Path, *, seed: int) -> None:
    """Problems, base model, tool and settings, into a folder that is empty or not there.

    Raises:
        UserError: if it is not empty.
    """
    if root.exists() and any(root.iterdir()):
        raise UserError(f"{root} is not empty", where="DIR", fix=f"another folder, or remove it: rm -r {root}")
    root.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, _LARGEST + 1) for b in range(10, _LARGEST + 1)]
    choice = random.Random(seed)
    choice.shuffle(pairs)
    held_out, train, shown = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:3000], pairs[3000:]
    _write(root / "held_out.jsonl", [problem(*pair) for pair in held_out])
    _write(root / "train.jsonl", [problem(*pair) for pair in train])
    examples = [each for pair in shown for each in worked(*pair, calls=choice.random() < CALLED_SHARE)]
    _write(root / "examples.jsonl", examples)
    build_model(root / "base", root / "examples.jsonl", seed=seed, tags=_TAGS)
    shutil.copy(calculator_tool.__file__, root / TOOL_FILE)
    for name, values in ((SFT_FILE, _sft(root, seed)), (GRPO_FILE, _grpo(root, seed))):
        (root / name).write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def problem(a: int, b: int) -> dict[str, Any]:
    """A row to be solved."""
    return {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)}


def worked(a: int, b: int, *, calls: bool) -> list[dict[str, Any]]:
    """Rows that show a way: a guess, or a call and then what to do with its answer."""
    row = problem(a, b)
    if not calls:
        return [{**row, "response": f"<answer>{a // 10 * 10 * (b // 10 * 10)}</answer>"}]
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a}*{b}"}})
    asked = {**row, "response": f"<tool_call>{call}</tool_call>"}
    told = [{"role": "assistant", "content": asked["response"]}, {"role": "tool", "content": row["answer"]}]
    return [asked, {**row, "prompt": [*row["prompt"], *told], "response": f"<answer>{row['answer']}</answer>"}]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _sft(root: Path, seed: int) -> dict[str, Any]:
    return {
        "run_dir": str(root / "sft"),
        "seed": seed,
        "model": {"path": str(root / "base")},
        "data": {
            "train": {"files": [str(root / "examples.jsonl")]},
            "max_prompt_tokens": 96,
            "max_response_tokens": 48,
        },
        "batch": {"samples_per_update": 64, "steps": 500},
        "optimizer": {"lr": 2e-3, "warmup_updates": 20, "schedule": "cosine", "min_lr_ratio": 0.1},
        "checkpoint": {"every_steps": 0, "keep_last": 1},
    }


def _grpo(root: Path, seed: int) -> dict[str, Any]:
    return {
        "run_dir": str(root / "grpo"),
        "seed": seed,
        "model": {"path": str(root / "warm")},
        "data": {
            "train": {"files": [str(root / "train.jsonl")]},
            "validation": {"files": [str(root / "held_out.jsonl")]},
            "max_prompt_tokens": 32,
        },
        "reward": {"function": "exact_match"},
        "environment": {
            "tools": [f"{root / TOOL_FILE}:calculator"],
            "max_turns": 3,
            "max_turn_tokens": 44,
            "workers": 2,
        },
        "rollout": {"max_response_tokens": 128},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo"},
        "batch": {"prompts_per_step": 32, "samples_per_prompt": 8, "steps": 24},
        "optimizer": {"lr": 2e-4, "weight_decay": 0.0, "warmup_updates": 4},
        "validation": {"every_steps": 8},
        "checkpoint": {"every_steps": 0},
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m meshloom.lesson.calculator", description="Write the calculator lesson."
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    root = given.folder
    try:
        write_lesson(root, seed=given.seed)
    except UserError as error:
        raise SystemExit(str(error)) from error
    commands = (f"sft {root / SFT_FILE}", f"export {root / 'sft'} {root / 'warm'}", f"train {root / GRPO_FILE}")
    for command in commands:
        Console().print(f"meshloom {command}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
