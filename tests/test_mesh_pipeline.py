"""Training of a model whose layers are stages of a pipeline gives what one process gives."""

from pathlib import Path

import pytest

from tests.mesh_checks import Axes, Outcome, assert_same, folder_of, in_one_process, train_on, with_all_weights
from tests.ranks import Ranks

PAIRS: list[tuple[Axes, list[int]]] = [((("pp", 2),), [0, 1]), ((("pp", 2),), [2, 3])]
ALL = [0, 1, 2, 3]


def answering(found: list[Outcome], ranks: list[int]) -> list[Outcome]:
    """What ranks of the last stage returned, with the weights of all stages."""
    return [with_all_weights(found[rank], found) for rank in ranks]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_two_stages(four_ranks: Ranks, folders: Path, family: str) -> None:
    """Layers that do not come out even; windows that go by a layer's number; tables that are one, at both ends."""
    changes = {"num_hidden_layers": 3} if family == "gemma3" else {}
    folder = folder_of(folders, family, **changes)
    found = four_ranks.run(train_on, PAIRS, folder)
    assert found[0].norms == found[1].norms
    assert_same(answering(found, [1]), in_one_process(folder), places=1)


def test_stages_sharded_cut_or_with_split_sequences(four_ranks: Ranks, folders: Path) -> None:
    """A rank without samples has as many passes as the others."""
    folder = folder_of(folders, "qwen3")
    expected = in_one_process(folder)
    found = four_ranks.run(train_on, [((("pp", 2), ("fsdp", 2)), ALL)], folder)
    assert_same(answering(found, [2, 3]), expected, places=2)
    found = four_ranks.run(train_on, [((("pp", 2), ("fsdp", 2)), ALL)], folder, True, {"recompute": True})
    assert_same(answering(found, [2, 3]), expected, places=2, all_on_first=True)
    for axis in ("sp", "tp"):
        found = four_ranks.run(train_on, [((("pp", 2), (axis, 2)), ALL)], folder)
        assert_same(answering(found, [2]), expected, places=1)


def test_four_stages_and_a_tied_table(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders / "deep", "qwen2", attention_bias=False, num_hidden_layers=5)
    found = four_ranks.run(train_on, [((("pp", 4),), ALL)], folder)
    assert_same(answering(found, [3]), in_one_process(folder), places=1)


def test_adapters_in_two_stages(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders, "qwen3")
    found = four_ranks.run(train_on, [((("pp", 2), ("fsdp", 2)), ALL)], folder, False, {"lora": True})
    assert_same(answering(found, [2, 3]), in_one_process(folder, lora=True), places=2)
