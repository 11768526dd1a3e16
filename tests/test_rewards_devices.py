"""Reward models in runs over several devices: wherever they are, each sample gets the score of one process."""

import json
from pathlib import Path

import pytest

from meshloom.config.settings import TrainSettings
from meshloom.loop.train import run_training
from meshloom.plan.build import Plan, build_plan
from meshloom.plan.device_map import with_device_map
from meshloom.plan.residency import Phase
from tests.lesson_runs import train_settings, whole_checkpoints, write_inputs, write_reward_model

TWO = "cluster.devices_per_node=2"
OF_ITS_OWN = (TWO, "placement.actor=[0]", "placement.reference=[0]", "placement.rollout=[0]", "placement.reward=[1]")

APART = ("placement.actor=[0]", "placement.reference=[0]", "placement.rollout=[1]")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    write_reward_model(folder / "judge", folder / "model")
    return folder


def modelled(inputs: Path, run_dir: Path, *changes: str) -> TrainSettings:
    return train_settings(
        inputs,
        run_dir,
        "reward.function=null",
        f"reward.components.task.function={inputs / 'reward.py'}:score",
        f"reward.components.quality.model.path={inputs / 'judge'}",
        "reward.components.quality.weight=0.1",
        "reward.overlong.buffer_tokens=4",
        "batch.steps=2",
        "checkpoint.every_steps=0",
        "validation.every_steps=0",
        *changes,
    )


