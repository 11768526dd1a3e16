"""Memory and time in the plan: what is shown over devices, what does not fit and which changes make it fit."""

import json
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshloom.cli import main
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan import Plan, build_plan
from meshloom.plan.parameters import count_parameters
from meshloom.plan.report import plan_text

PUBLIC: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "public_models.json").read_text())
EIGHT = "cluster.devices_per_node=8"
DATA = ("run_dir=r", "data.train.reasoning_gym=basic_arithmetic", "rollout.max_response_tokens=1024")


def folder(path: Path, config: dict[str, Any], count: int) -> Path:
    """A model of one tensor of so many parameters, in a file that takes no room on the disk."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * count)
    return path


def public(tmp_path: Path, name: str) -> Path:
    return folder(tmp_path / name, PUBLIC[name], count_parameters(PUBLIC[name]).total)


def plan(path: Path, *given: str, **more: Any) -> Plan:
    return build_plan(load_settings(TrainSettings, None, [*DATA, f"model.path={path}", *given]), 1000, **more)


def sections(found: Plan) -> list[str]:
    return list(dict.fromkeys(line.section for line in found.lines))


def codes(found: Plan) -> tuple[list[str], list[str]]:
    return [problem.code for problem in found.problems], [warning.code for warning in found.warnings]


def test_several_devices_have_a_ledger_for_each_group_in_place_of_one_devices(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-7B")
    split = ("placement.actor=[0, 1, 2, 3]", "placement.rollout=[4, 5, 6, 7]")
    found = plan(path, EIGHT, *split, "cluster.device=h200")
    assert codes(found) == ([], [])
    shown = sections(found)
    groups = ["memory of each of 0-3 (actor)", "memory of each of 4-7 (rollout)"]
    assert shown[shown.index("memory") :] == ["memory", *groups, "time", "assumptions"]
    names = [(line.section, line.name) for line in found.lines]
    assert len(names) == len(set(names))
    lines = {(line.section, line.name): line.value for line in found.lines}
    total = count_parameters(PUBLIC["Qwen2.5-7B"]).total
    assert lines[groups[0], "actor: optimizer moments"] == total * 8 // 4
    assert lines[groups[1], "rollout: engine's weights"] == total * 2
    assert lines[groups[0], "held in update"] > lines[groups[0], "held in generate"]
    assert lines[groups[0], "memory of a device"] == 143771 * 2**20
    assert "peak while updating" not in [line.name for line in found.lines]


def test_one_device_of_a_known_kind_keeps_its_ledger_and_gets_the_time(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-1.5B")
    found = plan(path, "cluster.device=h200")
    assert codes(found) == ([], [])
    assert found.value("memory of the GPU") == 143771 * 2**20
    assert found.value("peak while updating")
    assert not [section for section in sections(found) if section.startswith("memory of")]
    lines = {line.name: line for line in found.lines if line.section == "time"}
    step = lines["step"].value
    assert isinstance(step, float) and 5 < step < 60
    assert "an estimate from constants measured on one H200" in lines["basis"].formula
    assert "not measured" not in lines["basis"].formula
    assert lines["actor: update"].formula.startswith("7") and "% are products" in lines["actor: update"].formula
    assert [section for section in sections(plan(path, "device=cuda")) if section in ("time", "assumptions")] == []


def test_what_goes_over_devices_is_said_to_be_unmeasured(tmp_path: Path) -> None:
    found = plan(public(tmp_path, "Qwen2.5-7B"), EIGHT, "parallel.actor.tensor=2", "cluster.device=h200")
    lines = {line.name: line.formula for line in found.lines if line.section == "time"}
    assert "assumptions that are not measured" in lines["basis"]
    unmeasured = {name.rpartition(": ")[2] for name, formula in lines.items() if "nothing of this has been" in formula}
    assert unmeasured == {"sums of tensor parallelism", "shards", "weights"}


def test_time_needs_the_kind_of_the_devices_and_memory_does_not(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-1.5B")
    found = plan(path, EIGHT, "device=cuda")
    assert found.value("basis") is None
    assert "step" not in [line.name for line in found.lines]
    assert found.value("recomputed") == "open"
    names = [line.name for line in found.lines]
    assert "held in update" in names and "margin in update" not in names
    assert "margin in update" in [line.name for line in plan(path, EIGHT, "device=cuda", device_memory=2**36).lines]


def test_unknown_kinds_are_told_with_the_known_ones(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-1.5B")
    (problem,) = plan(path, "cluster.device=h2000").problems
    assert problem.code == "T004"
    assert "did you mean h200" in problem.fix and "mi300x" in problem.fix and "a100-40gb" in problem.fix
    assert "T005" in codes(plan(path, "cluster.device=h200", "device=cpu"))[1]


def test_families_that_cannot_be_counted_keep_the_ledger_of_one_device(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {**PUBLIC["Qwen2.5-1.5B"], "model_type": "starcoder2"}, 10**9)
    found = plan(path, EIGHT, "cluster.device=h200")
    assert codes(found) == ([], ["M002"])
    assert "starcoder2" in found.warnings[0].what
    assert found.value("peak while updating")
    assert "time" not in sections(found)


CASES: list[tuple[str, list[str]]] = [
    ("Qwen2.5-7B", ["cluster.device=h100"]),
    ("Qwen2.5-7B", ["cluster.device=a100-40gb", "cluster.devices_per_node=4"]),
    ("Qwen2.5-7B", [EIGHT, "cluster.device=h100", "batch.tokens_per_microbatch=65536", "model.gradient_checkpointing=false"]),
    ("Qwen2.5-7B", ["cluster.device=l40s", EIGHT, "rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.9"]),
    ("Qwen2.5-32B", [EIGHT, "device=cuda", "device_memory_bytes=85899345920", "algorithm.kl=loss"]),
    ("Qwen2.5-32B", [EIGHT, "cluster.device=h100", "parallel.rollout.tensor=4", "algorithm.kl=loss"]),
    ("Llama-3.1-70B", [EIGHT, "cluster.device=h100"]),
    ("Qwen2.5-7B", [EIGHT, "cluster.device=h100", "placement.critic=[0,1]"]),
    ("Qwen2.5-7B", [EIGHT, "cluster.device=h100", "placement.actor=[0,1]", "cluster.nodes=1"]),
    ("Qwen3-30B-A3B", [EIGHT, "cluster.device=h100", "cluster.nodes=2"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
def test_what_does_not_fit_is_refused_with_changes_that_are_accepted(
    tmp_path: Path, name: str, given: list[str]
) -> None:
    path = public(tmp_path, name)
    found = plan(path, *given)
    tight = [problem for problem in (*found.problems, *found.warnings) if problem.code in ("M007", "M008")]
    assert tight
    for problem in tight:
        assert problem.suggestions, str(problem)
        for change in problem.suggestions:
            assert " ".join(change) in problem.fix
            after = plan(path, *given, *change)
            assert after.problems == ()
            assert not [warning for warning in after.warnings if warning.code == "M008"], change


def test_the_cheapest_change_comes_first_with_its_price(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-7B")
    big = ["batch.tokens_per_microbatch=65536", "model.gradient_checkpointing=false"]
    found = plan(path, EIGHT, "cluster.device=h100", *big)
    (problem,) = found.problems
    first, second = problem.suggestions[:2]
    assert first[0].startswith("batch.tokens_per_microbatch=") and len(first) == 1
    assert second == ("model.gradient_checkpointing=true",)
    assert "more and smaller microbatches; a step of about" in problem.fix
    assert "layers computed twice; a step of about" in problem.fix
    assert problem.what.startswith("actor: update holds ")
    assert found.value("basis") is None and "step" not in [line.name for line in found.lines]
    kinds = plan(path, EIGHT, "device=cuda", f"device_memory_bytes={2**33 * 10}", *big)
    (slightly_more,) = kinds.problems[0].suggestions[0]
    assert slightly_more.startswith("batch.tokens_per_microbatch=") and "a step of" not in kinds.problems[0].fix


_MILDER = {
    "batch.tokens_per_microbatch": 1,
    "rollout.kv_cache_bytes": 2**20,
    "rollout.vllm.gpu_memory_utilization": 0.01,
    "cluster.devices_per_node": -1,
    "cluster.nodes": -1,
}
"""What makes a suggested size one grain milder."""


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Qwen2.5-1.5B", ["device_memory_bytes=34359738368"]),
        ("Qwen2.5-1.5B", ["device_memory_bytes=42949672960", "rollout.kv_cache_bytes=20000000000"]),
        ("Qwen2.5-1.5B", ["device_memory_bytes=42949672960", "rollout.engine=vllm"]),
        ("Qwen2.5-7B", ["cluster.devices_per_node=4", "device_memory_bytes=51539607552", "rollout.engine=vllm"]),
    ],
)
def test_a_suggested_size_is_the_mildest_that_is_enough(tmp_path: Path, name: str, given: list[str]) -> None:
    """It was a half, a quarter, …, of what was given, and twice as many devices, or four times."""
    path, given = public(tmp_path, name), ["device=cuda", *given]

    def is_short(*change: str) -> bool:
        found = plan(path, *given, *change)
        return any(problem.code in ("M007", "M008") for problem in (*found.problems, *found.warnings))

    (warning,) = (each for each in plan(path, *given).warnings if each.code == "M008")
    sizes = [change[0].partition("=") for change in warning.suggestions if len(change) == 1]
    sizes = [(key, float(value)) for key, _, value in sizes if key in _MILDER]
    assert sizes
    for key, value in sizes:
        assert not is_short(f"{key}={value:g}" if value < 1 else f"{key}={value:.0f}")
        milder = value + _MILDER[key]
        assert is_short(f"{key}={milder:g}" if value < 1 else f"{key}={milder:.0f}")


def test_changes_are_joined_where_each_helps_another_phase(tmp_path: Path) -> None:
    """A smaller microbatch used to be passed over as long as another phase lacked more."""
    given = (EIGHT, "cluster.nodes=64", "cluster.device=rtx-4090", "parallel.actor.pipeline=8")
    given = (*given, "batch.prompts_per_step=512")
    (problem,) = plan(public(tmp_path, "Llama-3.1-70B"), *given).problems
    joined = {change.partition("=")[0] for change in problem.suggestions[0]}
    assert {"batch.tokens_per_microbatch", "parallel.rollout.tensor"} <= joined
    assert not any(path.startswith("cluster.") for path in joined)


def test_nothing_is_counted_of_roles_that_cannot_be_laid_out(tmp_path: Path) -> None:
    """The ledger of one device used to stand there, with its warnings."""
    found = plan(public(tmp_path, "Qwen2.5-7B"), EIGHT, "cluster.device=h100", "parallel.actor.tensor=3")
    assert [line.name for line in found.lines if line.section == "memory"] == ["basis"]
    assert "time" not in sections(found)
    assert not [warning for warning in found.warnings if warning.code.startswith("M")]


def test_auto_recomputes_where_an_update_does_not_fit_over_these_devices(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-7B")
    assert not plan(path, EIGHT, "cluster.device=h200").recompute
    found = plan(path, EIGHT, "cluster.device=h100")
    assert found.recompute and found.value("recomputed") == "yes" and codes(found) == ([], [])


def test_the_kind_is_an_option_and_the_report_and_json_have_the_ledgers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["plan", "--kind", "train", "--prompts", "9", f"model.path={public(tmp_path, 'Qwen2.5-7B')}", *DATA]
    assert main([*given, "--devices-per-node", "8", "--device-kind", "h200", "-v"]) == 0
    out = capsys.readouterr().out
    assert "memory of each of 0-7 (actor, rollout)" in out
    assert "= 7,615,616,512 ÷ 8 (shards) × 4, float32; in every phase" in out
    assert "989 TFLOP/s  H200, by its maker" in out
    assert main([*given, "--device-kind", "h100", "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert [problem["code"] for problem in data["problems"]] == ["M007"]
    assert main([*given, "--device-kind", "h200", "--devices-per-node", "8", "--json"]) == 0
    lines = {(line["section"], line["name"]): line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["time", "step"]["unit"] == "s"
    assert main(["plan", "--kind", "eval", "model.path=m", "run_dir=r", "--device-kind", "h200"]) == 2
    assert "--device-kind" in capsys.readouterr().err


def test_eight_thousand_devices_are_planned_and_refused_in_a_second(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen3-30B-A3B")
    many = ("cluster.nodes=1024", EIGHT, "batch.prompts_per_step=8192", "cluster.device=h200")
    for more in ((), ("cluster.device=l4",)):
        started = time.process_time()
        found = plan(path, *many, *more)
        text = plan_text(found)
        assert time.process_time() - started < 10
        assert "memory of each of node[1-1024]:all (actor, rollout)" in text
        assert codes(found)[0] == (["M007"] if more else [])


def test_settings_by_chance_fit_or_are_refused_with_changes_that_end_it(tmp_path: Path) -> None:
    pick, refused, fitting = random.Random(3), 0, 0
    paths = [public(tmp_path, name) for name in ("Qwen2.5-0.5B", "Llama-3.1-8B", "Qwen3-30B-A3B")]
    for _ in range(60):
        path = pick.choice(paths)
        given = [
            f"cluster.nodes={pick.choice([1, 2])}",
            f"cluster.devices_per_node={pick.choice([1, 4, 8])}",
            f"cluster.device={pick.choice(['h100', 'a100-40gb', 'rtx-4090'])}",
            f"parallel.actor.tensor={pick.choice([1, 2])}",
            f"parallel.rollout.tensor={pick.choice([1, 2])}",
            f"algorithm.kl={pick.choice(['none', 'reward'])}",
            f"offload.actor.optimizer={pick.choice(['none', 'host'])}",
            f"model.gradient_checkpointing={pick.choice(['auto', 'false'])}",
            f"rollout.engine={pick.choice(['torch', 'vllm'])}",
        ]
        found = plan(path, *given)
        kinds = {problem.code for problem in found.problems}
        if kinds - {"M007"}:
            continue
        refused, fitting = refused + bool(kinds), fitting + (not kinds)
        for problem in found.problems:
            assert problem.suggestions or "no change of" in problem.fix
            for change in problem.suggestions[:1]:
                after = plan(path, *given, *change)
                assert {left.what.partition(":")[0] for left in after.problems}.isdisjoint(
                    {problem.what.partition(":")[0]}
                )
    assert refused > 5 and fitting > 5


def test_the_outlook_is_light() -> None:
    """Modules are counted, because seconds are the machine's."""
    heavy = "{'torch', 'transformers', 'numpy', 'psutil'}"
    code = f"import sys, meshloom.plan; print(len(sys.modules), {heavy} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules, found = told.strip().split(" ", 1)
    assert found == "set()"
    assert int(modules) < 400


def test_a_kind_alone_asks_for_no_more_devices(tmp_path: Path) -> None:
    """A run of which only the kind of its device is said trains, on that one device."""
    from meshloom.plan.carried_out import carried_out
    from meshloom.plan.device_checks import lay_out

    settings = load_settings(TrainSettings, None, [*DATA, "model.path=m", "cluster.device=h200"])
    assert carried_out(settings).settings == settings
    assert not carried_out(settings).is_spread
    assert lay_out(settings, None, 8).layout.topology.num_devices == 1


def test_what_is_free_on_the_gpu_counts_before_what_its_kind_has(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-1.5B")
    assert plan(path, "cluster.device=h200", device_memory=2**36).value("memory of the GPU") == 2**36
    given = plan(path, "cluster.device=h200", f"device_memory_bytes={2**37}", device_memory=2**36)
    assert given.value("memory of the GPU") == 2**37
