"""What all tests share: Triton's kernels run in its interpreter where there is no GPU; processes that are joined."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks import Ranks

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models of a session's tests are."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four processes over gloo; a test that needs fewer runs on some of them. A file's own: each process group that was ever
    made wakes up many times a second."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
