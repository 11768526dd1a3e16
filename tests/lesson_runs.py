"""A model, data and a reward small enough for whole runs in tests, and processes that run them.

The model has a vocabulary of single characters, random weights and two layers; a run of a few steps takes about a second.
Runs that are to be killed live in processes forked from a server that has imported everything, so that their second is
spent in the run.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from meshloom.cli import main
from meshloom.config.load import dump_yaml, load_settings
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.lesson.model import CHAT_TEMPLATE
from meshloom.observe.records import read_metrics
from meshloom.train.checkpoint_store import complete_checkpoints, verify
from tests.models import tiny_reward_model

# Threads that wait for each other cost a tiny model more than they bring.
torch.set_num_threads(1)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = "0123456789+-= \nabcdefghijklmnopqrstuvwxyz"
REWARD = """\
def score(request, slow=0.0):
    import time
    time.sleep(slow)
    text = request.response
    return {"score": sum(c in "02468" for c in text) / max(len(text), 1), "digits": sum(c.isdigit() for c in text)}
"""
MEASURED = {"peak_memory_bytes", "reserved_memory_bytes", "tokens_per_second", "response_tokens_per_second"}
"""Metrics that are times or memory, and differ between two runs that are the same."""


def write_model(
    folder: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE, lacking: int = 0, layers: int = 2
) -> Path:
    """An ordinary model folder; ``lacking``: tokens of the tokenizer that the model does not have."""
    letters = dict.fromkeys([*SPECIAL, *LETTERS])
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    fast.add_special_tokens({"additional_special_tokens": [SPECIAL[1]]})
    fast.chat_template = template
    config = Qwen3Config(
        vocab_size=len(letters) - lacking,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_reward_model(folder: Path, policy: Path, *, seed: int = 7, **changes: Any) -> Path:
    """A reward model with the tokenizer of a policy's folder; ``changes`` are to its configuration."""
    tokenizer = AutoTokenizer.from_pretrained(str(policy))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "head_dim": 8, "max_position_embeddings": 256}
    with torch.random.fork_rng(devices=[]):
        tiny_reward_model("qwen3", seed, **(ids | sizes | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    """Sums, with an answer and a worked response."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{a * 7 % 10}="}],
            "answer": str(a + a * 7 % 10),
            "response": f"it is {a + a * 7 % 10}",
        }
        for a in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_inputs(folder: Path, *, layers: int = 2) -> Path:
    """Model, rows and reward of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", layers=layers)
    write_rows(folder / "train.jsonl", 14)
    write_rows(folder / "held_out.jsonl", 5, first=20)
    (folder / "reward.py").write_text(REWARD)
    return folder


def train_settings(inputs: Path, run_dir: Path, *changes: str) -> TrainSettings:
    """A run with a reference, two updates a step, validation and background checkpoints; ``changes`` as on the command
    line."""
    given = {
        "run_dir": run_dir,
        "seed": 3,
        "device": "cpu",
        "model.path": inputs / "model",
        "data.train.files": f"[{inputs / 'train.jsonl'}]",
        "data.validation.files": f"[{inputs / 'held_out.jsonl'}]",
        "data.max_prompt_tokens": 64,
        "reward.function": f"{inputs / 'reward.py'}:score",
        "reward.workers": 1,
        "rollout.max_response_tokens": 8,
        "algorithm.kl": "loss",
        "algorithm.kl_coefficient": 0.05,
        "batch.prompts_per_step": 4,
        "batch.samples_per_prompt": 3,
        "batch.prompts_per_update": 2,
        "batch.tokens_per_microbatch": 200,
        "batch.steps": 6,
        "optimizer.lr": 5e-3,
        "optimizer.schedule": "linear",
        "validation.every_steps": 2,
        "validation.success_threshold": 0.3,
        "checkpoint.every_steps": 1,
        "checkpoint.keep_last": 2,
        "checkpoint.keep_best": 1,
        "logging.loggers": "[]",
    }
    return load_settings(TrainSettings, None, [*(f"{k}={v}" for k, v in given.items()), *changes])


def sft_settings(inputs: Path, run_dir: Path, *changes: str) -> SftSettings:
    """A supervised run."""
    given = {
        "run_dir": run_dir,
        "seed": 3,
        "device": "cpu",
        "model.path": inputs / "model",
        "data.train.files": f"[{inputs / 'train.jsonl'}]",
        "data.max_prompt_tokens": 64,
        "data.max_response_tokens": 16,
        "batch.samples_per_update": 6,
        "batch.tokens_per_microbatch": 200,
        "batch.steps": 12,
        "optimizer.lr": 5e-3,
        "optimizer.schedule": "cosine",
        "checkpoint.every_steps": 2,
        "logging.loggers": "[]",
    }
    return load_settings(SftSettings, None, [*(f"{k}={v}" for k, v in given.items()), *changes])


def command(settings: TrainSettings | SftSettings, *more: str) -> list[str]:
    """The command line that runs settings; their file is written beside the run folder."""
    run_dir = Path(settings.run_dir)
    file = run_dir.with_name(f"{run_dir.name}.yaml")
    file.write_text(dump_yaml(settings))
    return ["train" if isinstance(settings, TrainSettings) else "sft", str(file), *more]


def start(args: Sequence[str], output: Path) -> BaseProcess:
    """The command in a process of its own, forked from one that has imported all of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lesson_runs", "meshloom.loop.train", "meshloom.loop.sft", "peft"])
    process = context.Process(target=_run, args=(list(args), str(output)))
    process.start()
    return process


def _run(args: list[str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main(args))


def finish(args: Sequence[str], output: Path, timeout: float = 60.0) -> int:
    """Run the command to its end; its exit code."""
    process = start(args, output)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"the run did not end:\n{output.read_text()}")
    return process.exitcode


def go_on(settings: TrainSettings | SftSettings) -> list[str]:
    """What a user types after a run was killed: ``--resume`` where there is a run, the first command again where not yet."""
    there = (Path(settings.run_dir) / "settings.yaml").exists()
    return command(settings, *(["--resume"] if there else []))


def kill(process: BaseProcess) -> bool:
    """SIGKILL; then nothing the process had started may live on. False if it had ended by itself."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        parent.suspend()
        children = parent.children(recursive=True)
    process.kill()
    process.join(30)
    until = time.monotonic() + 20
    while alive := [child for child in children if lives(child)]:
        assert time.monotonic() < until, f"processes survive the run: {alive}"
        time.sleep(0.005)
    return process.exitcode == -signal.SIGKILL


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for by its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(happened: Callable[[], Any], process: BaseProcess, timeout: float = 40.0) -> bool:
    """Whether something happened before the process ended."""
    until = time.monotonic() + timeout
    while process.is_alive():
        if happened():
            return True
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.001)
    return False


def steps_logged(run_dir: Path, kinds: Sequence[str] = ("train", "sft")) -> list[int]:
    """Steps whose record stands in the run folder."""
    with contextlib.suppress(FileNotFoundError):
        return [record["step"] for record in read_metrics(run_dir) if record["kind"] in kinds]
    return []


def whole_checkpoints(run_dir: Path) -> list[int]:
    """Steps of the checkpoints; fails if a folder that is called a checkpoint is not whole."""
    named = sorted((run_dir / "checkpoints").glob("step-*"))
    for checkpoint in named:
        verify(checkpoint)
    assert named == complete_checkpoints(run_dir / "checkpoints")
    return [int(path.name.split("-")[1]) for path in named]


def assert_same_run(one: Path, other: Path, *, only_last: bool = False) -> None:
    """Bit for bit: what the checkpoints hold, all samples, and all metrics but measured times and memory.

    Args:
        one: a run folder.
        other: another.
        only_last: compare the last checkpoints, where the runs were saved after different steps.
    """
    first = -1 if only_last else 0
    assert whole_checkpoints(one)[first:] == whole_checkpoints(other)[first:]
    for checkpoint in sorted((one / "checkpoints").glob("step-*"))[first:]:
        twin = other / "checkpoints" / checkpoint.name
        files = sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
        assert files == sorted(path.relative_to(twin) for path in twin.rglob("*") if path.is_file())
        for file in files:
            assert (checkpoint / file).read_bytes() == (twin / file).read_bytes(), f"{checkpoint.name}/{file} differs"
    if (one / "samples.jsonl").exists() or (other / "samples.jsonl").exists():
        assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    assert comparable_metrics(one) == comparable_metrics(other)


def comparable_metrics(run_dir: Path) -> list[tuple[Any, ...]]:
    """Each record without measured times and memory."""
    return [
        (r["step"], r["kind"], {k: v for k, v in r["metrics"].items() if k.partition("/")[0] not in MEASURED})
        for r in read_metrics(run_dir)
    ]
