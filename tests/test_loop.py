"""Whole runs on a tiny model: what failing rewards, deadlines and disagreement cost, and what a step computes."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshloom.cli import main
from meshloom.config.names import Advantage, PolicyLoss
from meshloom.data.prompts import render_prompts
from meshloom.data.sources import load_rows
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.build import build_actor, build_engine, decoder, sampling_params, texts_decoder
from meshloom.loop.collect import Collector, packed
from meshloom.loop.invalid_rewards import InvalidWatch
from meshloom.loop.stage import Collected, Draw
from meshloom.loop.step_metrics import SpreadWatch
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics, read_samples
from meshloom.observe.run_folder import read_status
from meshloom.observe.timing import PhaseClock
from meshloom.rewards.pool import RewardPool
from meshloom.rollout.protocol import Completion, FinishReason
from meshloom.samples import Samples
from meshloom.train.model import MicrobatchBound
from tests.lesson_runs import (
    assert_same_run,
    command,
    sft_settings,
    start,
    steps_logged,
    train_settings,
    wait_until,
    whole_checkpoints,
    write_inputs,
)

BRIEF = ("batch.steps=2", "data.validation=null", "checkpoint.every_steps=0", "algorithm.kl=none")
FAULTY = """\
import os, time

def score(request, only="", share=1.0):
    number = int(request.answer)
    fault = {0: "raise", 1: "hang", 2: "nan", 3: "print", 4: "die"}.get(number)
    if fault == "raise":
        raise ValueError("no such answer")
    if fault == "hang":
        time.sleep(60)
    if fault == "nan":
        return float("nan")
    if fault == "print":
        print("x" * 5_000_000)
    if fault == "die":
        os._exit(9)
    return len(request.response) / 10
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """A finished run."""
    assert run_training(train_settings(inputs, inputs / "whole", "validation.samples_per_prompt=1"), resume=False) == 0
    return inputs / "whole"


