"""What all tests share: Triton's kernels run in its interpreter where there is no GPU; processes that are joined."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes over gloo; a test that needs fewer runs on some of them."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
