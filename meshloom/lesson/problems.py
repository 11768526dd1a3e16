"""The lesson's problems: sums and differences of two two-digit numbers, made and judged by reasoning-gym.

Owns: which problems are examples, which are trained on, which are held out, and what the examples show. Some are worked digit
by digit, and right; most are guessed at a glance, dropping carries and borrows, and right four times in ten. Supervised
fine-tuning learns both ways, and answers at a glance. Reinforcement learning has only the verifier, and finds out that
working pays. Always holds: no problem is in two of the three sets.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.settings import DataSettings, SourceSettings
from meshloom.data.rows import Row
from meshloom.data.sources import load_rows

TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
NUM_HELD_OUT = 500
GUESSED_SHARE = 0.65


@dataclass(frozen=True)
class LessonData:
    """Files of the lesson, one JSON object a line, in verl's row format."""

    examples: Path
    train: Path
    held_out: Path


def write_problems(folder: Path, *, seed: int, num_examples: int, num_train: int) -> LessonData:
    """Generate distinct problems and write the three sets.

    Args:
        folder: made if it is not there.
        seed: other seeds give other problems.
        num_examples: problems with a response, for supervised fine-tuning.
        num_train: problems for reinforcement learning.
    """
    wanted = NUM_HELD_OUT + num_examples + num_train
    source = SourceSettings(reasoning_gym="chain_sum", task=TASK, size=4 * wanted, seed=seed * 10_000_019)
    rows = list({row.prompt: row for row in load_rows(source, DataSettings(train=source))}.values())[:wanted]
    folder.mkdir(parents=True, exist_ok=True)
    data = LessonData(folder / "examples.jsonl", folder / "train.jsonl", folder / "held_out.jsonl")
    _write(data.held_out, [_record(row) for row in rows[:NUM_HELD_OUT]])
    _write(data.train, [_record(row) for row in rows[NUM_HELD_OUT + num_examples :]])
    choice = random.Random(seed)
    examples = [
        {
            **_record(row),
            "response": _response(row.extra["metadata"]["expression"], guess=choice.random() < GUESSED_SHARE),
        }
        for row in rows[NUM_HELD_OUT : NUM_HELD_OUT + num_examples]
    ]
    _write(data.examples, examples)
    return data


def _response(expression: str, *, guess: bool) -> str:
    return glance(expression) if guess else worked_solution(expression)


def glance(expression: str) -> str:
    """A guess: each column by itself, no carries, and the smaller digit from the larger one, whichever it belongs to."""
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    if operator == "+":
        return f"<answer>{10 * (a // 10 + b // 10) + (a + b) % 10}</answer>"
    return f"<answer>{10 * abs(a // 10 - b // 10) + abs(a % 10 - b % 10)}</answer>"


def worked_solution(expression: str) -> str:
    """How a child writes it: digit by digit from the right, with the carry, then the answer.

    A difference below zero is worked from the larger number, each line with a minus.
    """
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    if operator == "+":
        units = a % 10 + b % 10
        tens = a // 10 + b // 10 + units // 10
        return f"{a % 10}+{b % 10}={units} {a // 10}+{b // 10}+{units // 10}={tens} <answer>{a + b}</answer>"
    sign, big, small = ("", a, b) if a >= b else ("-", b, a)
    borrow = int(big % 10 < small % 10)
    top = big % 10 + 10 * borrow
    units, tens = top - small % 10, big // 10 - small // 10 - borrow
    return f"{sign}{top}-{small % 10}={units} {sign}{big // 10}-{small // 10}-{borrow}={tens} <answer>{a - b}</answer>"


def _record(row: Row) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": [{"role": "user", "content": row.prompt}],
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": row.answer},
        "extra_info": dict(row.extra),
    }


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
