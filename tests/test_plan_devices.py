"""Nodes, devices, placement, meshes and the batch over devices: what a run is laid out as, and what is refused."""

import json
from pathlib import Path

import pytest
import yaml

from meshloom.config.load import dump_yaml, load_settings
from meshloom.config.problems import Problem
from meshloom.config.resume import require_same
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


@pytest.mark.parametrize(
    ("code", "overrides", "said"),
    [
        ("T001", ["cluster.nodes=3", "cluster.node_names=[a,b]"], "2 names for cluster.nodes=3"),
        ("T002", ["cluster.nodes=2", "cluster.node_names=[a,a]"], "the node a is named twice"),
        ("T003", ["cluster.nodes=2", "cluster.node_names=['gpu[1-x]']"], "is no list of names"),
        ("P001", ["placement.actor=[cuda:0]"], "devices are integers (as this process sees them) or node:index"),
        ("P001", ["placement.actor=[first]"], "devices are integers"),
        ("P001", ["placement.actor=[2-1]"], "2 comes after 1"),
        ("P002", ["placement.actor=[0,-1]"], "device -1: node has 0-3"),
        ("P002", ["placement.actor=[2-5]"], "device 5: node has 0-3"),
        ("P003", ["placement.actor=[0-2,1]"], "device 1 is named twice"),
        ("P004", ["placement.actor=[node2:0]"], "there is no node 'node2': the nodes are node1"),
        ("P005", ["cluster.nodes=2", "placement.actor=[1]"], "device 1 could be on any of 2 nodes"),
        ("P006", ["placement.rollout=[]"], "placement.rollout names no device"),
        ("P007", ["placement.map=nowhere.yaml"], "cannot be read"),
        ("G002", ["parallel.actor.tensor=2", "parallel.actor.pipeline=3"], "4 is not divisible by"),
        ("G003", ["algorithm.kl=loss", "parallel.reference.fsdp_size=3"], "reference: 4 is not divisible by 3"),
        ("B012", ["batch.prompts_per_step=1", "batch.samples_per_prompt=2", "placement.rollout=[0]",
                  "placement.actor=[0,1]", "algorithm.kl=loss"], "2 samples a step over 4 devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused(code: str, overrides: list[str], said: str) -> None:
    problem = only(refused("cluster.devices_per_node=4", *overrides))
    assert problem.code == code
    assert said in problem.what


TWO_EACH = ["parallel.actor.stages_per_device=2"]
MODEL = Divisible(layers=28, heads=12, key_value_heads=2, intermediate=8960)


@pytest.mark.parametrize(
    ("code", "override", "said"),
    [
        ("G005", "parallel.actor.pipeline=8", "28 layers are not divisible by pp 8; valid: 1, 2, 4, 7, 14, 28"),
        ("G006", "parallel.rollout.tensor=8", "12 heads (and 2 for keys and values) are not divisible by tp 8"),
        ("G006", "parallel.actor.tensor=8", "valid: 1, 2, 4"),
        ("G007", "parallel.actor.sequence=8", "not divisible by sp 8; valid: 1, 2, 4"),
    ],
)
def test_cuts_must_go_into_the_model(code: str, override: str, said: str) -> None:
    problem = only(refused("cluster.devices_per_node=8", override, model=MODEL))
    assert (problem.code, said in problem.what) == (code, True), problem.what
    assert refused("cluster.devices_per_node=4", override.replace("=8", "=4"), model=MODEL) == []


@pytest.mark.parametrize(
    ("given", "said", "suggested"),
    [
        (
            ["pipeline=4", "stages_per_device=3"],
            "layers do not go into pp 4 × 3 stages of each device; valid: 1, 7",
            ["7", "1"],
        ),
        (["stages_per_device=2"], "stages_per_device 2 on devices without a pipeline, as pp is 1; valid: 1", ["1"]),
    ],
)
def test_stages_of_each_device_must_go_into_the_layers(given: list[str], said: str, suggested: list[str]) -> None:
    problem = only(refused("cluster.devices_per_node=8", *(f"parallel.actor.{name}" for name in given), model=MODEL))
    assert problem.code == "G005" and said in problem.what
    assert problem.suggestions[: len(suggested)] == tuple(
        (f"parallel.actor.stages_per_device={size}",) for size in suggested
    )
    both = only(refused("cluster.devices_per_node=8", "parallel.actor.pipeline=8", *TWO_EACH, model=MODEL))
    assert "28 layers are not divisible by pp 8" in both.what and both.suggestions[0] == ("parallel.actor.pipeline=2",)
    assert refused("cluster.devices_per_node=8", "parallel.actor.pipeline=2", *TWO_EACH, model=MODEL) == []


def test_the_last_names_of_a_list_are_found_in_long_ones_too() -> None:
    given = ["cluster.nodes=16", "cluster.devices_per_node=8", "cluster.node_names=['gpu[01-16]']"]
    found = laid_out(*given, "placement.actor=['gpu[01-12]:all']", "placement.rollout=['gpu[13-16]:0-3']", *ROOMY)
    assert found.faults == ()
    actor, rollout = found.layout.role(Role.ACTOR), found.layout.role(Role.ROLLOUT)
    assert actor is not None and rollout is not None
    assert (len(actor.devices), len(rollout.devices), len(found.layout.idle)) == (96, 16, 16)
    assert found.layout.topology.entries(rollout.devices) == [f"gpu{node}:0-3" for node in range(13, 17)]
    assert "did you mean" not in only(refused(*given, "placement.actor=[gpu17:0]", *ROOMY)).what
    assert ("placement.actor=[gpu16:0]",) in only(refused(*given, "placement.actor=[gup16:0]", *ROOMY)).suggestions


def test_a_run_that_says_nothing_of_devices_is_on_one() -> None:
    """A machine with eight GPUs trained on the first, and the plan must not say otherwise."""
    assert laid_out(machine=8).layout.topology.num_devices == 1
    assert laid_out("parallel.rollout.tensor=2", machine=8).layout.topology.num_devices == 8
    assert laid_out("placement.actor=[2]", machine=0).layout.topology.num_devices == 3
    assert laid_out("offload.actor.optimizer=host", machine=8).layout.topology.num_devices == 1


def test_a_map_beats_the_file_and_an_override_beats_the_map(tmp_path: Path) -> None:
    run, file = tmp_path / "run.yaml", tmp_path / "map.yaml"
    run.write_text(yaml.safe_dump({"parallel": {"actor": {"tensor": 4}}, "rollout": {"max_sequences": 7}}))
    file.write_text("actor: {devices: all, parallelism: {tensor_parallel_size: 2}}\nrollout: {devices: [0, 1]}\n")
    given = ["cluster.devices_per_node=4", f"placement.map={file}"]
    found = lay_out(settings(*given, file=run), None, 0).settings
    assert (found.parallel.actor.tensor, found.rollout.max_sequences, found.placement.rollout) == (2, 7, (0, 1))
    assert found.provenance.of("parallel.actor.tensor") == f"{file}:1"
    found = lay_out(settings(*given, "parallel.actor.tensor=1", "placement.rollout=[3]", file=run), None, 0).settings
    assert (found.parallel.actor.tensor, found.placement.rollout) == (1, (3,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acter: {devices: [0]}", "there is no role 'acter': did you mean actor?"),
        ("actor: {device: [0]}", "actor has no devices"),
        ("actor: {devices: {a: 1}}", "actor.devices is no list of devices"),
        ("actor: {devices: [0], parallelism: {tensor_paralel_size: 2}}", "did you mean tensor_parallel_size?"),
        ("actor: {devices: [0], parallelism: {tensor_parallel_size: two}}", "expected a whole number ≥ 1"),
        ("actor: {devices: [0], parallelism: {fsdp: 3}}", "expected true or false"),
        ("actor: {devices: [0]}\nrollout: {devices: [0], backend: sglang}", "expected one of vllm, torch, hf"),
        ("actor: {devices: [0", "this is not YAML"),
        ("[0, 1]", "holds no roles"),
    ],
)
def test_what_a_map_cannot_say_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "map.yaml"
    file.write_text(text)
    problem = only(refused(f"placement.map={file}"))
    assert said in problem.what
    assert str(file) in problem.what


def test_warnings_say_what_is_likely_not_meant() -> None:
    def warned(*overrides: str) -> list[str]:
        found_in = laid_out("cluster.devices_per_node=4", "batch.prompts_per_step=8", *overrides)
        found = check_settings(found_in.settings, None)
        check_devices(found, found_in, None, 0, None)
        assert found.problems == []
        return [warning.code for warning in found.warnings]

    assert warned() == []
    assert warned("placement.actor=[0-2]", "placement.rollout=[0,1]", "batch.samples_per_prompt=6") == ["P009"]
    assert warned("placement.reference=[1]") == ["P010"]
    assert warned("placement.critic=[1]") == ["P011"]
    assert warned("batch.prompts_per_step=9", "batch.samples_per_prompt=4") == ["B013"]
    assert warned("cluster.nodes=2", "cluster.devices_per_node=2", "parallel.actor.sequence=4") == ["G009"]
    assert warned("offload.reference.optimizer=host", "algorithm.kl=loss") == ["F001"]
    assert warned("offload.critic.parameters=host") == ["F002"]
    assert warned("offload.folder=/tmp/x") == ["F003"]
    assert warned("offload.folder=/tmp/x", "offload.actor.optimizer=disk") == []


def test_a_run_goes_on_with_other_devices() -> None:
    """They change rounding, as another device does, and nothing else."""
    moved = ["cluster.nodes=2", "placement.actor=[node1:0]", "parallel.actor.tensor=2", "offload.actor.parameters=host"]
    require_same(settings(), settings(*moved))


def test_a_lag_is_refused_where_generation_and_training_take_turns() -> None:
    lagged = "algorithm.max_lag_versions=1"
    alone = only(refused(lagged))
    assert (alone.code, alone.suggestions) == ("A011", (("algorithm.max_lag_versions=0",),))
    eight = ("cluster.devices_per_node=8", "placement.reference=[0-3]", "algorithm.kl=loss")
    shared = only(refused(lagged, *eight))
    assert shared.suggestions[1] == ("placement.actor=[0-3]", "placement.rollout=[4-7]")
    assert only(refused(lagged, "cluster.devices_per_node=4", "placement.rollout=[2]")).code == "A011"
    assert refused(lagged, *eight, *shared.suggestions[1]) == []
