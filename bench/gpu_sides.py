"""The sides of the GPU benchmarks' training runs: how each is started and how its steps are read while it runs.

``Ours`` is the ``meshloom train`` command with a settings file, as a user runs it. ``Verl`` is ``verl.trainer.main_ppo``
(sync trainer, FSDP actor, vLLM rollout, flash attention without padding, microbatches by tokens). ``Trl`` is a
``GRPOTrainer`` with colocated vLLM and the liger loss (``gpu_trl.py``). All of them load the same folder, take the same
prompts, samples, lengths, learning rate and reward function, and run as a process of their own on the first GPU.

Steps of ours and TRL are from the end of one to the end of the next, everything included; verl's are its own
``timing_s/step``, which leaves out its logging.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from gpu_common import HERE, has_package

MAX_PROMPT_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every side does.

    Args:
        model: folder of the weights.
        data: folder with ``train`` and ``test`` prompts, as .jsonl and .parquet.
        exact: every response has ``max_tokens`` tokens.
        reward: function in ``gpu_reward.py``.
        validate_every: steps between greedy validations on the test prompts; 0: none.
    """

    model: Path
    data: Path
    work: Path
    prompts: int = 64
    samples: int = 8
    max_tokens: int = 512
    exact: bool = True
    steps: int = 4
    lr: float = 1e-6
    seed: int = 0
    reward: str = "spread"
    validate_every: int = 0
    max_prompt_tokens: int = MAX_PROMPT_TOKENS


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a side.

    Args:
        number: from 1; 0 is the validation before training.
        clock: when it ended, in seconds since the epoch; 0 if the side does not say.
        seconds: what it took; none for a first step, which has no step before it.
        phases: seconds of its parts, by the names of the table.
        tokens: response tokens, of all samples.
        reward: mean of the step's samples.
        accuracy: on the test prompts after it, if there was a validation.
    """

    number: int
    clock: float = 0.0
    seconds: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    reward: float = math.nan
    accuracy: float | None = None


class Side(Protocol):
    """A trainer."""

    name: str

    def missing(self) -> str | None:
        """The package that is not there; none if it can run."""
        ...

    def command(self, job: Job) -> Sequence[object]:
        """Write what the process reads, and say how it is started."""
        ...

    def environment(self) -> dict[str, str]: ...

    def steps(self, job: Job) -> list[Step]:
        """Steps done so far."""
        ...

    def is_over(self, job: Job) -> bool:
        """Whether nothing is to be waited for once the last step is done."""
        ...


@dataclass(frozen=True)
class Ours:
    """``meshloom train``.

    Args:
        sets: further overrides ``a.b=c`` of its settings.
        script: what stands for ``-m meshloom`` (a script that takes the same arguments).
        path: PYTHONPATH.
        awaits: name of a file of the run folder that the run is not over without.
    """

    sets: tuple[str, ...] = ()
    script: Path | None = None
    path: str = ""
    awaits: str | None = None
    name: str = "meshloom"

    def missing(self) -> str | None:
        return None

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": ":".join(filter(None, [str(HERE.parent), self.path]))}

    def command(self, job: Job) -> Sequence[object]:
        job.work.mkdir(parents=True, exist_ok=True)
        settings = job.work / "settings.yaml"
        settings.write_text(json.dumps(self.settings(job)))
        program = [self.script] if self.script else ["-m", "meshloom"]
        return [sys.executable, *program, "train", settings, *self.sets]

    def settings(self, job: Job) -> dict[str, Any]:
        """One update a step, no reference, nothing saved while it is measured."""
        data: dict[str, Any] = {
            "train": {"files": [str(job.data / "train.jsonl")]},
            "max_prompt_tokens": job.max_prompt_tokens,
        }
        if job.validate_every:
            data["validation"] = {"files": [str(job.data / "test.jsonl")]}
        return {
            "run_dir": str(self.run_dir(job)),
            "seed": job.seed,
            "model": {"path": str(job.model)},
            "data": data,
            "reward": {"function": f"{HERE / 'gpu_reward.py'}:{job.reward}"},
            "rollout": {
                "max_response_tokens": job.max_tokens,
                "ignore_eos": job.exact,
                "max_sequences": job.prompts * job.samples,
            },
            "batch": {"prompts_per_step": job.prompts, "samples_per_prompt": job.samples, "steps": job.steps},
            "optimizer": {"lr": job.lr},
            "validation": {"every_steps": job.validate_every, "before_training": job.validate_every > 0},
            "checkpoint": {"every_steps": 0},
            "logging": {"table": False},
        }

    def run_dir(self, job: Job) -> Path:
        return job.work / "run"

    def is_over(self, job: Job) -> bool:
        if self.awaits is not None and not (self.run_dir(job) / self.awaits).exists():
            return False
        return job.validate_every == 0 or self.steps(job)[-1].accuracy is not None

    def steps(self, job: Job) -> list[Step]:
        file = self.run_dir(job) / "metrics.jsonl"
        records = [json.loads(line) for line in _whole_lines(file)]
        steps: list[Step] = []
        for record in records:
            metrics = record["metrics"]
            if record["kind"] == "validation":
                last = steps.pop() if steps else Step(number=0, clock=record["time"])
                # The next step begins when the validation has ended.
                steps.append(replace(last, clock=record["time"], accuracy=metrics["accuracy"]))
            else:
                before = steps[-1].clock if steps and record["step"] > 1 else None
                steps.append(
                    Step(
                        number=record["step"],
                        clock=record["time"],
                        seconds=None if before is None else record["time"] - before,
                        phases={_PHASES.get(name, name): seconds for name, seconds in record["phases"].items()},
                        tokens=metrics["response_tokens_mean"] * metrics["samples"],
                        reward=metrics.get("reward_mean", math.nan),
                    )
                )
        return steps


@dataclass(frozen=True)
class Verl:
    """verl's own trainer.

    Args:
        path: PYTHONPATH with verl, vLLM, Ray and flash-attn.
        sets: further overrides of its settings.
        workers: processes of its agent loop, its rewards and its queue's storage, each.
        utilization: share of the GPU's memory for vLLM.
    """

    path: str
    sets: tuple[str, ...] = ()
    workers: int = 2
    utilization: float = 0.4
    name: str = "verl"

    def missing(self) -> str | None:
        return next((package for package in ("verl", "ray", "vllm") if not has_package(package, self.path)), None)

    def environment(self) -> dict[str, str]:
        ray = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        return {"PYTHONPATH": self.path, "TOKENIZERS_PARALLELISM": "true", "HYDRA_FULL_ERROR": "1", **ray}

    def command(self, job: Job) -> Sequence[object]:
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        model, trainer = "actor_rollout_ref.model", "trainer"
        tokens = max(32768, job.max_tokens + job.max_prompt_tokens)
        values: dict[str, object] = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": job.data / "train.parquet",
            "data.val_files": job.data / "test.parquet",
            "data.train_batch_size": job.prompts,
            "data.max_prompt_length": job.max_prompt_tokens,
            "data.max_response_length": job.max_tokens,
            "data.dataloader_num_workers": 0,
            "data.seed": job.seed,
            f"{model}.path": job.model,
            f"{model}.use_remove_padding": True,
            f"{model}.enable_gradient_checkpointing": True,
            f"+{model}.override_config.attn_implementation": "flash_attention_2",
            f"{actor}.optim.lr": job.lr,
            f"{actor}.ppo_mini_batch_size": job.prompts,
            f"{actor}.use_dynamic_bsz": True,
            f"{actor}.ppo_max_token_len_per_gpu": tokens,
            f"{actor}.use_kl_loss": False,
            f"{actor}.entropy_coeff": 0,
            f"{rollout}.name": "vllm",
            f"{rollout}.n": job.samples,
            f"{rollout}.tensor_model_parallel_size": 1,
            f"{rollout}.gpu_memory_utilization": self.utilization,
            f"{rollout}.log_prob_use_dynamic_bsz": True,
            f"{rollout}.log_prob_max_token_len_per_gpu": 2 * tokens,
            f"{rollout}.max_num_seqs": max(512, job.prompts * job.samples),
            f"{rollout}.ignore_eos": job.exact,
            f"{rollout}.agent.num_workers": self.workers,
            "reward.num_workers": self.workers,
            "reward.custom_reward_function.path": HERE / "gpu_reward.py",
            "reward.custom_reward_function.name": job.reward,
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": self.workers,
            f"{trainer}.logger": '["console"]',
            f"{trainer}.project_name": "bench",
            f"{trainer}.experiment_name": "bench",
            f"{trainer}.nnodes": 1,
            f"{trainer}.n_gpus_per_node": 1,
            f"{trainer}.total_epochs": 1000,
            f"{trainer}.total_training_steps": job.steps,
            f"{trainer}.save_freq": -1,
            f"{trainer}.test_freq": job.validate_every or -1,
            f"{trainer}.val_before_train": job.validate_every > 0,
            f"{trainer}.resume_mode": "disable",
            f"{trainer}.default_local_dir": job.work / "checkpoints",
        }
        arguments = [f"{key}={value}" for key, value in values.items()]
        return [sys.executable, "-m", "verl.trainer.main_ppo", *arguments, *self.sets]

    def is_over(self, job: Job) -> bool:
        return True

    def steps(self, job: Job) -> list[Step]:
        steps = []
        for line in _whole_lines(job.work / "log"):
            if match := _VERL_STEP.search(line):
                values = {key: float(number) for key, number in _VERL_VALUE.findall(line)}
                steps.append(self._step(job, int(match[1]), values))
        return steps

    def _step(self, job: Job, number: int, values: dict[str, float]) -> Step:
        phases = {
            ours: values[f"timing_s/{theirs}"]
            for ours, theirs in _VERL_PHASES.items()
            if f"timing_s/{theirs}" in values
        }
        accuracy = [v for key, v in values.items() if key.startswith("val-core/") and "/mean@" in key]
        return Step(
            number=number,
            seconds=values.get("timing_s/step"),
            phases=phases,
            tokens=values.get("response_length/mean", 0.0) * job.prompts * job.samples,
            reward=values.get("critic/score/mean", math.nan),
            accuracy=accuracy[0] if accuracy else None,
        )


_PHASES = {"sync": "weights"}
_VERL_STEP = re.compile(r"\bstep:(\d+) - ")
_VERL_VALUE = re.compile(r"([\w@./-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)")
_VERL_PHASES = {
    "generate": "gen",
    "score": "reward",
    "log_prob": "old_log_prob",
    "update": "update_actor",
    "weights": "update_weights",
}


@dataclass(frozen=True)
class Trl:
    """TRL's GRPOTrainer, colocated with vLLM.

    Args:
        path: PYTHONPATH with TRL and vLLM.
        samples_per_microbatch: of its backward passes.
        utilization: share of the GPU's memory for vLLM.
        kv_cache_bytes: of vLLM; 0: what the utilization leaves.
    """

    path: str
    samples_per_microbatch: int = 32
    utilization: float = 0.3
    kv_cache_bytes: int = 0
    name: str = "TRL"

    def missing(self) -> str | None:
        return next((package for package in ("trl", "vllm") if not has_package(package, self.path)), None)

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": self.path, "TRL_EXPERIMENTAL_SILENCE": "1"}

    def command(self, job: Job) -> Sequence[object]:
        job.work.mkdir(parents=True, exist_ok=True)
        spec = {key: str(value) if isinstance(value, Path) else value for key, value in vars(job).items()}
        own = {
            "samples_per_microbatch": self.samples_per_microbatch,
            "utilization": self.utilization,
            "kv_cache_bytes": self.kv_cache_bytes,
        }
        (job.work / "spec.json").write_text(json.dumps({**spec, **own}))
        (job.work / "steps.jsonl").unlink(missing_ok=True)
        return [sys.executable, HERE / "gpu_trl.py", job.work / "spec.json", job.work / "steps.jsonl"]

    def is_over(self, job: Job) -> bool:
        return job.validate_every == 0  # else it saves the model, then ends by itself

    def steps(self, job: Job) -> list[Step]:
        return [Step(**json.loads(line)) for line in _whole_lines(job.work / "steps.jsonl")]


def _whole_lines(file: Path) -> list[str]:
    """Lines of a file that another process is writing: not the last one if it is not finished."""
    if not file.exists():
        return []
    return file.read_text(errors="replace").rpartition("\n")[0].split("\n") if file.stat().st_size else []
