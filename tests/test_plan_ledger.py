"""The batch ledger: what the numbers of a run mean together."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshloom.config.load import load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan import build_plan
from meshloom.plan.amounts import format_bytes
from meshloom.plan.ledger import batch_ledger, most_microbatches, train_steps
from meshloom.plan.report import plan_json, plan_text
from meshloom.samples.packing import pack

REQUIRED = ["run_dir=runs/a", "model.path=models/a", "data.train.files=[a.jsonl]"]


def values(kind: type, num_prompts: int | None, *overrides: str) -> dict:
    return {
        line.name: line.value for line in batch_ledger(load_settings(kind, None, [*REQUIRED, *overrides]), num_prompts)
    }


def test_prompts_become_samples_become_updates() -> None:
    ledger = values(
        TrainSettings,
        1000,
        "batch.prompts_per_step=60",
        "batch.samples_per_prompt=12",
        "batch.prompts_per_update=20",
        "batch.epochs_per_step=2",
        "batch.epochs=3",
    )
    assert ledger["samples per step"] == 720
    assert ledger["updates per step"] == 6
    assert ledger["samples per update"] == 240
    assert ledger["steps"] == 50
    assert ledger["updates of the run"] == 300
    assert ledger["epochs"] == 3.0


def test_without_updates_given_a_step_is_one_update() -> None:
    ledger = values(TrainSettings, None, "batch.steps=7", "batch.prompts_per_step=4")
    assert (ledger["prompts per update"], ledger["updates per step"], ledger["updates of the run"]) == (4, 1, 7)
    assert ledger["epochs"] is None


def test_what_depends_on_an_unknown_number_of_prompts_is_unknown() -> None:
    ledger = values(TrainSettings, None)
    assert (ledger["prompts of the data"], ledger["steps"], ledger["updates of the run"]) == (None, None, None)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 5))
def test_enough_steps_are_made_that_every_prompt_comes_as_often_as_asked_and_not_one_more(
    num_prompts: int, per_step: int, epochs: int
) -> None:
    settings = load_settings(
        TrainSettings, None, [*REQUIRED, f"batch.prompts_per_step={per_step}", f"batch.epochs={epochs}"]
    )
    steps = train_steps(settings, num_prompts)
    assert steps * per_step >= num_prompts * epochs > (steps - 1) * per_step


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 200), st.none() | st.integers(1, 9))
def test_packing_never_needs_more_microbatches_than_the_plan_says(
    lengths: list[int], room: int, samples: int | None
) -> None:
    budget = max(lengths) + room
    packed = pack(lengths, tokens_per_microbatch=budget, samples_per_microbatch=samples)
    assert len(packed) <= most_microbatches(len(lengths), max(lengths), budget, samples)


def test_supervised_runs_and_evaluations_have_their_own_ledgers() -> None:
    supervised = values(SftSettings, 130, "batch.samples_per_update=64", "batch.epochs=2")
    assert (supervised["steps"], supervised["updates of the run"], supervised["longest sample"]) == (5, 5, 512 + 1024)
    evaluation = values(EvalSettings, 100, "validation.samples_per_prompt=4")
    assert evaluation["samples"] == 400


def test_each_line_says_its_formula_and_where_it_was_given() -> None:
    settings = load_settings(TrainSettings, None, [*REQUIRED, "batch.prompts_per_step=8"])
    lines = {line.name: line for line in batch_ledger(settings, 80)}
    assert lines["prompts per step"].source == "override batch.prompts_per_step=8"
    assert lines["samples per prompt"].source == "default"
    assert lines["samples per step"].formula == "prompts per step × samples per prompt"
    assert all(line.formula and line.source for line in lines.values())
    assert len(lines) == len(batch_ledger(settings, 80))


def test_the_plan_knows_steps_and_updates() -> None:
    settings = load_settings(TrainSettings, None, [*REQUIRED, "batch.prompts_per_update=16"])
    plan = build_plan(settings, 640)
    assert (plan.steps, plan.updates, plan.value("samples per update")) == (10, 40, 128)
    with pytest.raises(KeyError):
        plan.value("no such line")


def test_text_and_json_show_every_line() -> None:
    plan = build_plan(load_settings(TrainSettings, None, [*REQUIRED, "batch.prompts_per_update=24"]), 640)
    text, data = plan_text(plan), json.loads(plan_json(plan))
    for line in plan.lines:
        assert line.name in text
    assert "[B001]" in text
    assert "\x1b" not in text
    assert {line["name"]: line["value"] for line in data["lines"]}["samples per step"] == 512
    assert "B001" in [problem["code"] for problem in data["problems"]]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**30, "3.00 GiB"), (2**51, "2,048.00 TiB")],
)
def test_bytes_are_shown_in_their_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text
