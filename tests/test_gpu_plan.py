"""The benchmark of the plan against a GPU: a smoke run on the processor, and its tables from figures of a GPU."""

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshloom.plan.calibration import BESIDE, MeasuredRun, Seen, calibrate, compare, held
from meshloom.plan.constants import Constants
from meshloom.plan.forecast import Lengths
from meshloom.plan.ledger import most_computed_tokens
from meshloom.plan.residency import Phase
from tests.test_calibrate import run_of

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_plan")


def test_a_whole_run_is_measured_and_its_constants_fitted(
    bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_plan.py", "--tiny", "--work", str(tmp_path)])
    bench.main()
    out = capsys.readouterr().out
    assert "peaks of memory: not measured, there is no GPU" in out
    for part in ("generate", "log_prob", "update", "step"):
        assert re.search(rf"plan-tiny/run +{part} +\d", out), part
    last = out.strip().splitlines()[-1]
    assert re.match(r"ratio \(tiny, seconds of a step\): \d+\.\d\d  fitted to tiny, predicted ÷ measured", last)


MEASURED = {
    "Qwen2.5-1.5B": ({"generate": 24.78, "log_prob": 20.87, "update": 50.13}, (1.595, 0.784, 2.561), 4.98),
    "Qwen2.5-3B": ({"generate": 46.13, "log_prob": 41.08, "update": 90.37}, (2.512, 1.463, 4.750), 8.78),
}
"""Of runs of this benchmark on an H200: peaks of allocated memory in GiB, seconds of these phases and of the whole step."""


def gpu_run(name: str, *given: str) -> MeasuredRun:
    peaks, seconds, step_s = MEASURED.get(name, ({}, (), 0.0))
    batch = ("batch.prompts_per_step=32", "batch.prompts_per_update=16", "rollout.max_sequences=256")
    run = run_of(name, *batch, "data.max_prompt_tokens=64", "rollout.ignore_eos=true", *given)
    parts = dict(zip(peaks, seconds, strict=True)) | {BESIDE: step_s - sum(seconds)}
    return replace(
        run,
        lengths=Lengths(prompt=33.75, response=512, longest=512),
        peaks={phase: round(gib * 2**30) for phase, gib in peaks.items()},
        parts={part: Seen(seconds=taken) for part, taken in parts.items()},
        step_s=step_s,
    )


@pytest.mark.parametrize("name", MEASURED)
def test_phases_hold_what_a_gpu_was_measured_to_hold(name: str) -> None:
    for row in held(gpu_run(name)):
        assert row.predicted == pytest.approx(row.measured, rel=0.03), row.part


def test_a_step_takes_what_was_measured_with_constants_of_the_other_size() -> None:
    for one, other in (("Qwen2.5-1.5B", "Qwen2.5-3B"), ("Qwen2.5-3B", "Qwen2.5-1.5B")):
        fitted = calibrate([gpu_run(one)]).constants
        for row in compare(gpu_run(other), Constants(), fitted):
            if row.part != BESIDE:
                assert row.after == pytest.approx(row.measured, rel=0.05), row.part


def test_a_training_pass_holds_what_a_gpu_was_measured_to_hold() -> None:
    """Of ``bench/gpu_train_pass.py``: 16,380 tokens of the smallest size, whose optimizer has made no step."""
    (group,) = gpu_run("Qwen2.5-0.5B", "rollout.ignore_eos=false").forecast(Constants()).groups
    lines = {line.name: line.value or 0 for line in group.ledger.lines()}
    parts = ("weights", "float32 masters", "gradients", "logits", "activations")
    assert sum(lines[f"actor: {part}"] for part in parts) == pytest.approx(19.9 * 2**30, rel=0.03)


def test_without_whole_groups_the_bound_of_a_microbatch_counts() -> None:
    """Samples that end where they like can fill a microbatch to its bound."""
    exact, free = gpu_run("Qwen2.5-3B"), gpu_run("Qwen2.5-3B", "rollout.ignore_eos=false")
    tokens = [most_computed_tokens(run.settings, 16384) for run in (exact, free)]
    assert tokens == [3 * (64 + 8 * 512), 16384]
    assert most_computed_tokens(exact.settings, 4000) == 4000  # no whole group


def test_peaks_are_compared_with_what_the_ledger_holds(bench) -> None:
    """A run with two updates a step, whose phases took a tenth more than the ledger has."""
    run = run_of("Qwen2.5-1.5B", "batch.prompts_per_update=32", "rollout.kv_cache_bytes=4000000000")
    (group,) = run.forecast(bench.Constants()).groups
    phases = {"generate": Phase.GENERATE, "log_prob": Phase.LOGPROB, "update": Phase.UPDATE}
    counts = {name: group.ledger.held(phase) for name, phase in phases.items()}
    run = replace(run, peaks={name: count * 11 // 10 for name, count in counts.items()})
    out = bench.console()
    with out.capture() as shown:
        bench.report(out, {"1.5b": run}, "1.5b")
    text = shown.get()
    for name, count in counts.items():
        assert re.search(rf"1\.5b │ +{name} │ +{count / 2**30:.2f} │ +[\d.]+ │ +0\.909", text), name
        assert f"ratio (1.5b, memory of {name}): 0.91  predicted ÷ measured; wanted 1 ± 0.1" in text
    assert "actor: optimizer moments 11.50" in text
    assert "fitted to 1.5b, predicted ÷ measured; wanted 1 ± 0.2" in text.strip().splitlines()[-1]
