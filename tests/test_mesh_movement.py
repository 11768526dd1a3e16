"""Models over a mesh: their parts leave and come back, and their weights go to engines of other layouts."""

from pathlib import Path

import pytest
import torch

from meshloom.fabric.dispatch import GroupLayout
from meshloom.loop.held import HeldSamples
from meshloom.plan.residency import Residency
from tests import mesh_movement_checks
from tests.mesh_checks import Axes, assert_same, folder_of, in_one_process, make_batch
from tests.ranks import Ranks

Meshes = list[tuple[Axes, list[int]]]
PAIRS: Meshes = [((("fsdp", 2),), [0, 1]), ((("tp", 2),), [2, 3])]
STAGES: Meshes = [((("pp", 2), ("fsdp", 2)), [0, 1, 2, 3])]
BOTH: Meshes = [((("fsdp", 2), ("tp", 2)), [0, 1, 2, 3])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_sharded_parts_that_leave_between_verbs_change_nothing(
    four_ranks: Ranks, folders: Path, tmp_path: Path
) -> None:
    folder = folder_of(folders, "qwen3")
    expected = in_one_process(folder)
    found = four_ranks.run(mesh_movement_checks.train_with_moves, PAIRS, folder, Residency.HOST, tmp_path)
    assert_same(found[:2], expected, places=2)
    assert_same(found[2:3], expected, places=1)
    found = four_ranks.run(mesh_movement_checks.train_with_moves, BOTH, folder, Residency.DISK, tmp_path)
    assert_same(found[::2], expected, places=2)
    assert list(tmp_path.iterdir()) == []


def test_engines_get_what_gathering_whole_tensors_gives(four_ranks: Ranks, folders: Path) -> None:
    """Uneven shards, a tied table, stages of a pipeline, interleaved too; adapters are merged on the way."""
    tied = folder_of(folders, "qwen2", attention_bias=False)
    three: Meshes = [((("fsdp", 3),), [0, 1, 2]), ((), [3])]
    for engines, dtype in (([0, 1, 2], torch.float32), ([1, 3], torch.bfloat16)):
        assert four_ranks.run(mesh_movement_checks.feed_engines, three, tied, engines, dtype) == [[]] * 4
    assert four_ranks.run(mesh_movement_checks.feed_engines, STAGES, tied, [1, 2], torch.float32) == [[]] * 4
    folder = folder_of(folders, "qwen3")
    for meshes, lora in ((BOTH, False), (STAGES, False), (three, True)):
        arguments = (meshes, folder, [0, 3], torch.float32, lora)
        assert four_ranks.run(mesh_movement_checks.feed_engines, *arguments) == [[]] * 4
    deep = folder_of(folders / "deep", "qwen2", attention_bias=False, num_hidden_layers=5)
    arguments = (STAGES, deep, [0, 3], torch.float32, False, 2)
    assert four_ranks.run(mesh_movement_checks.feed_engines, *arguments) == [[]] * 4


def test_engines_whose_layers_are_cut_get_their_parts(four_ranks: Ranks, folders: Path) -> None:
    """On the same devices, and from two to two others; key-value heads that are whole on every rank among them."""
    folder = folder_of(folders, "qwen3")
    wide: Meshes = [((("fsdp", 4),), [0, 1, 2, 3])]
    for meshes, axes, ranks in (
        (wide, (("tp", 4),), [0, 1, 2, 3]),
        (BOTH, (("replicate", 2), ("tp", 2)), [0, 1, 2, 3]),
        (PAIRS, (("tp", 2),), [2, 3]),
    ):
        assert four_ranks.run(mesh_movement_checks.feed_cut_engines, meshes, folder, axes, ranks) == [[]] * 4


def test_loaders_that_want_whole_tensors_get_one_bucket_after_the_other(four_ranks: Ranks, folders: Path) -> None:
    """A tied table that is larger than a bucket; engines beside the trainer and on devices of their own."""
    folder = folder_of(folders, "qwen2", attention_bias=False)
    for meshes, engines in ((STAGES, [0, 1, 2, 3]), (PAIRS, [2, 3])):
        four_ranks.run(mesh_movement_checks.hand_over_whole, meshes, folder, engines, 9_000)


def test_ranks_of_a_replica_hand_on_what_one_of_them_is_sent(four_ranks: Ranks) -> None:
    """The controller sends it once; an empty part is sent to nobody."""
    batch = make_batch(0)
    layout = GroupLayout((0, 1, 2, 3), (0, 1, 0, 0))
    for parts in ([[2, 0, 1], []], [[0], [2, 1]]):
        parcels = HeldSamples(()).parcels(batch, parts, layout)
        assert [bool(parcel.pieces) for parcel in parcels] == [True, len(parts[1]) > 0, False, False]
        for found, index in zip(
            four_ranks.run(mesh_movement_checks.take_handed, parcels), layout.data_index, strict=True
        ):
            for name, column_T in batch.select(parts[index]).tokens.items():
                assert torch.equal(found[name], column_T)
