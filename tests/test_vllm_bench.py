"""The measurement of moved weights runs, with vLLM and without it; what it measures is not tested."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["gpu_weights.py", "--tiny"])
    importlib.import_module("gpu_weights").main()
    return capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not measured, vllm is not installed" in printed(monkeypatch, capsys)


@pytest.mark.vllm
def test_a_movement_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(monkeypatch, capsys)
    assert re.search(r"movement, copies alone +│ +\d+\.\d\d ms", out)
    assert re.match(r"ratio \(tiny\): \d+\.\d\d  seconds of the movement", out.strip().splitlines()[-1])
