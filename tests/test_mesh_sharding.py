"""Training of a model sharded over ranks gives what one process gives."""

from pathlib import Path

import pytest
import torch

from meshloom.samples import Samples, SampleTooLong
from meshloom.train.mesh import PeerFailed, make_mesh
from tests import mesh_checks
from tests.mesh_checks import Axes, assert_same, folder_of, in_one_process, train_on
from tests.ranks import Ranks


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_one_update_is_that_of_one_process(four_ranks: Ranks, folders: Path, family: str) -> None:
    folder = folder_of(folders, family)
    expected = in_one_process(folder)
    halves: list[tuple[Axes, list[int]]] = [((("fsdp", 2),), [0, 1]), ((("replicate", 2),), [2, 3])]
    found = four_ranks.run(train_on, halves, folder)
    assert_same(found[:2], expected, places=2)
    assert_same(found[2:], expected, places=2)
    for axes in ((("fsdp", 4),), (("replicate", 2), ("fsdp", 2))):
        assert_same(four_ranks.run(train_on, [(axes, [0, 1, 2, 3])], folder), expected, places=4)


def test_tied_tables_adapters_and_ranks_without_samples(four_ranks: Ranks, folders: Path) -> None:
    """Rows that come out uneven, and, with adapters, two of three ranks that have nothing to do."""
    three: list[tuple[Axes, list[int]]] = [((("fsdp", 3),), [0, 1, 2]), ((), [3])]
    tied = folder_of(folders, "qwen2", attention_bias=False)
    found = four_ranks.run(train_on, three, tied, True)
    assert_same(found[:3], in_one_process(tied), places=3, all_on_first=True)
    assert_same(found[3:], in_one_process(tied), places=1)
    folder = folder_of(folders, "qwen3")
    found = four_ranks.run(train_on, three, folder, True, {"lora": True, "recompute": True})
    assert_same(found[:3], in_one_process(folder, lora=True), places=3, all_on_first=True)


def test_a_rank_that_cannot_pack_stops_all(four_ranks: Ranks, folders: Path) -> None:
    """Ranks used to be able to wait for one that had raised."""
    said = four_ranks.run(_one_sample_too_long, folder_of(folders, "llama"))
    peer = "PeerFailed: rank 1 could not do its part of the step"
    assert said == ["not there", "SampleTooLong", "not there", peer]


def _one_sample_too_long(folder: str) -> str:
    mesh = make_mesh((("fsdp", 2),), [1, 3], mesh_checks.CPU)
    if mesh is None:
        return "not there"
    model = mesh_checks.model_on(mesh, folder)
    ids = torch.full((mesh_checks.BOUND.tokens + (1 if mesh.rank == 0 else 0),), 5)
    samples = Samples(torch.tensor([len(ids)]), {"ids": ids, "mask": torch.arange(len(ids)) > 3})
    try:
        model.forward(samples, temperature=1.0)
    except SampleTooLong:
        return "SampleTooLong"
    except PeerFailed as error:
        return f"PeerFailed: {error.what}"
    return "nothing"
