"""Supervised runs over several devices: the losses and weights of one, and checkpoints that any number goes on from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshloom.cli import main
from meshloom.config.settings import SftSettings
from meshloom.observe.records import read_metrics
from meshloom.plan.build import build_plan
from meshloom.plan.picture import draw
from meshloom.plan.recompute import RECOMPUTED
from tests.lesson_runs import command, sft_settings, write_inputs

BRIEF = ("batch.steps=4", "checkpoint.every_steps=0", "validation.every_steps=2")
TWO = "cluster.devices_per_node=2"
CUTS = {
    "hybrid": ("cluster.devices_per_node=4", "parallel.actor.fsdp_size=2"),
    "tensor": (TWO, "parallel.actor.tensor=2"),
    "sequence": (TWO, "parallel.actor.sequence=2"),
    "pipeline": (TWO, "parallel.actor.pipeline=2"),
    "optimizer on the disk": (TWO, "parallel.actor.tensor=2", "offload.actor.optimizer=disk"),
    "adapters": (TWO, "model.lora={rank: 2}"),
    "adapters on cut layers": (TWO, "model.lora={rank: 2}", "parallel.actor.tensor=2"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def held_out(inputs: Path) -> str:
    return f"data.validation.files=[{inputs / 'held_out.jsonl'}]"


def run(settings: SftSettings, *more: str) -> Path:
    assert main(command(settings, *more)) == 0
    return Path(settings.run_dir)


def assert_like(one: Path, other: Path) -> None:
    """The same losses, on held-out rows too, gradient norms and weights but for rounding."""
    records = [[(r["step"], r["metrics"]) for r in read_metrics(each)] for each in (one, other)]
    assert len(records[0]) == len(records[1])
    for (step, first), (same, second) in zip(*records, strict=True):
        assert step == same
        for name in {"loss", "grad_norm", "entropy", "learning_rate", "epoch", "perplexity"} & first.keys():
            assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-5), name
    newest = [sorted((each / "checkpoints").glob("step-*"))[-1] for each in (one, other)]
    files = [
        file.relative_to(newest[0]) for file in newest[0].rglob("*.safetensors") if file.name != "state.safetensors"
    ]
    assert files
    for file in files:
        first, second = (load_file(each / file) for each in newest)
        assert first.keys() == second.keys()
        for name, value in first.items():
            # Adam divides by the size of a gradient: where that is rounding alone, so is the step.
            torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_two_devices_learn_what_one_does_and_go_on_where_it_stopped(inputs: Path, tmp_path: Path) -> None:
    """One device makes two steps, two devices the next two, with the optimizer on the host: as one that was never interrupted
    and has it where it computes. Both measure the same on held-out rows."""
    steady = ("optimizer.schedule=constant", "checkpoint.every_steps=0", "validation.every_steps=2", held_out(inputs))
    whole = run(sft_settings(inputs, tmp_path / "whole", *steady, "batch.steps=4"))
    assert [r["step"] for r in read_metrics(whole) if r["kind"] == "validation"] == [0, 2, 4]
    run(sft_settings(inputs, tmp_path / "parts", *steady, "batch.steps=2"))
    away = "offload.actor.optimizer=host"
    parts = run(sft_settings(inputs, tmp_path / "parts", *steady, "batch.steps=4", TWO, away), "--resume")
    assert_like(whole, parts)
    lines = [json.loads(line) for line in (parts / "memory.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rank"]) for line in lines] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert {line["at"]["actor.optimizer"] for line in lines} == {"host"}
    assert "peak_memory_bytes/rank1" in read_metrics(parts)[-1]["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_other_cuts_learn_the_same(inputs: Path, tmp_path: Path, cut: str) -> None:
    more = tuple(change for change in CUTS[cut] if change.startswith("model."))
    given = (*BRIEF, held_out(inputs))
    alone = run(sft_settings(inputs, tmp_path / "alone", *given, *more))
    assert_like(alone, run(sft_settings(inputs, tmp_path / "run", *given, *CUTS[cut])))


def test_the_plan_shows_the_share_and_the_memory_of_each_device(inputs: Path) -> None:
    memory = ("device=cuda", "device_memory_bytes=8000000000")
    plan = build_plan(sft_settings(inputs, inputs / "run", TWO, *memory), 14)
    assert not plan.problems
    assert plan.value("actor replicas") == 2 and plan.value("samples per device per update") == 3
    assert plan.value(RECOMPUTED) == "no"
    alone, shared = (
        build_plan(sft_settings(inputs, inputs / "run", TWO, *memory, *cut), 14).value("actor: weights")
        for cut in (("parallel.actor.fsdp_size=1",), ())
    )
    assert isinstance(alone, int) and isinstance(shared, int) and shared < 0.6 * alone
    busy = next(line for line in draw(plan.layout).splitlines() if line.startswith("actor") and "■" in line)
    assert busy.count("■") == 1
    assert not any("log-prob" in line.name or "rollout" in line.name for line in plan.lines)


@pytest.mark.parametrize(
    ("changes", "code", "suggested"),
    [
        (("cluster.devices_per_node=8",), "B010", "batch.samples_per_update=8"),
        (("cluster.devices_per_node=3", "parallel.actor.tensor=2"), "G002", "parallel.actor.tensor=1"),
        (("cluster.node_names=[a,a]", "cluster.nodes=2"), "T002", "cluster.node_names"),
        ((TWO, "device=cuda", "device_memory_bytes=1000000"), "M007", "device_memory_bytes="),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(
    inputs: Path, changes: tuple[str, ...], code: str, suggested: str
) -> None:
    problems = build_plan(sft_settings(inputs, inputs / "run", *changes), 14).problems
    assert [problem.code for problem in problems] == [code]
    assert suggested in problems[0].fix
    for change in problems[0].suggestions:
        assert not build_plan(sft_settings(inputs, inputs / "run", *changes, *change), 14).problems
