"""The benchmark of the plan against a GPU: a smoke run on the processor, and its tables from figures of a GPU."""

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

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


def test_peaks_are_compared_with_what_the_ledger_holds(bench) -> None:
    """A run with two updates a step, whose phases took a tenth more than the ledger has."""
    run = run_of("Qwen2.5-1.5B", "batch.prompts_per_update=32", "rollout.kv_cache_bytes=4000000000")
    (group,) = run.forecast(bench.Constants()).groups
    phases = {"generate": Phase.GENERATE, "log_prob": Phase.LOGPROB, "update": Phase.UPDATE}
    held = {name: group.ledger.held(phase) for name, phase in phases.items()}
    run = replace(run, peaks={name: count * 11 // 10 for name, count in held.items()})
    out = bench.console()
    with out.capture() as shown:
        bench.report(out, {"1.5b": run}, "1.5b")
    text = shown.get()
    for name, count in held.items():
        assert re.search(rf"1\.5b │ +{name} │ +{count / 2**30:.2f} │ +[\d.]+ │ +0\.909", text), name
        assert f"ratio (1.5b, memory of {name}): 0.91  predicted ÷ measured; wanted 1 ± 0.1" in text
    assert "actor: optimizer moments 11.50" in text
    assert "fitted to 1.5b, predicted ÷ measured; wanted 1 ± 0.2" in text.strip().splitlines()[-1]
