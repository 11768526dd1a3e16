"""Nodes, devices, placement, meshes and the batch over devices: what a run is laid out as, and what is refused."""

import json
from pathlib import Path

import pytest
import yaml

from meshloom.config.load import dump_yaml, load_settings
from meshloom.config.problems import Problem
from meshloom.config.settings import TrainSettings
from meshloom.plan.checks import check_settings
from meshloom.plan.device_checks import LaidOut, check_devices, lay_out
from meshloom.plan.meshes import Divisible
from meshloom.plan.placement import Role
from meshloom.plan.spread import ledger_over_devices

CASES = json.loads((Path(__file__).parent / "data" / "device_mapping.json").read_text())
REQUIRED = ["run_dir=runs/a", "model.path=models/a", "data.train.reasoning_gym=basic_arithmetic"]
ROOMY = ["batch.tokens_per_microbatch=1000000", "batch.prompts_per_step=4096"]


def settings(*overrides: str, file: Path | None = None) -> TrainSettings:
    return load_settings(TrainSettings, file, [*REQUIRED, *overrides])


def laid_out(*overrides: str, model: Divisible | None = None, machine: int = 0) -> LaidOut:
    return lay_out(settings(*overrides), model, machine)


def refused(*overrides: str, model: Divisible | None = None, machine: int = 0) -> list[Problem]:
    """What is refused; every suggestion is taken, and must then end its fault without another."""
    found_in = laid_out(*overrides, model=model, machine=machine)
    found = check_settings(found_in.settings, None)
    before = {(problem.code, problem.where.partition(" ")[0]) for problem in found.problems}
    check_devices(found, found_in, model, machine, None)
    problems = found.problems[len(before) :]
    faults = {(fault.code, fault.path) for fault in found_in.faults}
    for problem in problems:
        assert problem.suggestions, problem
        for change in problem.suggestions:
            after = laid_out(*overrides, *change, model=model, machine=machine).faults
            left = {(fault.code, fault.path) for fault in after}
            assert left < faults, (problem, change, left)
            assert all(text in problem.fix for text in change)
    return problems


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def mesh_overrides(case: dict) -> list[str]:
    nodes, role = case.get("nodes", 1), case["role"]
    keys = {"fsdp_size": "fsdp_size", "tp": "tensor", "sp": "sequence"}
    cuts = [f"parallel.{role}.{keys[key]}={case[key]}" for key in keys if case.get(key, -1) > 0]
    size = case.get("devices_per_node", case["world"] // nodes)
    return [*ROOMY, f"cluster.nodes={nodes}", f"cluster.devices_per_node={size}", *cuts]


@pytest.mark.parametrize("case", CASES["meshes"], ids=lambda case: "-".join(map(str, list(case.values())[:-1])))
def test_meshes_are_those_of_the_cases(case: dict) -> None:
    given, expected = mesh_overrides(case), case["expect"]
    if error := expected.get("error", expected.get("error_or_warning")):
        assert error in only(refused(*given)).what
        return
    found = laid_out(*given)
    assert found.faults == ()
    role = found.layout.role(Role(case["role"]))
    assert role is not None
    mesh = role.sequence_mesh or role.mesh
    assert [list(mesh.dims), list(mesh.shape)] == [expected["dims"], expected["shape"]]
    assert mesh.ranks() == expected.get("ranks", mesh.ranks())
    if expected.get("every_tp_group_on_one_node"):
        size = found.layout.topology.devices_per_node
        assert all(len({role.devices[rank] // size for rank in group}) == 1 for group in mesh.ranks())


def batch_overrides(case: dict) -> list[str]:
    given = [
        f"cluster.nodes={case['nodes']}",
        f"cluster.devices_per_node={case['devices_per_node']}",
        f"batch.prompts_per_step={case['train_batch_size']}",
        f"batch.samples_per_prompt={case['n']}",
        f"batch.prompts_per_update={case['ppo_mini_batch_size']}",
        f"parallel.rollout.tensor={case['rollout_tp']}",
        "batch.tokens_per_microbatch=1000000",
    ]
    size = case.get("log_prob_micro_batch_size_per_gpu")
    return given + ([f"batch.samples_per_microbatch={size}"] if size else [])


def test_batches_over_devices_are_those_of_the_cases() -> None:
    from meshloom.plan.ledger import batch_ledger

    lines = {
        "prompts_per_rollout_replica": "prompts per rollout replica",
        "samples_per_rollout_replica": "samples per rollout replica",
        "samples_per_step": "samples per step",
        "samples_per_update": "samples per update",
        "samples_per_device_per_update": "samples per device per update",
        "optimizer_updates_per_step": "updates per step",
        "log_prob_microbatches_total": "log-prob microbatches in all",
        "log_prob_microbatches_per_device": "log-prob microbatches per device",
        "rollout_replicas": "rollout replicas",
    }
    compared = 0
    for case in CASES["batches"]:
        given = settings(*batch_overrides(case))
        found = lay_out(given, None, 0)
        values = {
            line.name: line.value for line in (*batch_ledger(given, None), *ledger_over_devices(given, found.layout))
        }
        for key, value in case["expect"].items():
            if key in lines:
                assert values[lines[key]] == value, (case["name"], key)
                compared += 1
    assert compared >= 16


def test_a_batch_that_does_not_divide_is_ragged_and_the_nearest_that_do_are_named() -> None:
    case = next(case for case in CASES["batches"] if case["name"] == "not divisible by the devices")
    given = [text for text in batch_overrides(case) if "prompts_per_update" not in text]
    assert refused(*given) == []
    found = check_settings(settings(*given), None)
    check_devices(found, laid_out(*given), None, 0, None)
    warning = next(warning for warning in found.warnings if warning.code == "B013")
    assert "batch.prompts_per_step=60 or batch.prompts_per_step=66" in warning.fix
    lines = {line.name: line.value for line in ledger_over_devices(settings(*given), laid_out(*given).layout)}
    assert (lines["prompts per rollout replica"], lines["samples per device per update"]) == ("21 or 22", "10 or 11")


def test_devices_without_a_sample_are_refused_with_the_smallest_batch_that_works() -> None:
    case = next(case for case in CASES["batches"] if case["name"] == "mini batch normalises to nothing")
    update, rollout = refused(*batch_overrides(case))
    assert "4 samples an update over 8 devices leaves some with none" in update.what
    assert "4 prompts a step over 8 rollout replicas leaves some with none" in rollout.what
    assert ("batch.prompts_per_update=8", "batch.prompts_per_step=8") in update.suggestions
    assert ("parallel.rollout.tensor=2",) in rollout.suggestions


@pytest.mark.parametrize("case", CASES["device_maps"], ids=lambda case: case["name"])
def test_device_maps_are_read_as_in_the_cases(case: dict, tmp_path: Path) -> None:
    file = tmp_path / "map.yaml"
    file.write_text(yaml.safe_dump(case["yaml"]))
    given = [f"placement.map={file}", *ROOMY]
    if "devices_per_node" in case:
        given.append(f"cluster.devices_per_node={case['devices_per_node']}")
    expected = case["expect"]
    if "error" in expected:
        assert expected["error"] in only(refused(*given)).what
        return
    found = laid_out(*given)
    assert found.faults == ()
    shared = found.layout.as_json()["shared"]
    assert {device: sorted(roles) for device, roles in shared.items()} == expected.get("shared", {})
    assert (found.settings.rollout.engine, found.settings.placement.map) == ("vllm", None)
    for name in expected.get("tp_groups_within_a_node", {}):
        role, size = found.layout.role(Role(name)), found.layout.topology.devices_per_node
        assert role is not None and role.mesh.dims[-1] == "tp"
        groups = range(0, len(role.devices), role.mesh.size("tp"))
        assert all(role.devices[first] // size == role.devices[first + 1] // size for first in groups)
    written = tmp_path / "settings.yaml"
    written.write_text(dump_yaml(found.settings))
    assert lay_out(load_settings(TrainSettings, written), None, 0).layout == found.layout
