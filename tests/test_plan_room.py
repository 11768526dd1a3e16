"""Runs without room on a device or on this machine: what is suggested was counted again, and is the mildest that is enough."""

from pathlib import Path

import pytest

from meshloom.config.load import load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan import Plan, build_plan
from tests.test_plan_outlook import public

GIB = 2**30
ON = ("run_dir=r", "data.train.reasoning_gym=basic_arithmetic")


def plan(kind: type, model: Path, *given: str) -> Plan:
    return build_plan(load_settings(kind, None, [*ON, f"model.path={model}", *given]), 1000)


def lacks(found: Plan) -> list[str]:
    return [each.code for each in (*found.problems, *found.warnings) if each.code in ("M005", "M007", "M008")]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (("device_memory_bytes=17179869184",), "M007"),
        ((f"device_memory_bytes={80 * GIB}", "cluster.devices_per_node=2"), "M008"),
        (
            (f"device_memory_bytes={40 * GIB}", "batch.tokens_per_microbatch=65536", "cluster.devices_per_node=4"),
            "M007",
        ),
    ],
)
def test_a_supervised_run_that_does_not_fit_is_told_what_is_enough(
    tmp_path: Path, given: tuple[str, ...], code: str
) -> None:
    """On one GPU it was a warning, whatever the run held; over several no change had a number, and some were not enough."""
    model, given = public(tmp_path, "Qwen2.5-7B" if "cluster" in given[-1] else "Qwen2.5-1.5B"), ("device=cuda", *given)
    found = plan(SftSettings, model, *given)
    (lack,) = (each for each in (*found.problems, *found.warnings) if each.code in ("M007", "M008"))
    assert lack.code == code and lack.suggestions
    for change in lack.suggestions:
        after = plan(SftSettings, model, *given, *change)
        assert not lacks(after) and not after.problems
        for override in change:
            path, _, value = override.partition("=")
            milder = {"batch.tokens_per_microbatch": 1, "cluster.devices_per_node": -1}.get(path)
            if milder is not None:
                assert lacks(plan(SftSettings, model, *given, *change, f"{path}={int(value) + milder}"))


def test_a_cache_that_a_machine_has_no_room_for_becomes_the_largest_that_fits(tmp_path: Path) -> None:
    model, path = public(tmp_path, "Qwen2.5-0.5B"), "rollout.kv_cache_bytes"
    given = ("device=cuda", f"device_memory_bytes={8 * GIB}", f"{path}={20 * GIB}", "rollout.max_sequences=1024")
    long = ("rollout.max_response_tokens=16384", "validation.samples_per_prompt=1")
    (warning,) = plan(EvalSettings, model, *given, *long).warnings
    assert warning.code == "M005" and len(warning.suggestions) == 1
    (size,) = warning.suggestions[0]
    assert not lacks(plan(EvalSettings, model, *given, *long, size))
    more = int(size.removeprefix(f"{path}=")) + 2**20
    assert lacks(plan(EvalSettings, model, *given, *long, f"{path}={more}")) == ["M005"]


def test_weights_that_a_gpu_has_no_room_for_are_told_of_an_evaluation_too(tmp_path: Path) -> None:
    """A cache that is not given takes what is left, so nothing was said where nothing was left."""
    model = public(tmp_path, "Qwen2.5-7B")
    assert lacks(plan(EvalSettings, model, "device=cuda", f"device_memory_bytes={10 * GIB}")) == ["M005"]
    assert not lacks(plan(EvalSettings, model, "device=cuda", f"device_memory_bytes={20 * GIB}"))


def test_a_run_on_the_processor_is_told_a_microbatch_that_it_has_room_for(tmp_path: Path) -> None:
    import psutil

    if (has := psutil.virtual_memory().total) < 16 * GIB:
        pytest.skip("the model's optimizer alone fills this machine")
    model = public(tmp_path, "Qwen2.5-0.5B")
    peak = plan(TrainSettings, model, "device=cpu", "batch.prompts_per_step=512").value("peak while updating")
    assert isinstance(peak, int)
    tokens = 16384 * max(1, 2 * has // peak)
    given = ("device=cpu", "batch.prompts_per_step=100000", f"batch.tokens_per_microbatch={tokens * 16}")
    found = plan(TrainSettings, model, *given)
    warning = next(each for each in found.warnings if each.code == "M005" and "updating" in each.what)
    (size,) = next(change for change in warning.suggestions if change[0].startswith("batch.tokens"))
    after = plan(TrainSettings, model, *given, size)
    assert not [each for each in after.warnings if each.code == "M005" and "updating" in each.what]