def samples(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Path:
    """A finished run on one device."""
    assert run_training(modelled(inputs, inputs / "alone"), resume=False) == 0
    return inputs / "alone"


def assert_same_rewards(one: Path, other: Path) -> None:
    pairs = list(zip(samples(one), samples(other), strict=True))
    assert pairs
    for first, second in pairs:
        assert (first["step"], first["response_ids"]) == (second["step"], second["response_ids"])
        assert first["reward"] == pytest.approx(second["reward"], abs=1e-5)
        assert first["parts"] == pytest.approx(second["parts"], abs=1e-5)


def test_a_reward_model_on_a_device_of_its_own_gives_the_same_rewards(inputs: Path, alone: Path) -> None:
    assert run_training(modelled(inputs, inputs / "own", *OF_ITS_OWN), resume=False) == 0
    assert_same_rewards(alone, inputs / "own")


SLOW = {
    "shared": (TWO,),
    "shared, moved away": (TWO, "offload.reward.parameters=host", "offload.actor.parameters=host"),
    "two of their own": (
        "cluster.devices_per_node=3",
        "placement.actor=[0]",
        "placement.reference=[0]",
        "placement.rollout=[0]",
        "placement.reward=[1,2]",
    ),
    "with the trainer": (TWO, *APART, "placement.reward=[0]"),
    "with the engine": (TWO, *APART, "placement.reward=[1]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_rewards_do_not_depend_on_where_their_model_is(inputs: Path, alone: Path, tmp_path: Path, layout: str) -> None:
    assert run_training(modelled(inputs, tmp_path / "run", *SLOW[layout]), resume=False) == 0
    assert_same_rewards(alone, tmp_path / "run")


def test_a_reward_model_that_is_moved_away_in_one_process_gives_the_same_rewards(
    inputs: Path, alone: Path, tmp_path: Path
) -> None:
    given = ("offload.reward.parameters=host", "offload.actor.parameters=host")
    assert run_training(modelled(inputs, tmp_path / "run", *given), resume=False) == 0
    assert_same_rewards(alone, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    at = {line["phase"]: line["at"]["reward.parameters"] for line in lines if "reward.parameters" in line["at"]}
    assert at["score"] == "device" and at["generate"] == at["update"] == "host"


def test_a_run_that_is_stopped_and_resumed_repeats_its_scores(inputs: Path, alone: Path, tmp_path: Path) -> None:
    brief = modelled(inputs, tmp_path / "run", "batch.steps=1", "optimizer.schedule=constant")
    whole = modelled(inputs, tmp_path / "whole", "optimizer.schedule=constant")
    assert run_training(brief, resume=False) == run_training(whole, resume=False) == 0
    longer = modelled(inputs, tmp_path / "run", "optimizer.schedule=constant")
    assert run_training(longer, resume=True) == 0
    assert whole_checkpoints(tmp_path / "run")[-1] == 2
    drawn = [
        [(s["response_ids"], s["reward"], s["parts"]) for s in samples(run) if s["kind"] == "train"]
        for run in (tmp_path / "run", tmp_path / "whole")
    ]
    assert drawn[0] == drawn[1]


def test_a_device_map_places_the_reward_model_and_says_its_arithmetic(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(
        "actor: {devices: [0]}\nrollout: {devices: [0]}\nreward: {devices: [1], dtype: bfloat16}\n"
    )
    given = modelled(inputs, tmp_path / "run", TWO, f"placement.map={tmp_path / 'map.yaml'}")
    plan = build_plan(given, 14)
    assert not plan.problems
    assert plan.layout is not None
    (found,) = [part for part in plan.layout.roles if part.role == "reward"]
    assert list(found.devices) == [1]
    settings, _ = with_device_map(given)
    assert settings.reward.components["quality"].model == given.reward.components["quality"].model.model_copy(
        update={"dtype": "bfloat16"}
    )


def memory_lines(plan: Plan) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {line.name: (line.value, line.phases) for line in plan.lines if line.unit == "bytes"}


def test_the_plan_counts_weights_and_batch_of_a_reward_model_where_it_is(inputs: Path, tmp_path: Path) -> None:
    alone = memory_lines(build_plan(modelled(inputs, tmp_path / "run"), 14))
    every = tuple(map(str, Phase))
    size = (inputs / "judge" / "model.safetensors").stat().st_size
    weights, phases = alone["reward: weights of quality"]
    assert phases == every and 0.9 * size < weights <= size
    assert "score" in alone["rollout: key-value cache"][1]
    assert alone["held in score"][0] >= weights + alone["reward: activations of quality"][0]
    own = build_plan(modelled(inputs, tmp_path / "run", *OF_ITS_OWN), 14)
    assert "score" not in memory_lines(own)["rollout: key-value cache"][1]
    moved = memory_lines(build_plan(modelled(inputs, tmp_path / "run", "offload.reward.parameters=host"), 14))
    assert moved["reward: weights of quality"] == (weights, ("score",))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ((*APART, "placement.reward=[0]"), "W022"),
    ],
)
def test_offload_of_a_reward_model_that_is_never_brought_back_is_refused(
    inputs: Path, tmp_path: Path, changes: tuple[str, ...], code: str
) -> None:
    plan = build_plan(modelled(inputs, tmp_path / "run", TWO, "offload.reward.parameters=host", *changes), 14)
    assert [problem.code for problem in plan.problems] == [code]


KIND = ("device=cuda", "cluster.device=h200", "device_memory_bytes=100000000000", "model.dtype=bfloat16")


def seconds(plan: Plan) -> dict[str, float]:
    return {line.name: line.value for line in plan.lines if line.section == "time" and isinstance(line.value, float)}


def test_the_plan_forecasts_the_seconds_of_a_reward_model(inputs: Path, tmp_path: Path) -> None:
    """They follow generation on the engine's devices, go on beside it on others, and are those of the samples of a device."""

    def planned(*changes: str) -> dict[str, float]:
        found = build_plan(modelled(inputs, tmp_path / "run", *KIND, *changes), 14)
        assert not found.problems
        (line,) = (line for line in found.lines if line.name == "reward models")
        assert ("while others are generated" in line.formula) is ("placement.reward=[1]" in changes)
        return seconds(found)

    def in_turns(found: dict[str, float]) -> float:
        return sum(found[name] for name in found if name.count(":") == 1 and not name.endswith("waits")) + 0.06

    shared = planned()
    scored = shared["reward: score"]
    assert scored > 0 and shared["step"] == pytest.approx(in_turns(shared), abs=1e-4)
    own = planned(*OF_ITS_OWN)
    hidden = min(own["reward: score"], own["rollout: generate"])
    assert own["step"] == pytest.approx(in_turns(own) - hidden, abs=1e-4)
    more = planned("batch.prompts_per_step=4096", "batch.prompts_per_update=4096")
    both = planned("batch.prompts_per_step=4096", "batch.prompts_per_update=4096", TWO)
    assert more["reward: score"] > 10 * scored
    assert both["reward: score"] == pytest.approx(more["reward: score"] / 2, rel=0.02)


def test_a_reward_model_that_cannot_be_counted_is_said_to_be_left_out(inputs: Path, tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "judge", inputs / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    path = f"reward.components.quality.model.path={folder}"
    found = build_plan(modelled(inputs, tmp_path / "run", *KIND, path), 14)
    assert found.value("reward: score") == 0
    (line,) = (line for line in found.lines if line.name == "not counted among them")
    assert "quality" in line.formula