def reward(folder: Path, source: str) -> str:
    """An override that names a function in a file of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(source)
    return f"reward.function={folder / 'reward.py'}:score"


def weights(run_dir: Path, name: str = "model/model.safetensors") -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    return load_file(sorted((run_dir / "checkpoints").glob("step-*"))[-1] / name)


def metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record["metrics"] for record in read_metrics(run_dir) if record["kind"] == kind]


def test_a_reward_that_fails_costs_its_own_samples_only(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples whose reward raises, hangs, is NaN or dies are invalid with a reason; one that prints megabytes is not."""
    rows = [{"prompt": "1+1=", "answer": str(number)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [
        *BRIEF,
        reward(tmp_path / "faulty", FAULTY),
        f"data.train.files=[{tmp_path / 'rows.jsonl'}]",
        "data.shuffle=false",
        "reward.deadline_s=0.5",
        "reward.workers=4",
        "batch.steps=1",
        "batch.prompts_per_step=8",
        "batch.prompts_per_update=8",
    ]
    assert run_training(train_settings(inputs, tmp_path / "run", *changes), resume=False) == 0
    told = " ".join(capsys.readouterr().out.split())
    samples = read_samples(tmp_path / "run")
    assert len(samples) == 24
    reasons = {"0": "raised", "1": "deadline", "2": "not_a_number", "4": "died"}
    for reason in reasons.values():
        assert f"warning: 3 of 24 rewards are invalid, most often: {reason}: " in told
    for sample in samples:
        reason = reasons.get(sample["answer"])
        if reason is None:
            assert sample["invalid"] is None
            assert sample["reward"] == len(sample["response"]) / 10
        else:
            assert sample["reward"] is None
            assert sample["invalid"].startswith(f"{reason}: ")
            assert sample["advantage"] == 0
    (step,) = metrics(tmp_path / "run")
    assert (step["samples"], step["reward_invalid"]) == (24, 12)
    assert {reason: step[f"reward_invalid/{reason}"] for reason in reasons.values()} == dict.fromkeys(
        reasons.values(), 3
    )
    valid = [sample["reward"] for sample in samples if sample["reward"] is not None]
    assert step["reward_mean"] == pytest.approx(sum(valid) / 12)


def test_why_rewards_are_invalid_is_told_once_and_in_a_line() -> None:
    told: list[str] = []
    watch = InvalidWatch(told.append)
    watch.look([None, "raised: f: a\n\x1b[2Jb", None])
    watch.look(["raised: g", "deadline: no result", "deadline: no result", "deadline: late"])
    watch.look([f"died: {'x' * 1000}"])
    assert told[:2] == [
        "warning: 1 of 3 rewards are invalid, most often: raised: f: a [2Jb",
        "warning: 3 of 4 rewards are invalid, most often: deadline: no result",
    ]
    assert len(told) == 3 and len(told[2]) < 400


def test_invalid_samples_are_not_in_the_denominators(inputs: Path, tmp_path: Path) -> None:
    """A step with prompts whose rewards all fail changes the weights as the step without these prompts does."""
    good = [{"prompt": f"{a}+1=", "answer": "7"} for a in range(4)]
    bad = [{"prompt": f"{a}+2=", "answer": "0"} for a in range(3)]
    after = []
    for name, rows in (("good", good), ("both", good + bad)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes = [
            *BRIEF,
            reward(tmp_path / "faulty", FAULTY),
            *(f"data.train.files=[{tmp_path / name}.jsonl]", "data.shuffle=false"),
            *("batch.steps=1", f"batch.prompts_per_step={len(rows)}", "batch.prompts_per_update=null"),
            "optimizer.max_grad_norm=null",
        ]
        assert run_training(train_settings(inputs, tmp_path / name, *changes), resume=False) == 0
        after.append((weights(tmp_path / name), metrics(tmp_path / name)[0]))
    assert after[1][1]["reward_invalid"] == 9
    assert after[0][1]["grad_norm"] == pytest.approx(after[1][1]["grad_norm"], rel=1e-5)
    for name, tensor in after[0][0].items():
        torch.testing.assert_close(after[1][0][name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("bad", "updates"), [(2, 1), (4, 0)])
def test_an_update_without_a_valid_sample_is_left_out(inputs: Path, tmp_path: Path, bad: int, updates: int) -> None:
    """It had no token to measure, which ended the run with a KeyError."""
    rows = [{"prompt": f"{a}+1=", "answer": "0" if a < bad else "7"} for a in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [
        *BRIEF,
        reward(tmp_path / "faulty", FAULTY),
        *(f"data.train.files=[{tmp_path / 'rows.jsonl'}]", "data.shuffle=false", "reward.max_invalid_share=1.0"),
        "batch.steps=1",
    ]
    assert run_training(train_settings(inputs, tmp_path / "run", *changes), resume=False) == 0
    (step,) = metrics(tmp_path / "run")
    assert (step["updates"], step["reward_invalid"], "grad_norm" in step) == (updates, 3 * bad, updates > 0)
    changed = any(
        not torch.equal(tensor, before)
        for tensor, before in zip(
            weights(tmp_path / "run").values(), load_file(inputs / "model" / "model.safetensors").values(), strict=True
        )
    )
    assert changed == (updates > 0)


def test_too_many_invalid_rewards_stop_the_run_which_resumes_once_the_function_is_mended(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "def score(request):\n    if int(request.answer) > 11: raise KeyError('carry')\n    return len(request.response)\n"
    mended = "def score(request):\n    return len(request.response)\n"
    changes = [
        *(reward(tmp_path / "own", broken), "data.shuffle=false", "batch.prompts_per_step=2", "batch.steps=4"),
        *("batch.prompts_per_update=null", "reward.max_invalid_share=0.2", "data.validation=null"),
    ]
    # Answers are 0, 8, 6, 4, 12, …: the third step meets the fault.
    settings = train_settings(inputs, tmp_path / "run", *changes)
    assert main(command(settings)) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: 50% of this step's rewards are invalid")
    assert "KeyError: 'carry'" in error
    assert "reward.max_invalid_share" in error
    assert "Traceback" not in error
    status = read_status(tmp_path / "run")
    assert (status["state"], whole_checkpoints(tmp_path / "run")) == ("failed", [1, 2])
    assert "rewards are invalid" in status["reason"]
    (tmp_path / "own" / "reward.py").write_text(mended)
    assert main(command(settings, "--resume")) == 0
    assert main(command(train_settings(inputs, tmp_path / "clean", *changes))) == 0
    assert_same_run(tmp_path / "clean", tmp_path / "run")


def test_a_reward_that_never_works_stops_the_run_at_its_first_validation(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run used to generate a whole step besides. Texts that differ by their samples count as one reason."""
    broken = reward(tmp_path / "own", "def score(request):\n    raise KeyError(request.response)\n")
    assert main(command(train_settings(inputs, tmp_path / "run", broken))) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: 100% of the first validation's rewards are invalid")
    assert re.search(r"why: most often \((\d+) of \1\): raised: .*KeyError", error)
    assert steps_logged(tmp_path / "run") == []


def test_equal_rewards_everywhere_warn_and_teach_nothing(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning came again at each step, and flooded the terminal."""
    changes = [*BRIEF, reward(tmp_path / "own", "def score(request):\n    return 0.25\n"), "optimizer.weight_decay=0.0"]
    changes += ["batch.steps=6"]
    assert run_training(train_settings(inputs, tmp_path / "run", *changes), resume=False) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: no group")]
    assert warnings == [
        "warning: no group has any spread of rewards (mean 0.25); this step teaches nothing",
        "warning: no group has had any spread of rewards for 5 steps (mean 0.25); they taught nothing: look at "
        "samples.jsonl: the task may be too hard or the reward too strict",
    ]
    for step in metrics(tmp_path / "run"):
        assert (step["grad_norm"], step["groups_without_spread"]) == (0, 4)
    before = load_file(inputs / "model" / "model.safetensors")
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(("reward", "cause"), [(0.0, "too hard or the reward too strict"), (1.0, "too easy")])
def test_steps_without_spread_are_told_of_at_the_first_the_fifth_in_a_row_and_each_fiftieth(
    inputs: Path, reward: float, cause: str
) -> None:
    told: list[tuple[int, str]] = []
    watch = SpreadWatch(train_settings(inputs, inputs / "unused"), lambda text: told.append((step, text)))

    def batch(*rewards: float) -> Samples:
        columns = {"reward": torch.tensor(rewards), "valid": torch.tensor([True, True]), "group": torch.tensor([0, 0])}
        return Samples(lengths=torch.tensor([1, 1]), rows=columns)

    for step in range(1, 112):
        watch.look(batch(reward, reward) if step != 9 else batch(0.0, 1.0))
    assert [step for step, _ in told] == [1, 5, 14, 59, 109]
    assert cause in told[1][1] and "for 50 steps" in told[3][1] and "teaches nothing" in told[0][1]


def test_rewards_of_turns_tell_tokens_apart_where_samples_are_alike(inputs: Path) -> None:
    """A step of REINFORCE++ with a gradient was told to teach nothing."""
    told: list[str] = []
    settings = train_settings(inputs, inputs / "unused", "algorithm.advantage=reinforce_pp")
    watch = SpreadWatch(settings, told.append)
    rows = {
        "reward": torch.ones(2),
        "valid": torch.ones(2, dtype=torch.bool),
        "group": torch.zeros(2, dtype=torch.int64),
    }
    turns = {"turn_reward": torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64)}
    watch.look(Samples(torch.tensor([2, 2]), turns, rows=rows))
    assert told == []
    watch.look(Samples(torch.tensor([2, 2]), {"turn_reward": torch.zeros(4)}, rows=rows))
    assert "teaches nothing" in told[0]


def test_a_group_of_which_one_sample_is_valid_teaches_its_reward(inputs: Path) -> None:
    """It was said to teach nothing, and taught."""
    told: list[str] = []
    watch = SpreadWatch(train_settings(inputs, inputs / "unused"), told.append)
    columns = {"reward": torch.tensor([1.0, 0.0]), "valid": torch.tensor([True, False]), "group": torch.tensor([0, 0])}
    watch.look(Samples(lengths=torch.tensor([1, 1]), rows=columns))
    assert told == []


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus"])
def test_samples_that_teach_without_a_group_are_not_warned_about(
    advantage: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step of such a run was said to teach nothing."""
    changes = *BRIEF, "batch.samples_per_prompt=1", f"algorithm.advantage={advantage}", "batch.steps=1"
    assert run_training(train_settings(inputs, tmp_path / "run", *changes), resume=False) == 0
    assert "teaches nothing" not in capsys.readouterr().out
    assert metrics(tmp_path / "run")[0]["grad_norm"] > 0


def test_groups_that_miss_the_deadline_are_retried_dropped_and_counted(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is finished in a microsecond: the run stops itself, and says which deadline."""
    settings = train_settings(inputs, tmp_path / "run", *BRIEF, "rollout.deadline_s=0.000001")
    assert main(command(settings)) == 3
    error = capsys.readouterr().err
    assert "no group of this step was finished" in error
    assert "rollout.deadline_s" in error
    assert "4 prompts ran out of 1e-06 s twice" in error


def test_a_gap_between_sampler_and_trainer_stops_the_run_before_a_weight_changes(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Top-p makes the sampling distribution another one than the trainer's."""
    changes = [*BRIEF, "rollout.sampling.top_p=0.5", "algorithm.max_sampler_gap=0.1"]
    settings = train_settings(inputs, tmp_path / "run", *changes)
    assert main(command(settings)) == 3
    error = capsys.readouterr().err
    assert "sampler and trainer disagree: mean |Δ log-prob| is" in error
    assert "algorithm.max_sampler_gap" in error
    assert steps_logged(tmp_path / "run") == []
    assert whole_checkpoints(tmp_path / "run") == []


def test_a_step_does_not_depend_on_microbatches(inputs: Path, tmp_path: Path) -> None:
    results = []
    for i, bound in enumerate(("72", "150", "16384", "16384, batch.samples_per_microbatch=2")):
        bounds = [f"batch.tokens_per_microbatch={bound.split(',')[0]}", *bound.split(", ")[1:]]
        changes = ["batch.steps=1", "data.validation=null", "checkpoint.every_steps=0", *bounds]
        # A plain step in place of Adam's, which blows differences of rounding up where a gradient is almost zero.
        changes += ["optimizer.eps=1.0", "optimizer.lr=1.0", "optimizer.max_grad_norm=null"]
        assert run_training(train_settings(inputs, tmp_path / str(i), *changes), resume=False) == 0
        results.append(weights(tmp_path / str(i)))
    before = load_file(inputs / "model" / "model.safetensors")
    assert all((results[0][name] - before[name]).abs().max() > 1e-4 for name in before)
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def greedy(folder: Path, prompt_ids: list[int], count: int) -> list[int]:
    """What transformers generates from a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt_ids) :].tolist()


def test_the_exported_model_answers_as_the_last_validation_did(
    inputs: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(whole), str(tmp_path / "out")]) == 0
    last = [s for s in read_samples(whole) if s["kind"] == "validation" and s["step"] == 6]
    assert len(last) == 5
    for sample in last:
        assert greedy(tmp_path / "out", sample["prompt_ids"], 8) == sample["response_ids"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "20+0="}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids == last[0]["prompt_ids"]
    given = [f"run_dir={tmp_path / 'eval'}", f"model.path={tmp_path / 'out'}"]
    assert main(["eval", *given, *evaluation_of(inputs)]) == 0
    (record,) = metrics(tmp_path / "eval", "validation")
    trained = metrics(whole, "validation")[-1]
    same = ("accuracy", "reward_mean", "response_tokens_mean")
    assert {name: record[name] for name in same} == {name: trained[name] for name in same}


def evaluation_of(inputs: Path) -> list[str]:
    return [
        *("device=cpu", f"data.train.files=[{inputs / 'held_out.jsonl'}]", "data.max_prompt_tokens=64"),
        *(f"reward.function={inputs / 'reward.py'}:score", "rollout.max_response_tokens=8"),
        *("validation.success_threshold=0.3", "seed=3", "reward.workers=1"),
    ]


@pytest.mark.parametrize("kind", ["rl", "tensor"])
def test_exported_adapters_give_the_trained_logits(inputs: Path, tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    targets = "" if kind == "rl" else ", target_modules: [q_proj, down_proj]"
    changes = (*BRIEF, f"model.lora={{rank: 2{targets}}}", "optimizer.lr=0.05")
    settings = train_settings(inputs, tmp_path / "run", *changes)
    assert main(command(settings)) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    ids = torch.tensor([[1, 5, 9, 14, 20, 3]])
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
    assert (adapted - plain).abs().max() > 1e-2
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    saved, exported = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (next((tmp_path / "run" / "checkpoints").glob("step-*")) / "adapter", tmp_path / "adapter")
    )
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


ALGORITHMS = [
    *([f"algorithm.advantage={name}"] for name in Advantage),
    *([f"algorithm.policy_loss={name}"] for name in PolicyLoss),
    ["algorithm.kl=reward", "algorithm.kl_estimator=k1"],
    ["algorithm.kl=loss", "algorithm.kl_estimator=k3+"],
    ["algorithm.reduction=seq-mean-token-sum-norm", "algorithm.reduction_constant=8.0"],
    ["algorithm.entropy_coefficient=0.01", "batch.epochs_per_step=2"],
    ["algorithm.normalize_by_std=false", "algorithm.gamma=0.9"],
    ["model.gradient_checkpointing=true"],
    ["model.dtype=bfloat16"],
]


@pytest.mark.parametrize("changes", ALGORITHMS, ids=" ".join)
def test_every_algorithm_trains(inputs: Path, tmp_path: Path, changes: list[str]) -> None:
    assert run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *changes), resume=False) == 0
    steps = metrics(tmp_path / "run")
    assert len(steps) == 2
    assert all(0 < step["grad_norm"] < 1e3 and step["sampler_gap"] < 0.1 for step in steps)
    before = load_file(inputs / "model" / "model.safetensors")
    after = weights(tmp_path / "run")
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_memory_does_not_grow_with_steps(inputs: Path, tmp_path: Path) -> None:
    """Sixty steps with validation and background checkpoints, watched from outside; the first twenty are warm-up."""
    changes = ["batch.steps=60", "checkpoint.every_steps=5", "validation.every_steps=10"]
    run = start(command(train_settings(inputs, tmp_path / "run", *changes)), tmp_path / "out")
    process = psutil.Process(run.pid)
    most: dict[bool, int] = {}

    def look() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            step = len(steps_logged(tmp_path / "run"))
            if 10 <= step < 20 or 50 <= step < 60:
                most[step >= 50] = max(most.get(step >= 50, 0), process.memory_info().rss)
        time.sleep(0.02)

    wait_until(look, run, timeout=120)
    run.join()
    assert run.exitcode == 0
    assert most[True] - most[False] < 8 * 2**20, most


def test_groups_that_miss_the_deadline_are_tried_once_more_and_then_dropped(inputs: Path) -> None:
    """The reader of the engine's samples takes longer than the deadline; what was finished before it stands."""
    settings = train_settings(inputs, inputs / "none")
    tokenizer = load_tokenizer(inputs / "model")
    prompts = render_prompts(load_rows(settings.data.train, settings.data), tokenizer, settings.data).prompts
    model = build_actor(settings.model, None, MicrobatchBound(200), device="cpu", seed=0, checkpoint=None)
    draws = [Draw(number, number) for number in range(4)]
    rollout = settings.rollout.model_copy(update={"max_sequences": 1})
    first = texts_decoder(tokenizer)

    def slow_at(*places: int) -> Callable[[Sequence[Sequence[int]]], list[str]]:
        read = iter(range(100))

        def decode(samples: Sequence[Sequence[int]]) -> list[str]:
            if next(read) in places:
                time.sleep(2.1)
            return first(samples)

        return decode

    def collect(pool: RewardPool, decode: Callable[[Sequence[Sequence[int]]], list[str]]) -> Collected[Samples]:
        return Collector(
            engine=build_engine(model, rollout, settings.data, tokenizer),
            scorer=pool,
            prompts=prompts,
            decode=decode,
            params=sampling_params(rollout.sampling, rollout),
            samples_per_prompt=3,
            seed=3,
            decode_at_once=1,
        ).collect(draws, deadline_s=2.0, clock=PhaseClock())

    with RewardPool(settings.reward) as pool:
        undisturbed = collect(pool, first)
        # One sample runs at a time: the fourth that is read is the first of the second group, the seventh its last one.
        late_once, late_twice = collect(pool, slow_at(3)), collect(pool, slow_at(3, 6))
    assert (undisturbed.retried, undisturbed.dropped) == (0, ())
    assert (late_once.retried, late_once.dropped) == (3, ())
    assert (late_twice.retried, late_twice.dropped) == (3, tuple(draws[2:]))
    assert (len(late_once.groups), len(late_twice.groups)) == (4, 2)
    for collected in (late_once, late_twice):
        for group, expected in zip(collected.groups, undisturbed.groups, strict=False):
            for name in ("ids", "sampler_logprob", "reward", "group"):
                assert torch.equal(group[name], expected[name])


def test_texts_made_together_are_those_made_alone(inputs: Path) -> None:
    tokenizer = load_tokenizer(inputs / "model")
    samples = [[], [tokenizer.eos_token_id], [*range(len(tokenizer))], list(range(5, 9)) + [tokenizer.eos_token_id]]
    assert texts_decoder(tokenizer)(samples) == [decoder(tokenizer)(ids) for ids in samples]


def test_a_response_ends_where_the_template_ends_a_turn(tmp_path: Path) -> None:
    """Base models often come with a template whose turns end with a token that is not their own end token. A response used to
    run on past it to its greatest length, also after fine-tuning that taught it, and what was saved did not stop there."""
    inputs = write_inputs(tmp_path)
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("config.json", "eos_token_id", 0),
        ("generation_config.json", "eos_token_id", 0),
    ):
        file = inputs / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    changes = *BRIEF, "rollout.max_response_tokens=60"
    assert main(command(train_settings(inputs, tmp_path / "train", *changes))) == 0
    responses = [sample["response_ids"] for sample in read_samples(tmp_path / "train")]
    assert sum(2 in ids for ids in responses) > 0
    assert not any(2 in ids[:-1] or 0 in ids[:-1] for ids in responses)
    assert main(command(sft_settings(inputs, tmp_path / "sft", "batch.steps=1"))) == 0
    for run in ("train", "sft"):
        (checkpoint,) = (tmp_path / run / "checkpoints").glob("step-*")
        saved = json.loads((checkpoint / "model" / "generation_config.json").read_text())
        assert set(saved["eos_token_id"]) == {0, 2}


def test_samples_that_came_take_a_fifth_of_the_memory_of_lists() -> None:
    """The controller of a run over devices has all samples of a step until the last one is scored."""
    count = 1000
    ids, logprobs = list(range(300, 300 + count)), [-0.125 * k for k in range(count)]  # an engine's are float32
    as_lists = sum(map(sys.getsizeof, (ids, ids[:], logprobs, *ids, *logprobs)))
    completion = Completion(
        request_id=3, index=1, ids=ids, logprobs=logprobs, versions=[2] * count, finish=FinishReason.STOP
    )
    found = packed(completion)
    assert sum(map(sys.getsizeof, (found.ids, found.logprobs, found.versions))) < as_lists / 5
    assert (list(found.ids), list(found.logprobs), list(found.versions)) == (ids, logprobs, [2] * count)
    assert (found.request_id, found.index, found.finish) == (3, 1, FinishReason.STOP)


def test_a_run_keeps_nothing_where_nothing_is_to_be_kept(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step was saved and evaluated in any case, also where a translated command would do neither."""
    nothing = ("batch.steps=1", "checkpoint.every_steps=0", "checkpoint.at_end=false")
    never = ("validation.every_steps=0", "validation.before_training=false", "validation.after_training=false")
    for settings in (
        sft_settings(inputs, tmp_path / "sft", *nothing),
        train_settings(inputs, tmp_path / "rl", *nothing, *never),
    ):
        assert main(command(settings)) == 0
        assert "none, as checkpoint.at_end is false" in capsys.readouterr().out
        assert not list((Path(settings.run_dir) / "checkpoints").glob("*"))
    assert {record["kind"] for record in read_metrics(tmp_path / "rl")} == {"train"}
