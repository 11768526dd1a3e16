"""Samples of a file in place of generated ones, and samples without training: the same weights, or a clear refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.cli import main
from meshloom.config.errors import UserError
from meshloom.config.load import dump_yaml
from meshloom.loop.run_inputs import RunInputs
from meshloom.loop.saved_samples import read_saved
from meshloom.loop.token_columns import token_columns
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics, read_samples
from meshloom.samples import Samples
from tests.lesson_runs import assert_same_run, train_settings, write_inputs, write_model

BRIEF = ("data.validation=null", "batch.steps=3", "checkpoint.every_steps=1", "logging.sampler_logprobs=true")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def train(inputs: Path, run_dir: Path, *changes: str, resume: bool = False) -> Path:
    assert run_training(train_settings(inputs, run_dir, *BRIEF, *changes), resume=resume) == 0
    return run_dir


@pytest.fixture(scope="module")
def sampled(inputs: Path) -> Path:
    """A finished run with a reference, two updates a step, log-probs beside its samples."""
    return train(inputs, inputs / "sampled")


def weights(run_dir: Path) -> bytes:
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    return (newest / "model" / "model.safetensors").read_bytes()


def losses(run_dir: Path) -> list[tuple[float, ...]]:
    names = ("loss", "kl_reference", "sampler_gap", "reward_mean", "grad_norm")
    return [tuple(record["metrics"][name] for name in names) for record in read_metrics(run_dir)]


def test_a_run_on_the_samples_of_another_makes_the_same_weights(inputs: Path, sampled: Path, tmp_path: Path) -> None:
    again = train(inputs, tmp_path / "again", f"rollout.from_samples={sampled}")
    assert weights(again) == weights(sampled)
    assert losses(again) == losses(sampled)
    assert [r["response_ids"] for r in read_samples(again)] == [r["response_ids"] for r in read_samples(sampled)]


def test_one_update_a_step_and_greedy_baselines_are_repeated_too(inputs: Path, tmp_path: Path) -> None:
    changes = ("batch.prompts_per_update=4", "algorithm.kl=none", "algorithm.advantage=remax")
    first = train(inputs, tmp_path / "first", *changes)
    again = train(inputs, tmp_path / "again", *changes, f"rollout.from_samples={first / 'samples.jsonl'}")
    assert weights(again) == weights(first)
    assert {r["kind"] for r in read_samples(again)} == {"train", "greedy"}


def test_a_run_on_saved_samples_that_is_resumed_repeats_itself(inputs: Path, sampled: Path, tmp_path: Path) -> None:
    given = (f"rollout.from_samples={sampled}", "optimizer.schedule=constant", "checkpoint.keep_last=9")
    whole = train(inputs, tmp_path / "whole", *given)
    train(inputs, tmp_path / "run", *given, "batch.steps=1")
    train(inputs, tmp_path / "run", *given, resume=True)
    assert_same_run(whole, tmp_path / "run")


def test_samples_without_log_probs_train_and_it_is_said(
    inputs: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps come out of the file where the settings do not say how many."""
    bare = write(tmp_path / "bare.jsonl", records(sampled), drop={"logprobs", "versions", "finish", "response", "row"})
    train(inputs, tmp_path / "run", f"rollout.from_samples={bare}", "batch.steps=null")
    assert "has no log-probs of the sampler" in capsys.readouterr().out
    found = read_metrics(tmp_path / "run")
    assert len(found) == 3
    assert all(record["metrics"]["sampler_gap"] == 0 for record in found[:1])


