"""Which role waits for which, and what a lag would gain, in the plan's time ledger."""

import json
from pathlib import Path

import pytest

from meshloom.cli import main
from meshloom.plan import Plan
from tests.test_plan_outlook import plan, public

NODE = ("cluster.devices_per_node=8", "cluster.device=h200")
SPLIT = (*NODE, "placement.actor=[0-3]", "placement.rollout=[4-7]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return public(tmp_path_factory.mktemp("models"), "Qwen2.5-1.5B")


def seconds(found: Plan) -> dict[str, float]:
    return {
        line.name: line.value for line in found.lines if line.section == "time" and isinstance(line.value, float | int)
    }


def formula(found: Plan, name: str) -> str:
    return next(line.formula for line in found.lines if line.name == name)


def test_roles_with_devices_of_their_own_wait_for_each_other(model: Path) -> None:
    found = plan(model, *SPLIT)
    took = seconds(found)
    assert took["actor: waits"] == pytest.approx(took["rollout: generate"])
    assert took["rollout: waits"] == pytest.approx(took["actor: update"])
    assert "of the step, for rollout: generate" in formula(found, "actor: waits")
    assert "of the step, for actor: update" in formula(found, "rollout: waits")


def test_a_lag_is_forecast_as_the_run_that_has_it(model: Path) -> None:
    """With the log-probs that its trainer computes more."""
    alone, lagged = plan(model, *SPLIT), plan(model, *SPLIT, "algorithm.max_lag_versions=1")
    assert seconds(alone)["step with a lag of 1 version"] == seconds(lagged)["step"] < seconds(alone)["step"]
    assert seconds(lagged)["step without a lag"] == seconds(alone)["step"]
    assert "step with a lag of 1 version" not in seconds(lagged)
    less = seconds(alone)["step"] - seconds(lagged)["step"]
    assert f"{less:.2f} s less" in formula(alone, "step with a lag of 1 version")
    took = seconds(lagged)
    assert took["actor: log-prob"] > 0
    shorter = "rollout" if took["rollout: generate"] < took["actor: update"] + took["actor: log-prob"] else "actor"
    assert took[f"{shorter}: waits"] == pytest.approx(
        abs(took["rollout: generate"] - took["actor: update"] - took["actor: log-prob"]),
        abs=took["rollout: sync"] * 1.01,
    )


def test_a_step_of_several_updates_needs_as_many_versions(model: Path) -> None:
    found = plan(model, *SPLIT, "batch.prompts_per_update=16")
    assert {"step with a lag of 4 versions", "step with a lag of 8 versions"} <= set(seconds(found))
    short = plan(model, *SPLIT, "batch.prompts_per_update=16", "algorithm.max_lag_versions=3")
    assert [warning.code for warning in short.warnings] == ["A012"]
    assert seconds(short)["step"] >= seconds(found)["step"]


def test_nothing_runs_ahead_where_generation_has_no_devices_of_its_own(model: Path) -> None:
    """Not even where only the reference is on them: its log-probs would wait for the rollout that runs ahead."""
    together, one = plan(model, *NODE), plan(model, "cluster.device=h200")
    assert seconds(together)["actor, rollout: waits"] == 0
    assert "devices that do nothing but generate" in formula(together, "step with a lag")
    assert not [line for line in one.lines if "waits" in line.name or "lag" in line.name]
    judged = (*SPLIT, "algorithm.kl=loss", "placement.reference=[4-7]")
    found, lagged = plan(model, *judged), plan(model, *judged, "algorithm.max_lag_versions=1")
    assert "step with a lag" in [line.name for line in found.lines]
    assert seconds(lagged)["step"] >= seconds(found)["step"]
    assert "A013" in [warning.code for warning in lagged.warnings]


def test_waits_are_in_the_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run_dir=r", f"model.path={model}", "data.train.reasoning_gym=basic_arithmetic", *SPLIT]
    assert main(["plan", "--kind", "train", "--json", *given]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    waits = {line["name"]: line for line in lines if line["section"] == "time" and "waits" in line["name"]}
    assert set(waits) == {"actor: waits", "rollout: waits"}
    assert all(line["unit"] == "s" and line["value"] > 0 for line in waits.values())
