"""TRL's side of the GPU benchmarks: GRPOTrainer with colocated vLLM and the liger loss.

Usage: python bench/gpu_trl.py SPEC.json STEPS.jsonl   (``gpu_sides.Trl`` writes the spec and reads the steps)
"""

import json
import sys
import time
from functools import partialmethod
from pathlib import Path

import gpu_reward
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM


class TimedTrainer(GRPOTrainer):
    """Notes the seconds spent in generation, vLLM's new weights included, and what it gave."""

    generate_s, tokens, rewards = 0.0, 0, 0.0

    def _generate_single_turn(self, *args: object, **kwargs: object) -> tuple:
        start = time.perf_counter()
        given = super()._generate_single_turn(*args, **kwargs)
        self.generate_s += time.perf_counter() - start
        self.tokens += sum(map(len, given[0]))
        return given


class Marks(TrainerCallback):
    """Writes a line at the end of each step."""

    def __init__(self, file: Path) -> None:
        self.file, self.trainer, self.before, self.rewards = file, None, None, []

    def on_step_end(self, args: object, state: object, *more: object, **kwargs: object) -> None:
        torch.cuda.synchronize()
        now, trainer = time.time(), self.trainer
        record = {
            "number": state.global_step,
            "clock": now,
            "seconds": None if self.before is None else now - self.before,
            "phases": {"generate": trainer.generate_s},
            "tokens": trainer.tokens,
            "reward": sum(self.rewards) / max(1, len(self.rewards)),
        }
        self.before, trainer.generate_s, trainer.tokens = now, 0.0, 0
        self.rewards.clear()
        with self.file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def config(spec: dict) -> GRPOConfig:
    """One generation and one update a step, no reference, nothing saved."""
    samples = spec["prompts"] * spec["samples"]
    batch = min(spec["samples_per_microbatch"], samples)
    return GRPOConfig(
        output_dir=f"{spec['work']}/out",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=samples // batch,
        num_generations=spec["samples"],
        max_completion_length=spec["max_tokens"],
        max_steps=spec["steps"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=True,
        gradient_checkpointing=True,
        temperature=1.0,
        use_liger_kernel=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=spec["utilization"],
        vllm_max_model_length=spec["max_prompt_tokens"] + spec["max_tokens"],
        vllm_enable_sleep_mode=False,
        generation_kwargs={"ignore_eos": True} if spec["exact"] else None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=spec["seed"],
    )


def main() -> None:
    spec, marks = json.loads(Path(sys.argv[1]).read_text()), Marks(Path(sys.argv[2]))
    if spec["kv_cache_bytes"]:
        LLM.__init__ = partialmethod(LLM.__init__, kv_cache_memory_bytes=spec["kv_cache_bytes"])
    score = getattr(gpu_reward, spec["reward"])

    def reward(completions: list, answer: list[str], **columns: object) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        scores = [score("bench", text, wanted) for text, wanted in zip(texts, answer, strict=True)]
        marks.rewards.extend(scores)
        return scores

    rows = [json.loads(line) for line in (Path(spec["data"]) / "train.jsonl").read_text().splitlines()]
    trainer = TimedTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=config(spec),
        train_dataset=Dataset.from_list(rows),
        callbacks=[marks],
    )
    marks.trainer = trainer
    trainer.train()
    if spec["validate_every"]:
        trainer.save_model(f"{spec['work']}/trained")


if __name__ == "__main__":
    main()
