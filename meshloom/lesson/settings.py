"""The settings of the lesson's two runs, as files a user can read, change and run again.

Owns: the numbers of the lesson. Always holds: what ``quickstart`` runs is what the files say.
"""

from pathlib import Path
from typing import Any

import yaml

from meshloom.lesson.problems import LessonData

SFT_FILE, GRPO_FILE = "sft.yaml", "grpo.yaml"


def write_settings(root: Path, *, base: Path, warm: Path, data: LessonData, seed: int, small: bool) -> None:
    """Write ``sft.yaml`` and ``grpo.yaml`` into the lesson's folder.

    Args:
        root: folder of the lesson.
        base: the model that is warmed.
        warm: the folder of the warmed model.
        data: the problems.
        seed: of both runs.
        small: for the lesson's own small model; false: for a pretrained one.
    """
    (root / SFT_FILE).write_text(_yaml(_sft(root, base, data, seed, small)), encoding="utf-8")
    (root / GRPO_FILE).write_text(_yaml(_grpo(root, warm, data, seed, small)), encoding="utf-8")


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _data(train: Path) -> dict[str, Any]:
    return {"train": {"files": [str(train)]}, "max_prompt_tokens": 128}


def _sft(root: Path, base: Path, data: LessonData, seed: int, small: bool) -> dict[str, Any]:
    return {
        "run_dir": str(root / "sft"),
        "seed": seed,
        "model": {"path": str(base)},
        "data": {**_data(data.examples), "max_response_tokens": 64},
        "batch": {"samples_per_update": 128 if small else 32, "steps": 580 if small else 40},
        "optimizer": {
            "lr": 2e-3 if small else 2e-5,
            "warmup_updates": 10,
            "schedule": "cosine",
            "min_lr_ratio": 0.1,
        },
        "checkpoint": {"every_steps": 0, "keep_last": 1},
    }


def _grpo(root: Path, warm: Path, data: LessonData, seed: int, small: bool) -> dict[str, Any]:
    return {
        "run_dir": str(root / "grpo"),
        "seed": seed,
        "model": {"path": str(warm)},
        "data": {**_data(data.train), "validation": {"files": [str(data.held_out)]}},
        "reward": {"function": "reasoning_gym"},
        "rollout": {"max_response_tokens": 40, "max_sequences": 512},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo", "kl": "loss", "kl_coefficient": 0.001},
        "batch": {"prompts_per_step": 64, "samples_per_prompt": 8, "steps": 70},
        "optimizer": {
            "lr": 2e-4 if small else 2e-6,
            "weight_decay": 0.0,
            "warmup_updates": 10,
        },
        "validation": {"every_steps": 20},
        "checkpoint": {"every_steps": 20},
    }
