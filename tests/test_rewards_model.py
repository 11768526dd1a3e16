"""Reward models: what they read, what they give, and the runs that ask them."""

import json
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from meshloom.config.errors import UserError
from meshloom.config.reward_settings import RewardModelSettings
from meshloom.config.settings import TrainSettings
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.reward_models import ModelScorer
from meshloom.loop.train import run_training
from meshloom.plan.build import build_plan
from meshloom.rewards.model import RewardModels, batches, open_reader, reward_of, scores
from meshloom.rewards.outcome import InvalidReason, RewardRequest
from tests.lesson_runs import train_settings, write_inputs, write_reward_model
from tests.models import tiny_reward_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    write_reward_model(folder / "judge", folder / "model")
    return folder


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("pad", [0, None])
def test_a_score_is_that_of_the_input_alone(family: str, pad: int | None) -> None:
    model = tiny_reward_model(family, pad_token_id=pad)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 9, 3, 30, 9, 17, 2, 30, 5]
    inputs = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]
    # Inputs that end with the padding token, as where a model pads with its end token.
    inputs += [[5, 6, 0], [0, 0, 7, 0, 0]]
    with torch.no_grad():
        alone = [float(model(input_ids=torch.tensor([ids])).logits) for ids in inputs]
    for tokens_per_batch in (1, 40, 10_000):
        assert scores(model, inputs, tokens_per_batch) == pytest.approx(alone, abs=1e-5)
    assert max(alone) - min(alone) > 0.1
    assert model.config.pad_token_id == pad


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
@settings(deadline=None)
def test_batches_hold_every_input_once_within_the_budget(lengths: list[int], budget: int) -> None:
    found = list(batches(lengths, budget))
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    assert all(max(lengths[p] for p in batch) * len(batch) <= budget or len(batch) == 1 for batch in found)


def request_of(response: str, policy: Path, prompt: str = "3+4=") -> RewardRequest:
    tokenizer = load_tokenizer(policy)
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return RewardRequest(
        response=response,
        answer=None,
        data_source="",
        extra={},
        prompt=text,
        finish="stop",
        prompt_ids=tokenizer(text, add_special_tokens=False).input_ids,
        response_ids=[*tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id],
        chat=chat,
    )


@pytest.mark.parametrize("kind", ["auto", "template", "text", "ids"])
def test_a_score_is_what_transformers_gives_for_chat_text_or_tokens(inputs: Path, kind: str) -> None:
    given = RewardModelSettings(path=str(inputs / "judge"), input=kind, dtype="float32")
    scorer = ModelScorer(
        "quality",
        open_reader("quality", given, load_tokenizer(inputs / "model")),
        RewardModels({"quality": given}, CPU).scores,
    )
    requests = [request_of(response, inputs / "model") for response in ("it is 7", "7", "i do not know")]
    found = [one.result().value for one in [scorer.submit(request) for request in requests]]
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "judge").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "judge")
    for request, score in zip(requests, found, strict=True):
        chat = [*request.chat, {"role": "assistant", "content": request.response}]
        ids = {
            "text": tokenizer(request.prompt + request.response).input_ids,
            "ids": [*request.prompt_ids, *request.response_ids],
        }.get(kind) or tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        with torch.no_grad():
            assert score == pytest.approx(float(model(input_ids=torch.tensor([ids])).logits), abs=1e-5)