def test_groups_are_cut_anew_where_a_step_takes_fewer(inputs: Path, sampled: Path, tmp_path: Path) -> None:
    changes = (f"rollout.from_samples={sampled}", "batch.prompts_per_step=2", "batch.steps=null")
    run_dir = train(inputs, tmp_path / "run", *changes)
    groups = [(r["step"], r["group"]) for r in read_samples(run_dir)]
    assert list(dict.fromkeys(groups)) == [(1 + i // 2, i) for i in range(12)]


def test_rollout_writes_the_samples_that_a_run_begins_with(inputs: Path, sampled: Path, tmp_path: Path) -> None:
    settings = train_settings(inputs, tmp_path / "unused", *BRIEF, "batch.steps=2")
    (tmp_path / "run.yaml").write_text(dump_yaml(settings))
    assert main(["rollout", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "made")]) == 0
    made = read_samples(tmp_path / "made")
    first = [record for record in read_samples(sampled) if record["step"] == 1]
    for record in (*made, *first):
        record.pop("advantage")
    assert [record for record in made if record["step"] == 1] == first
    assert {record["step"] for record in made} == {1, 2}
    assert not (tmp_path / "made" / "checkpoints").exists()
    assert main(["train", str(tmp_path / "run.yaml"), "--from-samples", str(tmp_path / "made")]) == 0
    assert len(read_metrics(tmp_path / "unused")) == 2


def test_rows_bring_their_verifier_also_where_samples_do_not_say_where_they_are_from(
    inputs: Path, sampled: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    write(tmp_path / "train.jsonl", [{**row, "data_source": "reasoning_gym/chain_sum"} for row in rows])
    bare = write(tmp_path / "bare.jsonl", records(sampled), drop={"data_source"})
    given = (f"data.train.files=[{tmp_path / 'train.jsonl'}]", f"rollout.from_samples={bare}")
    settings = train_settings(inputs, tmp_path / "run", *BRIEF, *given)
    assert RunInputs.read(settings, resume=False).names.sources == {"reasoning_gym/chain_sum"}


def rollout(inputs: Path, folder: Path, *changes: str) -> Path:
    """Samples without training."""
    settings = train_settings(inputs, folder / "unused", *BRIEF, "batch.steps=1", *changes)
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(dump_yaml(settings))
    assert main(["rollout", str(folder / "run.yaml"), "--out", str(folder / "made")]) == 0
    return folder / "made"


def test_rollout_tells_of_its_rewards_as_training_does(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "same.py").write_text("def score(request):\n    return 1.0\n")
    parts = ("reward.function=null", f"reward.components.task.function={tmp_path}/same.py:score")
    made = rollout(inputs, tmp_path, *parts)
    said = " ".join(capsys.readouterr().out.split())
    assert "the reward task is the same, 1, for all 12 samples" in said
    assert "no group has any spread of rewards" in said
    metrics = read_metrics(made)[0]["metrics"]
    assert (metrics["reward/task"], metrics["reward/task/invalid_share"]) == (1.0, 0.0)
    assert (metrics["prompts_dropped"], metrics["prompts_retried"]) == (0, 0)


def test_rollout_ends_where_training_would(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards that all failed, and steps without a sample, ended well."""
    (tmp_path / "bad.py").write_text("def score(request):\n    raise ValueError('no')\n")
    for name, change, said in (
        ("bad", f"reward.function={tmp_path}/bad.py:score", "100% of this step's rewards are invalid"),
        ("late", "rollout.deadline_s=1e-9", "no group of this step was finished"),
    ):
        (tmp_path / f"{name}.yaml").write_text(
            dump_yaml(train_settings(inputs, tmp_path / "unused", *BRIEF, "batch.steps=1", change))
        )
        assert main(["rollout", str(tmp_path / f"{name}.yaml"), "--out", str(tmp_path / name)]) == 3
        shown = capsys.readouterr()
        assert said in " ".join((shown.out + shown.err).split())


def records(run_dir: Path) -> list[dict[str, Any]]:
    return read_samples(run_dir)


def write(file: Path, lines: list[dict[str, Any]], drop: set[str] = frozenset()) -> Path:
    file.write_text("".join(json.dumps({k: v for k, v in line.items() if k not in drop}) + "\n" for line in lines))
    return file


def _set(number: int, name: str, value: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda lines: [{**line, name: value} if i == number - 1 else line for i, line in enumerate(lines)]


BROKEN = {
    "a column is missing": (_set(3, "response_ids", None), ":3", "response_ids: Input should be a valid array"),
    "a reward is text": (_set(2, "reward", "good"), ":2", "reward: Input should be a valid number"),
    "a reward is no number": (_set(5, "reward", float("nan")), ":5", "reward: Input should be a finite number"),
    "a part is no number": (_set(5, "parts", {"a": float("inf")}), ":5", "parts.a: Input should be a finite number"),
    "log-probs are too few": (_set(4, "logprobs", [0.0]), ":4", "logprobs has 1 numbers"),
    "a sample is missing": (lambda lines: lines[1:], ":1", "has 2 samples, batch.samples_per_prompt is 3"),
    "prompts differ": (_set(2, "prompt_ids", [5]), ":2", "have different prompts"),
    "a response is too long": (_set(1, "response_ids", [5] * 9), ":1", "logprobs has"),
    "another tokenizer": (_set(1, "response", "!?"), ":1", "not its text with the tokenizer"),
    "no sample": (lambda lines: [{**line, "kind": "validation"} for line in lines], "", "has no training samples"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_trained_on_is_refused_with_its_line(
    inputs: Path, sampled: Path, tmp_path: Path, name: str
) -> None:
    change, where, said = BROKEN[name]
    file = write(tmp_path / "broken.jsonl", change(records(sampled)))
    with pytest.raises(UserError) as caught:
        train(inputs, tmp_path / "run", f"rollout.from_samples={file}")
    assert f"broken.jsonl{where}" in str(caught.value)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_broken_line_more_steps_than_there_are_and_lacking_baselines_are_told(
    inputs: Path, sampled: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "cut.jsonl", records(sampled))
    for given, said in (
        ("batch.steps=4", "has samples for 3 steps, the run is over 4"),
        ("algorithm.advantage=remax", "has no greedy sample, which remax needs"),
        ("rollout.max_response_tokens=2", "rollout.max_response_tokens is 2"),
    ):
        with pytest.raises(UserError, match=said):
            train(inputs, tmp_path / "run", f"rollout.from_samples={file}", given)
    file.write_text(file.read_text().replace("}\n", "\n", 1))
    with pytest.raises(UserError, match=r"cut\.jsonl:1 is no JSON"):
        train(inputs, tmp_path / "run", f"rollout.from_samples={file}")
    for wrong, said in ((inputs / "train.jsonl", "it has no step"), (inputs, "cannot be read")):
        with pytest.raises(UserError, match=f"(?s){said}.*change: name a run folder, or a samples.jsonl"):
            train(inputs, tmp_path / "run", f"rollout.from_samples={wrong}")


def test_a_model_with_too_few_tokens_is_refused(inputs: Path, sampled: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "small", lacking=2)
    highest = max(max(record["prompt_ids"] + record["response_ids"]) for record in records(sampled))
    lines = _set(1, "response_ids", [highest] * 3)(records(sampled))
    lines = [{**line, "response": None, "logprobs": None} for line in lines]
    file = write(tmp_path / "other.jsonl", lines)
    changes = (f"rollout.from_samples={file}", f"model.path={tmp_path / 'small'}")
    with pytest.raises(UserError, match="the model has"):
        train(inputs, tmp_path / "run", *changes)


def test_tokens_that_are_not_the_models_own_stay_out_of_the_mask(inputs: Path, sampled: Path, tmp_path: Path) -> None:
    first = [{**line, "own": [[0, 1], [2, 3]]} if line["reward"] is not None else line for line in records(sampled)]
    file = write(tmp_path / "turns.jsonl", first)
    settings = train_settings(inputs, tmp_path / "run", *BRIEF, f"rollout.from_samples={file}")
    saved = read_saved(settings, lambda samples: ["" for _ in samples])
    assert saved is not None
    mask = saved.steps[0][0].column("mask")[0]
    own = len(first[0]["prompt_ids"])
    assert mask[own : own + 3].tolist() == [True, False, True]
    assert not mask[own + 3 :].any()


def test_columns_of_tokens_come_back_to_the_last_bit() -> None:
    logprobs = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 10
    samples = Samples(
        torch.tensor([200, 200]),
        {
            "sampler_logprob": logprobs,
            "version": torch.tensor([0] * 300 + [1] * 100, dtype=torch.int32),
            "mask": torch.tensor(([False] * 5 + [True] * 195) * 2),
        },
    )
    found = [json.loads(json.dumps(token_columns(samples, i, 5))) for i in (0, 1)]
    assert torch.equal(torch.tensor(found[0]["logprobs"], dtype=torch.float32), logprobs[5:200])
    assert "token_versions" not in found[0]
    assert found[1]["token_versions"] == [0] * 95 + [1] * 100
    assert "own" not in found[0]
    samples = samples.with_tokens(
        mask=torch.tensor([False] * 5 + [True] * 3 + [False] * 2 + [True] * 190 + [True] * 200)
    )
    assert token_columns(samples, 0, 5)["own"] == [(0, 3), (5, 195)]
