"""The whole-step benchmark's other side: TRL's GRPOTrainer, run by the Python of TRL's own environment.

Usage: python bench/grpo_trl.py SPEC.json RESULT.json   (see ``grpo_step.py`` for what a spec holds)
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from grpo_reward import score
from memory import peak_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list, answer: list[str], **columns: object) -> list[float]:
    """``score`` in TRL's form: chats give their last message, texts come as they are."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [score("bench", text, wanted) for text, wanted in zip(texts, answer, strict=True)]


class TimedTrainer(GRPOTrainer):
    """Notes the seconds spent in generation and the tokens it gave."""

    generate_s, response_tokens = 0.0, 0

    def _generate_single_turn(self, *args: object, **kwargs: object) -> tuple:
        start = time.perf_counter()
        completions, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.generate_s += time.perf_counter() - start
        self.response_tokens += sum(map(len, completions))
        return completions, logprobs


class Marks(TrainerCallback):
    """Clocks and totals at the end of each step."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.marks: list[dict[str, float]] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.marks.append(
            {
                "clock": time.perf_counter(),
                "processor": time.process_time(),
                "generate": self.trainer.generate_s,
                "tokens": self.trainer.response_tokens,
                "peak_bytes": peak_bytes(),
            }
        )


def config(spec: dict, out: Path) -> GRPOConfig:
    """The spec as TRL's own settings: one generation and one update a step, no reference, nothing saved."""
    samples = spec["prompts_per_step"] * spec["samples_per_prompt"]
    batch = min(spec["trl"]["per_device_train_batch_size"], samples)
    return GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=samples // batch,
        num_generations=spec["samples_per_prompt"],
        max_completion_length=spec["max_response_tokens"],
        generation_kwargs={"min_new_tokens": spec["max_response_tokens"]} if spec["equal_lengths"] else None,
        use_transformers_continuous_batching=spec["trl"]["continuous_batching"],
        gradient_checkpointing=spec["trl"]["gradient_checkpointing"],
        temperature=1.0,
        beta=0.0,
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=spec["steps"],
        bf16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=spec["seed"],
    )


def main() -> None:
    spec, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(spec["threads"])
    imported = peak_bytes()
    rows = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()][: spec["prompts_per_step"]]
    marks = Marks()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config(spec, result.parent / "trl"),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[marks],
    )
    marks.trainer = trainer
    trainer.train()
    versions = {name: version(name) for name in ("trl", "torch", "transformers")}
    result.write_text(
        json.dumps({"marks": marks.marks, "imported_bytes": imported, "end_bytes": peak_bytes(), "versions": versions})
    )


if __name__ == "__main__":
    main()
