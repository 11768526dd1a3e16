"""A critic that is cut over ranks learns what one process does."""

from pathlib import Path

import pytest

from tests.critic_checks import in_one_process, train_on
from tests.mesh_checks import Axes, assert_same, folder_of, with_all_weights
from tests.ranks import Ranks

ALL = [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_values_losses_and_weights_are_those_of_one_process(four_ranks: Ranks, folders: Path, family: str) -> None:
    """Shards, replicas, split sequences, split layers, stages: two of them at a time."""
    folder = folder_of(folders, family)
    expected = in_one_process(folder)
    cuts: list[tuple[Axes, list[int]]] = [
        ((("replicate", 2), ("fsdp", 2)), ALL),
        ((("fsdp", 2), ("sp", 2)), [0, 2]),
        ((("fsdp", 2), ("tp", 2)), [0, 2]),
        ((("pp", 2), ("fsdp", 2)), [2, 3]),
    ]
    for axes, answering in cuts:
        found = four_ranks.run(train_on, [(axes, ALL)], folder)
        whole = [with_all_weights(found[rank], found) for rank in answering]
        assert_same(whole, expected, places=len(whole))


def test_tied_tables_and_a_head_that_is_there(four_ranks: Ranks, folders: Path) -> None:
    """The embedding of a tied model is the critic's alone; a head that a folder has is read by range."""
    tied = folder_of(folders, "qwen2", attention_bias=False)
    halves: list[tuple[Axes, list[int]]] = [((("fsdp", 2),), [0, 1]), ((("tp", 2),), [2, 3])]
    found = four_ranks.run(train_on, halves, tied)
    assert_same(found[:2], in_one_process(tied), places=2)
    assert_same(found[2:3], in_one_process(tied), places=1)
    kept = str(keep_head(tied, folders / "kept"))
    found = four_ranks.run(train_on, halves, kept)
    assert_same(found[:2], in_one_process(kept), places=2)
    assert found[0].losses != four_ranks.run(train_on, halves, tied)[0].losses


def keep_head(folder: str, to: Path) -> Path:
    """The same model as transformers' own classifier of tokens, with a head of its own."""
    from transformers import AutoModelForTokenClassification

    AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).save_pretrained(to)
    return to
