"""Supervised runs measure the loss on rows that nobody learns from: on any number of devices, and where they are resumed."""

import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshloom.cli import main
from meshloom.config.settings import SftSettings
from meshloom.loop.sft_data import load_examples
from meshloom.observe.display import line_text, open_display
from meshloom.observe.format import number_text
from meshloom.observe.history import read_stages
from meshloom.observe.records import read_metrics
from meshloom.observe.report import page_data
from meshloom.plan.build import build_plan
from meshloom.plan.held_out import SECONDS, TIMES
from meshloom.train.checkpoint_store import read_manifest
from tests.lesson_runs import command, sft_settings, write_inputs
from tests.test_observe_display import drawn, terminal

STEADY = ("optimizer.schedule=constant", "checkpoint.every_steps=2", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["response"] = row["response"] * (1 + number % 3)
    (folder / "ragged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings_of(inputs: Path, run_dir: Path, *changes: str) -> SftSettings:
    given = (f"data.validation.files=[{inputs / 'ragged.jsonl'}]", "data.max_response_tokens=40")
    return sft_settings(inputs, run_dir, *given, *changes)


def run(settings: SftSettings, *more: str) -> Path:
    assert main(command(settings, *more)) == 0
    return Path(settings.run_dir)


def held_out(run_dir: Path) -> dict[int, float]:
    """The loss by step."""
    records = [record for record in read_metrics(run_dir) if record["kind"] == "validation"]
    for record in records:
        assert record["metrics"]["perplexity"] == pytest.approx(math.exp(record["metrics"]["loss"]))
        assert "validate" in record["phases"]
    return {record["step"]: record["metrics"]["loss"] for record in records}


def loss_of(model: Path, inputs: Path) -> float:
    """Row by row in float64, by transformers alone: the mean over all tokens of the responses and their end tokens."""
    module, tokenizer = AutoModelForCausalLM.from_pretrained(model).double(), AutoTokenizer.from_pretrained(model)
    losses: list[float] = []
    for example in load_examples(settings_of(inputs, inputs / "none"), tokenizer).held_out:
        ids, learned = torch.tensor(example.ids), torch.tensor(example.mask)
        with torch.no_grad():
            logprobs = module(ids[None]).logits[0, :-1].log_softmax(-1)
        losses += (-logprobs.gather(1, ids[1:, None])[:, 0][learned[1:]]).tolist()
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    return run(settings_of(inputs, inputs / "whole", *STEADY, "batch.steps=5", "validation.every_steps=2"))


def test_the_loss_is_the_mean_over_all_response_tokens_before_between_and_after(inputs: Path, whole: Path) -> None:
    """``data.validation`` of a supervised run used to be read by nobody."""
    found = held_out(whole)
    assert list(found) == [0, 2, 4, 5]
    assert found[0] == pytest.approx(loss_of(inputs / "model", inputs), rel=1e-5)
    assert found[5] < found[0]
    checkpoint = whole / "checkpoints" / "step-000004"
    assert found[4] == pytest.approx(loss_of(checkpoint / "model", inputs), rel=1e-5)
    assert read_manifest(checkpoint).score == -found[4]


def test_measuring_changes_nothing_and_a_resumed_run_measures_the_same(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    given = (*STEADY, "validation.every_steps=2")
    run(settings_of(inputs, tmp_path / "parts", *given, "batch.steps=2"))
    parts = run(settings_of(inputs, tmp_path / "parts", *given, "batch.steps=5"), "--resume")
    assert held_out(parts) == held_out(whole)
    never = ("batch.steps=5", "validation.every_steps=0", "validation.before_training=false")
    alone = run(settings_of(inputs, tmp_path / "alone", *STEADY, *never))
    assert held_out(alone) == {5: held_out(whole)[5]}
    losses = [
        [r["metrics"]["loss"] for r in read_metrics(each) if r["kind"] == "sft"] for each in (whole, parts, alone)
    ]
    assert losses[0] == losses[1] == losses[2]


def test_weights_that_overflow_end_a_run_in_words(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback of the program where the loss on held-out rows was the first to be no number."""
    wild = ("optimizer.lr=1e38", "optimizer.schedule=constant", "batch.steps=2", "validation.every_steps=1")
    assert main(command(settings_of(inputs, tmp_path / "run", *wild))) == 3
    told = capsys.readouterr().err
    assert told.startswith("error: the loss on held-out rows is nan") and "a smaller optimizer.lr" in told


def test_other_microbatches_and_devices_measure_the_same(inputs: Path, tmp_path: Path) -> None:
    """Three rows, of which one is three times as long, leave one of four replicas without any. Two devices, and other cuts, are
    in ``test_sft_devices``."""
    brief = ("batch.steps=1", "checkpoint.every_steps=0", "data.validation.max_rows=3")
    ways = {"one": (), "small": ("batch.samples_per_microbatch=1",), "four": ("cluster.devices_per_node=4",)}
    found = {name: held_out(run(settings_of(inputs, tmp_path / name, *brief, *way))) for name, way in ways.items()}
    for name, losses in found.items():
        assert losses == pytest.approx(found["one"], rel=2e-5), name


def test_the_plan_says_how_often_and_how_long(inputs: Path) -> None:
    kind = ("device=cuda", "cluster.device=h200", "model.dtype=bfloat16", "batch.steps=25")
    plan = build_plan(settings_of(inputs, inputs / "run", *kind), 14)
    assert plan.value(TIMES) == 4
    assert build_plan(settings_of(inputs, inputs / "run", *kind, "validation.every_steps=5"), 14).value(TIMES) == 6
    never = ("validation.every_steps=0", "validation.before_training=false", "validation.after_training=false")
    assert build_plan(settings_of(inputs, inputs / "run", *kind, *never), 14).value(TIMES) == 0
    update = plan.value("actor: update")
    assert 0 < plan.value(SECONDS) < update
    assert not any(
        "held-out" in line.name for line in build_plan(sft_settings(inputs, inputs / "run", *kind), 14).lines
    )


def test_a_held_out_row_without_a_response_is_told_with_its_source(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.jsonl").write_text(
        json.dumps({"prompt": "a", "response": "b"}) + "\n" + json.dumps({"prompt": "a"})
    )
    settings = sft_settings(inputs, tmp_path / "run", f"data.validation.files=[{tmp_path / 'bare.jsonl'}]")
    assert main(command(settings)) == 2
    assert "data.validation" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_report_table_and_line_show_both_losses(whole: Path) -> None:
    records, losses = read_metrics(whole), list(held_out(whole).values())
    kinds = page_data(read_stages(whole, {}), "a run")["stages"][0]["kinds"]
    assert kinds["validation"]["metrics"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert "validation  loss" in line_text(records[0], 5) and "perplexity" in line_text(records[0], 5)
    out = io.StringIO()
    with open_display("run", steps=5, console=terminal(out)) as display:
        for record in records:
            display.record(record)
    last = drawn(out)
    last = last[last.rindex("held-out loss ") :]
    assert f"{number_text(losses[0])} → {number_text(losses[-1])}" in last
    assert re.search(r"step +loss +held-out", last)
