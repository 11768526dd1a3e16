"""Training with sequences split over ranks gives what one process gives."""

from pathlib import Path

from meshloom.config.errors import UserError
from tests.mesh_checks import Axes, assert_same, folder_of, in_one_process, mesh_of, model_on, train_on
from tests.ranks import Ranks

PAIRS: list[tuple[Axes, list[int]]] = [((("sp", 2),), [0, 1]), ((("sp", 2),), [2, 3])]


def test_sequences_split_in_two_and_four(four_ranks: Ranks, folders: Path) -> None:
    """Lengths that do not divide, shared prompts cut anywhere, and fewer heads of keys than ranks."""
    for family in ("qwen3", "llama"):
        folder = folder_of(folders, family)
        expected = in_one_process(folder)
        found = four_ranks.run(train_on, PAIRS, folder)
        assert_same(found[:1], expected, places=1)
        assert_same(found[3:], expected, places=1, weights=False)
        found = four_ranks.run(train_on, [((("sp", 4),), [0, 1, 2, 3])], folder)
        assert_same(found[:1], expected, places=1)


def test_sequences_split_and_windows_sharded_or_cut(four_ranks: Ranks, folders: Path) -> None:
    for family, axes in (("mistral", (("fsdp", 2), ("sp", 2))), ("qwen3", (("sp", 2), ("tp", 2)))):
        folder = folder_of(folders, family)
        found = four_ranks.run(train_on, [(axes, [0, 1, 2, 3])], folder)
        ranks = [found[0], found[2]] if axes[0][0] == "fsdp" else found[:1]
        assert_same(ranks, in_one_process(folder), places=len(ranks))


def test_adapters_on_split_sequences(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders, "qwen3")
    found = four_ranks.run(train_on, [((("fsdp", 2), ("sp", 2)), [0, 1, 2, 3])], folder, False, {"lora": True})
    assert_same([found[0], found[2]], in_one_process(folder, lora=True), places=2)


def test_heads_that_do_not_go_into_the_ranks_are_refused(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders, "llama")
    said = four_ranks.run(_three_ranks, folder)
    assert all("do not go into 3 ranks" in text for text in said[:3])


def _three_ranks(folder: str) -> str:
    mesh = mesh_of([((("sp", 3),), [0, 1, 2]), ((), [3])])
    try:
        model_on(mesh, folder)
    except UserError as error:
        return str(error)
    return "nothing"
