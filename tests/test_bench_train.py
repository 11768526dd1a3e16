"""The benchmarks of training passes run on a processor with the smallest shapes; what they measure is not tested."""

import importlib
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A script's ``main`` in this process, where torch is loaded already; gives the lines it printed."""
    monkeypatch.syspath_prepend(str(BENCH))

    def call(script: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--tiny", *arguments])
        importlib.import_module(script).main()
        return capsys.readouterr().out.strip().splitlines()

    return call


@pytest.mark.parametrize("arguments", [(), ("--shared", "--recompute")])
def test_a_training_pass_is_measured(run, arguments: tuple[str, ...]) -> None:
    lines = run("gpu_train_pass", "--eager", *arguments)
    row = next(line for line in lines if "│ not compiled" in line)
    ms, kernels, launches, head, tokens, *_ = (cell.strip().replace(",", "") for cell in row.strip("│").split("│")[1:])
    assert float(ms) > float(head) > 0 and int(tokens) > 0
    assert float(kernels) > 0 and int(launches) > 100
    assert re.fullmatch(r"ratio \(tiny\): \d+\.\d\d  6·N·T ÷ seconds ÷ matrix rate", lines[-1])


def test_log_probs_are_measured_against_whole_logits(run) -> None:
    lines = run("gpu_logprobs", "--chunk-mib", "1")
    assert any("ours, forward and backward, 1 MiB" in line for line in lines)
    assert re.fullmatch(r"ratio \(tiny\): \d+\.\d\d  seconds ÷ whole logits without entropy", lines[-1])
