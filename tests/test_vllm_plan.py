"""The plan of a run that samples with vLLM: what it holds, and what it refuses."""

from pathlib import Path

import pytest

from meshloom.plan import build_plan
from meshloom.plan.carried_out import carried_out
from meshloom.plan.model_folder import read_model_folder
from meshloom.plan.parameters import count_parameters
from meshloom.plan.residency import Phase
from meshloom.plan.role_numbers import engine_role
from meshloom.plan.sharded_memory import engine_holdings
from tests.lesson_runs import train_settings, write_inputs

ON = "rollout.engine=vllm"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def codes(inputs: Path, *changes: str) -> set[str]:
    plan = build_plan(train_settings(inputs, inputs / "run", *changes), 14)
    return {problem.code for problem in (*plan.problems, *plan.warnings) if problem.code.startswith("E")}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (["rollout.vllm.enforce_eager=true"], "E001"),
        ([ON, "rollout.sampling.temperature=2.5"], "E002"),
        ([ON, "validation.sampling.temperature=0.001"], "E002"),
        ([ON, "rollout.sampling.top_p=0.9", "rollout.sampling.min_p=0.1"], "E003"),
        ([ON, "rollout.vllm.max_model_len=71"], "E004"),
    ],
)
def test_what_an_engine_does_not_do_is_refused(inputs: Path, changes: list[str], code: str) -> None:
    assert codes(inputs, *changes) == {code}


def test_what_it_does_is_not(inputs: Path) -> None:
    assert (
        codes(inputs) == codes(inputs, ON, "rollout.vllm.max_model_len=72", "rollout.sampling.temperature=2") == set()
    )


@pytest.mark.parametrize(
    ("device", "sleep", "while_updating"), [("cuda", "true", 0), ("cuda", "false", 1), ("cpu", "true", 1)]
)
def test_vllms_weights_and_cache_are_in_the_phases_that_hold_them(
    inputs: Path, device: str, sleep: str, while_updating: int
) -> None:
    changes = [
        f"device={device}",
        "rollout.kv_cache_bytes=5000000",
        f"rollout.vllm.sleep={sleep}",
        "model.dtype=float32",
    ]
    plan = build_plan(train_settings(inputs, inputs / "run", ON, *changes), 14)
    values = {line.name: line.value for line in plan.lines}
    own = values["weights"] + 5_000_000
    assert values["vLLM's weights"] == values["weights"] and values["key-value cache"] == 5_000_000
    update = {
        "logits",
        "activations",
        "gradients",
        "float32 masters",
        "optimizer moments",
        "weights",
        "reference weights",
    }
    rest = sum(values[name] for name in update)
    assert values["peak while updating"] - rest == while_updating * own


def holdings(inputs: Path, *changes: str) -> dict[str, object]:
    """What the first device of the rollout holds of its engine, by name."""
    settings = train_settings(inputs, inputs / "run", ON, "cluster.devices_per_node=2", "device=cuda", *changes)
    plan = build_plan(settings, 14, 2**33)
    assert not plan.problems, plan.problems
    numbers = count_parameters(read_model_folder(inputs / "model").text_config)
    return {held.name: held for held in engine_holdings(engine_role(settings, plan.layout, numbers))}


def test_over_devices_vllm_has_a_copy_and_takes_tensors_whole(inputs: Path) -> None:
    """Where it shares devices it sleeps while they train; on its own it is there all the time."""
    shared = holdings(inputs)
    assert set(shared["engine's weights"].phases) == {Phase.GENERATE, Phase.SYNC}
    assert set(shared["key-value cache"].phases) == {Phase.GENERATE, Phase.SYNC}
    assert shared["whole tensors"].phases == (Phase.SYNC,)
    apart = holdings(inputs, "placement.actor=[0]", "placement.reference=[0]", "placement.rollout=[1]")
    assert set(apart["engine's weights"].phases) == set(apart["key-value cache"].phases) == set(Phase)
    assert apart["weights in movement"].bytes * 2 == shared["weights in movement"].bytes
    halves = holdings(inputs, "parallel.rollout.tensor=2")
    assert halves["engine's weights"].bytes < 0.7 * shared["engine's weights"].bytes
    assert halves["whole tensors"].bytes == shared["whole tensors"].bytes


def test_train_carries_out_vllm_over_devices(inputs: Path) -> None:
    given = ("cluster.devices_per_node=2", "parallel.rollout.tensor=2", "device=cpu")
    assert carried_out(train_settings(inputs, inputs / "run", ON, *given)).is_spread
