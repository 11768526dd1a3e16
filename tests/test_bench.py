"""The benchmarks run: smallest shapes, without TRL; what they measure is not tested."""

import importlib
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


def run_main(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """A script's ``main`` in this process, where torch is loaded already."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    importlib.import_module(script).main()


@pytest.mark.parametrize("script", ["engine", "packing"])
def test_each_length_distribution_ends_in_a_ratio(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, script, "--tiny")
    out = capsys.readouterr().out
    for kind in ("long-tailed", "equal"):
        assert re.search(rf"ratio \(tiny, {kind}\): .*\d\.\d\d on the clock", out)


def test_our_side_of_the_whole_step_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Made here, where torch is loaded already; the script finds them.
    monkeypatch.syspath_prepend(str(BENCH))
    models = importlib.import_module("grpo_models")
    models.untrained(tmp_path / "tiny", models.SHAPES["tiny"])
    run_main(monkeypatch, "grpo_step", "--tiny", "--only-ours", "--threads", "1", "--work", str(tmp_path))
    row = next(line for line in capsys.readouterr().out.splitlines() if "│ meshloom" in line)
    steps, seconds, *_ = (cell.strip() for cell in row.strip("│").split("│")[1:])
    assert int(steps) == 1 and float(seconds) > 0


def test_the_last_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    score = importlib.import_module("grpo_reward").score
    assert score("", "so <answer> 42</answer>", "42") == 1.0
    assert score("", "<answer>42</answer> or <answer>43</answer>", "42") == 0.0
    assert score("", "42", "42") == 0.0
    assert score("", "four", "") == 1.0