def test_a_prompt_with_a_begin_token_is_read_with_one(inputs: Path, tmp_path: Path) -> None:
    """The tokenizer put another before it."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    begin = "<|im_start|>"
    tokenizer.bos_token = begin
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    shutil.copytree(inputs / "model", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write_reward_model(tmp_path / "judge", tmp_path / "model")
    given = RewardModelSettings(path=str(tmp_path / "judge"), input="text")
    reader = open_reader("quality", given, load_tokenizer(tmp_path / "model"))
    request = request_of("it is 7", tmp_path / "model")
    assert request.prompt.startswith(begin)
    ids = tokenizer(request.prompt + request.response, add_special_tokens=False).input_ids
    assert reader.read(request) == ids and ids.count(tokenizer.bos_token_id) == 2
    plain = replace(request, prompt="3+4=")
    assert reader.read(plain) == tokenizer("3+4=it is 7").input_ids
    assert reader.read(plain)[0] == tokenizer.bos_token_id


def test_a_tokenizer_that_cuts_the_markers_of_its_template_is_refused(inputs: Path, tmp_path: Path) -> None:
    """Such a model gave scores of a text that it had never learned to read."""
    shutil.copytree(inputs / "judge", tmp_path / "judge")
    for file, part in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "extra_special_tokens")):
        values = json.loads((tmp_path / "judge" / file).read_text())
        (tmp_path / "judge" / file).write_text(json.dumps({**values, part: []}))
    with pytest.raises(UserError, match=r"cuts <\|im_start\|>"):
        open_reader("quality", RewardModelSettings(path=str(tmp_path / "judge")), load_tokenizer(inputs / "model"))


def test_an_input_that_is_too_long_is_invalid_or_loses_its_beginning(inputs: Path) -> None:
    policy = load_tokenizer(inputs / "model")
    request = request_of("it is 7", inputs / "model")
    ids = [*request.prompt_ids, *request.response_ids]
    fields = {"path": str(inputs / "judge"), "input": "ids", "max_tokens": len(ids) - 1}
    refused = open_reader("quality", RewardModelSettings(**fields), policy).read(request)
    assert refused.reason is InvalidReason.TOO_LONG
    cut = open_reader("quality", RewardModelSettings(too_long="truncate", **fields), policy).read(request)
    assert cut == ids[1:]


def test_samples_that_nobody_asks_about_any_more_are_told(inputs: Path) -> None:
    """Where a run ended while groups waited for their model, who waited for a reward did so for ever, and the process with
    it."""
    given = RewardModelSettings(path=str(inputs / "judge"), input="ids")
    reader = open_reader("quality", given, load_tokenizer(inputs / "model"))
    asked, go_on = threading.Event(), threading.Event()

    def ask(name: str, ids: Sequence[Sequence[int]]) -> list[float]:
        asked.set()
        go_on.wait(60)
        return [1.0] * len(ids)

    threads = ThreadPoolExecutor(1)
    scorer = ModelScorer("quality", reader, ask, threads)
    waiting = [scorer.submit(request_of(response, inputs / "model")) for response in ("it is 7", "7")]
    for one in waiting:
        scorer.begin([one])
    assert asked.wait(60)
    threads.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    assert waiting[0].result().value == 1.0
    with pytest.raises(CancelledError):
        waiting[1].done.result(timeout=60)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_invalid(score: float) -> None:
    assert reward_of(score).why == f"not_a_number: the reward model gives {score}"
    assert reward_of(-1.5).value == -1.5


def test_tokens_of_another_tokenizer_are_refused(inputs: Path, tmp_path: Path) -> None:
    write_reward_model(tmp_path / "other", inputs / "model")
    other = AutoTokenizer.from_pretrained(tmp_path / "other")
    other.add_tokens(["word"])
    other.save_pretrained(tmp_path / "other")
    given = RewardModelSettings(path=str(tmp_path / "other"), input="ids")
    with pytest.raises(UserError, match="not that of the model that is trained"):
        open_reader("quality", given, load_tokenizer(inputs / "model"))


def test_weights_that_are_missing_are_refused(inputs: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_reward_model(tmp_path / "headless", inputs / "model")
    file = tmp_path / "headless" / "model.safetensors"
    save_file(
        {name: value for name, value in load_file(file).items() if name != "score.weight"}, file, {"format": "pt"}
    )
    with pytest.raises(UserError, match="score.weight"):
        RewardModels({"quality": RewardModelSettings(path=str(tmp_path / "headless"))}, CPU)


def modelled(inputs: Path, run_dir: Path, *changes: str) -> TrainSettings:
    return train_settings(
        inputs,
        run_dir,
        "reward.function=null",
        f"reward.components.task.function={inputs / 'reward.py'}:score",
        f"reward.components.quality.model.path={inputs / 'judge'}",
        "reward.components.quality.weight=0.1",
        "batch.steps=2",
        *changes,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_labels": 2}, "2 outputs"),
        ("causal", "no sequence-classification head"),
        ("missing", "there is no"),
    ],
)
def test_the_plan_refuses_a_folder_that_is_no_reward_model(
    inputs: Path, tmp_path: Path, changes: dict | str, said: str
) -> None:
    folder = tmp_path / "other"
    if isinstance(changes, dict):
        write_reward_model(folder, inputs / "model", **changes)
    elif changes == "causal":
        folder = inputs / "model"
    plan = build_plan(modelled(inputs, tmp_path / "run", f"reward.components.quality.model.path={folder}"), 14)
    (problem,) = plan.problems
    assert problem.code == "W013" and said in problem.what
    assert "reward.components.quality.model.path" in problem.where


def scores_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def test_a_run_is_scored_by_its_reward_model(inputs: Path, tmp_path: Path) -> None:
    assert run_training(modelled(inputs, tmp_path / "run"), resume=False) == 0
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "judge").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "judge")
    samples = scores_of(tmp_path / "run")
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    for sample in [sample for sample in samples if sample["kind"] == "train"][:6]:
        chat = [*rows[sample["row"]]["prompt"], {"role": "assistant", "content": sample["response"]}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        with torch.no_grad():
            wanted = float(model(input_ids=torch.tensor([ids])).logits)
        assert sample["parts"]["quality"] == pytest.approx(wanted, abs=1e-5)
        assert sample["reward"] == pytest.approx(sample["parts"]["task"] + 0.1 * wanted, abs=1e-5)
    assert len({sample["parts"]["quality"] for sample in samples}) > len(samples) // 2
