"""Supervised runs whose optimizer is elsewhere but for its turns in an update: the run without, in less memory."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshloom.config.errors import RunFault
from meshloom.config.settings import OptimizerSettings
from meshloom.loop.sft import run_sft
from meshloom.plan.build import build_plan
from meshloom.plan.residency import Residency
from meshloom.plan.sft_outlook import TOKENS_A_SECOND
from meshloom.plan.stays import Part
from meshloom.train.model import TrainedModel
from meshloom.train.optimizer import Optimizer
from meshloom.train.snapshot import ModelSnapshot
from meshloom.train.streaming import OptimizerStream
from tests.lesson_runs import assert_same_run, sft_settings, train_settings, write_inputs
from tests.test_train_residency import build, held, update

AWAY = [Residency.HOST, Residency.DISK]
BRIEF = ("batch.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=3", "optimizer.schedule=constant")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def streamed(model: TrainedModel, place: Residency, folder: Path, pieces: int = 5) -> OptimizerStream:
    return OptimizerStream("actor", model.optimizer, place, device=model.device, folder=folder, pieces=pieces)


def on_device(model: TrainedModel, names: Collection[str]) -> int:
    """Bytes of state that has memory."""
    found = model.optimizer.state_tensors(names).values()
    return sum(tensor.untyped_storage().nbytes() for tensor in found if tensor.numel() > 1)


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize(("dtype", "lora"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_updates_in_turns_are_updates_bit_for_bit(
    tmp_path: Path, place: Residency, dtype: torch.dtype, lora: bool
) -> None:
    here, away = build(dtype=dtype, lora=lora), build(dtype=dtype, lora=lora)
    stream = streamed(away, place, tmp_path)
    for _ in range(3):
        stream.park(Part.OPTIMIZER)
        stream.require(Part.OPTIMIZER, place)
        update(here)
        update(away)
    stream.require(Part.OPTIMIZER, place)
    assert on_device(away, away.optimizer.masters) == 0
    kept, twin = ModelSnapshot.take(away, None).optimizer, ModelSnapshot.take(here, None).optimizer
    assert list(kept) == list(twin) and all(torch.equal(kept[name], twin[name]) for name in twin)
    stream.require(Part.OPTIMIZER, place)  # a snapshot leaves it away
    weights = dict(away.module.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in here.module.named_parameters())

    fresh = build(dtype=dtype, lora=lora)
    again = streamed(fresh, place, tmp_path / "fresh", pieces=2)
    fresh.optimizer.load_state_tensors(kept, updates=3)
    again.require(Part.OPTIMIZER, place)
    assert all(torch.equal(value, kept[name]) for name, value in ModelSnapshot.take(fresh, None).optimizer.items())
    for each in (stream, again):
        each.close()
    assert not list(tmp_path.rglob("*.optimizer.*"))


def test_two_pieces_at_most_are_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(dtype=torch.bfloat16)
    stream = streamed(model, Residency.HOST, tmp_path)
    stream.park(Part.OPTIMIZER)
    update(model)
    most: list[tuple[int, int]] = []
    visit = stream.visit

    def watched(*, changes: bool) -> Iterator[Collection[str]]:
        for names in visit(changes=changes):
            most.append((on_device(model, model.optimizer.masters), on_device(model, names)))
            yield names

    monkeypatch.setattr(stream, "visit", watched)
    update(model)
    masters = model.optimizer.masters
    assert sum(own for _, own in most) == 12 * sum(p.numel() for p in masters.values())
    sizes = [own for _, own in most]
    assert len(sizes) >= 4
    assert [held for held, _ in most] == [a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)]


def test_whole_slabs_of_the_host_are_little_more_than_what_is_in_them(tmp_path: Path) -> None:
    """As a GPU has them, whose memory on the host is pinned in whole slabs."""
    module = nn.Sequential(*(nn.Linear(64, 65, bias=False) for _ in range(24))).bfloat16()
    stream = OptimizerStream(
        "actor",
        Optimizer(module, OptimizerSettings()),
        Residency.HOST,
        device=torch.device("cpu"),
        folder=tmp_path,
    )
    of_layer, taken = 12 * 64 * 65, 0
    for piece in stream._pieces:
        slab = piece.shelf._slab_bytes
        taken += -(-len(piece.names) * of_layer // slab) * slab
    assert taken < 1.5 * 24 * of_layer


def test_state_that_is_on_the_device_between_updates_stops_the_run(tmp_path: Path) -> None:
    model = build(dtype=torch.bfloat16)
    stream = streamed(model, Residency.HOST, tmp_path)
    with pytest.raises(RunFault, match="still on the device"):
        stream.require(Part.OPTIMIZER, Residency.HOST)
    stream.park(Part.OPTIMIZER)
    next(iter(held(model).values()))
    next(m for m in model.optimizer.masters.values() if m.numel() > 1).untyped_storage().resize_(8)
    with pytest.raises(RunFault, match="the optimizer of the actor"):
        stream.require(Part.OPTIMIZER, Residency.HOST)


def boundaries(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "memory.jsonl").read_text().splitlines()]


def test_a_run_with_its_optimizer_away_is_the_run_without_and_resumes(inputs: Path, tmp_path: Path) -> None:
    narrow = (*BRIEF, "model.dtype=bfloat16")
    assert run_sft(sft_settings(inputs, tmp_path / "whole", *narrow), resume=False) == 0
    assert not (tmp_path / "whole" / "memory.jsonl").exists()
    for place in AWAY:
        moved = (*narrow, f"offload.actor.optimizer={place}")
        run_dir = tmp_path / place
        assert run_sft(sft_settings(inputs, run_dir, *moved, "batch.steps=2"), resume=False) == 0
        assert run_sft(sft_settings(inputs, run_dir, *moved), resume=True) == 0
        assert_same_run(tmp_path / "whole", run_dir)
        assert not (run_dir / "offload").exists()
        lines = boundaries(run_dir)
        assert [(line["step"], line["phase"]) for line in lines] == [(step, "update") for step in (1, 2, 3)]
        assert all(line["at"] == {"actor.parameters": "device", "actor.optimizer": str(place)} for line in lines)


def test_the_plan_counts_the_optimizer_in_turn(inputs: Path) -> None:
    gpu = ("device=cuda", "device_memory_bytes=8000000000", "model.dtype=bfloat16")
    here, away = (
        build_plan(sft_settings(inputs, inputs / "run", *gpu, *more), 14)
        for more in ((), ("offload.actor.optimizer=host",))
    )
    assert not away.problems and away.layout is None
    values = {line.name: line for line in away.lines}
    count = here.value("trained parameters")
    assert isinstance(count, int)
    assert values["actor: float32 masters"].value == 4 * count
    assert values["actor: optimizer moments"].value == 8 * count
    assert values["kept on the host"].value == 12 * count
    assert values["actor: optimizer moments"].phases == ()
    assert values["actor: optimizer"].formula == "on the device in pieces, in each update; else on the host"
    in_turn = values["actor's step: optimizer in turn"].value
    others = [line for line in away.lines if line.name.startswith("actor: ") and "update" in line.phases]
    steady = sum(line.value for line in others if line.name.split(": ")[1] in ("weights", "gradients"))
    passing = sum(line.value for line in others) - steady
    assert values["held in update"].value == steady + max(in_turn, passing)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("offload.actor.parameters=host", "F004", "offload.actor.optimizer=host"),
        ("offload.folder=/tmp", "F003", "nothing goes to disk"),
    ],
)
def test_what_a_supervised_run_cannot_use_is_told(inputs: Path, change: str, code: str, words: str) -> None:
    plan = build_plan(sft_settings(inputs, inputs / "run", change), 14)
    (found,) = [*plan.problems, *(each for each in plan.warnings if each.code == code)]
    assert found.code == code and words in f"{found.what} {found.fix}"


def test_the_plan_estimates_the_seconds_of_a_step_as_those_of_an_update(inputs: Path) -> None:
    """The same samples take an update of reinforcement learning as long."""
    kind = ("device=cuda", "cluster.device=h200", "model.dtype=bfloat16")
    plan = build_plan(sft_settings(inputs, inputs / "run", *kind), 14)
    same = ("batch.prompts_per_step=6", "batch.samples_per_prompt=1", "batch.prompts_per_update=6", "algorithm.kl=none")
    other = build_plan(train_settings(inputs, inputs / "run", *kind, *same, "rollout.max_response_tokens=16"), 14)
    update = {line.name: line.value for line in plan.lines if line.name.startswith("actor: update")}
    assert update and update == {line.name: line.value for line in other.lines if line.name in update}
    step = plan.value("step")
    assert step == pytest.approx(update["actor: update"] + 0.06)
    assert plan.value(TOKENS_A_SECOND) == pytest.approx(6 * (64 + 16) / step, rel=1e-2)
    away = build_plan(sft_settings(inputs, inputs / "run", *kind, "offload.actor.optimizer=host"), 14)
    moved = [line.value for line in away.lines if line.name.startswith("offload: ")]
    assert len(moved) == 2 and away.value("step") == pytest.approx(step + sum(moved), abs=1e-5)
    assert not any(line.section == "time" for line in build_plan(sft_settings(inputs, inputs / "run"), 14).lines)
