"""The GPU benchmarks run on a processor, with the smallest shapes and without peers; what they measure is not tested."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A script's ``main`` in this process, where torch is loaded already; gives what it printed."""
    monkeypatch.syspath_prepend(str(BENCH))

    def call(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--tiny", "--work", str(tmp_path), *arguments])
        importlib.import_module(script).main()
        return capsys.readouterr().out

    return call


def last_line(out: str) -> str:
    return out.strip().splitlines()[-1]


def test_a_whole_step_is_measured_and_absent_peers_are_named(run) -> None:
    out = run("gpu_grpo", "--peer", "both", "--lengths", "exact", "--steps", "2")
    assert "verl: not measured, verl is not installed" in out and "TRL: not measured, trl is not installed" in out
    cells = [cell.strip() for cell in next(line for line in out.splitlines() if "│ meshloom" in line).split("│")[1:-1]]
    first, steps, seconds, tokens = float(cells[1]), int(cells[2]), float(cells[3]), cells[9]
    assert first > seconds > 0 and steps == 1
    assert tokens == str(2 * 2 * 48)
    assert last_line(out).startswith("ratio (tiny, exact): not measured")


def test_the_engine_is_measured(run) -> None:
    out = run("gpu_engine", "--peer", "vllm")
    assert "vLLM: not measured, vllm is not installed" in out
    assert re.fullmatch(
        r"ratio \(tiny\): \d+\.\d\d  bytes that must be read ÷ seconds ÷ copy bandwidth", last_line(out)
    )


def test_sampler_and_trainer_are_compared(run) -> None:
    out = run("gpu_agreement", "--float32")
    row = next(line for line in out.splitlines() if "tiny, random, engine torch" in line)
    tokens, mean, *_, sampler, trainer = (cell.strip() for cell in row.split("│")[2:-1])
    assert int(tokens) > 0 and 0 < float(mean) < 0.02
    assert 0 < float(sampler) < 0.02 and 0 < float(trainer) < 0.02


def test_the_start_is_measured(run) -> None:
    assert re.search(r"seconds to the first trained step, engine torch: \d+\.\d", run("gpu_start"))


def test_curves_of_learning_are_written(run, tmp_path: Path) -> None:
    result = tmp_path / "curves.json"
    out = run("gpu_truth", "--sides", "meshloom", "trl", "--result", str(result))
    (curves,) = json.loads(result.read_text())
    assert [step for step, _ in curves["accuracy"]] == [0, 2] and [step for step, _ in curves["reward"]] == [1, 2]
    assert "TRL: not measured" in out and last_line(out).startswith("ratio (sum): nan")


@pytest.mark.parametrize("place", ["host", "disk"])
def test_parts_that_leave_the_device_are_measured(run, place: str) -> None:
    out = run("gpu_offload", "--place", place)
    assert re.search(r"│ optimizer +│ 0\.00 GB +│ \d+\.\d GB/s +│ \d+\.\d GB/s", out)
    assert last_line(out).startswith(f"ratio (tiny, {place}): ")


@pytest.mark.slow
def test_movements_between_ranks_are_measured(run) -> None:
    out = run("gpu_reshard")
    assert all(name in out for name in ("fsdp 2 → dp 2", "fsdp 2 → tp 2", "fsdp 1 → dp 1, split"))
    assert last_line(out).startswith("ratio (tiny): ")
