"""Training on a mesh of three axes, over eight processes."""

from pathlib import Path

import pytest

from tests.mesh_checks import Axes, assert_same, folder_of, in_one_process, train_on, with_all_weights
from tests.ranks import Ranks


@pytest.mark.slow
def test_three_axes(folders: Path) -> None:
    ranks, everyone = Ranks(8), list(range(8))
    folder = folder_of(folders, "qwen3")
    expected = in_one_process(folder)
    meshes: list[tuple[Axes, list[int]]] = [
        ((("pp", 2), ("fsdp", 2), ("tp", 2)), [4, 6]),
        ((("pp", 2), ("replicate", 2), ("sp", 2)), [4, 6]),
        ((("replicate", 2), ("fsdp", 2), ("tp", 2)), [0, 2, 4, 6]),
        ((("fsdp", 2), ("sp", 2), ("tp", 2)), [0, 4]),
    ]
    try:
        for axes, answering in meshes:
            found = ranks.run(train_on, [(axes, everyone)], folder)
            outcomes = [with_all_weights(found[rank], found) for rank in answering]
            assert_same(outcomes, expected, places=len(answering))
    finally:
        ranks.close()
