"""What all tests share: Triton's kernels run in its interpreter where there is no GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: needs vLLM (run with: pytest -m vllm, in an environment that has it)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs vLLM, unless it is asked for by name."""
    if "vllm" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("vllm")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("vllm")]
