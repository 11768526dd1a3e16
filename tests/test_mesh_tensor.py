"""Training of a model whose layers are cut over ranks gives what one process gives."""

from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import LoraSettings
from meshloom.train.build_on_mesh import build_model
from tests import mesh_checks
from tests.mesh_checks import Axes, assert_same, folder_of, in_one_process, train_on
from tests.models import FAMILIES
from tests.ranks import Ranks

PAIRS: list[tuple[Axes, list[int]]] = [((("tp", 2),), [0, 1]), ((("tp", 2),), [2, 3])]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_cut_in_two(four_ranks: Ranks, folders: Path, family: str) -> None:
    """By each family's plan, with tables cut by the vocabulary, tied or not."""
    changes = {"num_hidden_layers": 3} if family == "gemma3" else {"attention_bias": False} if family == "qwen2" else {}
    folder = folder_of(folders, family, **changes)
    found = four_ranks.run(train_on, PAIRS, folder)
    for one in (0, 2):
        assert_same([found[one]], in_one_process(folder), places=1)
    assert found[1].losses == found[0].losses and found[1].norms == found[0].norms


def test_layers_cut_and_sharded(four_ranks: Ranks, folders: Path) -> None:
    for family in ("qwen3", "llama"):
        folder = folder_of(folders, family)
        found = four_ranks.run(train_on, [((("fsdp", 2), ("tp", 2)), [0, 1, 2, 3])], folder)
        assert_same([found[0], found[2]], in_one_process(folder), places=2)


def test_fewer_heads_of_keys_than_ranks_and_a_vocabulary_that_stays_whole(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders / "odd", "qwen3", vocab_size=98)
    found = four_ranks.run(train_on, [((("tp", 4),), [0, 1, 2, 3])], folder)
    assert_same(found[:1], in_one_process(folder), places=1)


def test_copies_stay_equal_bit_by_bit(four_ranks: Ranks, folders: Path) -> None:
    """Norms, which every rank of a mesh has, and each shard, which every replica has."""
    folder = folder_of(folders, "qwen3")
    found = four_ranks.run(_held_after_updates, PAIRS, folder)
    norms = [name for name in found[0] if "norm" in name]
    assert len(norms) == 9 and all(found[0][name] == found[1][name] for name in norms)
    found = four_ranks.run(_held_after_updates, [((("replicate", 2), ("fsdp", 2)), [0, 1, 2, 3])], folder)
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]


def _held_after_updates(meshes: list[tuple[Axes, list[int]]], folder: str) -> dict[str, list[float]]:
    mesh = mesh_checks.mesh_of(meshes)
    model = mesh_checks.model_on(mesh, folder)
    mesh_checks.updates(model, [mesh_checks.local_part(mesh_checks.make_batch(step), mesh) for step in range(2)])
    return {name: tensor.to_local().flatten().tolist() for name, tensor in model.weights()}


def test_a_plan_that_attaches_to_no_layer_is_refused(four_ranks: Ranks, folders: Path) -> None:
    """A cut that does nothing would compute the same everywhere, and say nothing."""
    folder = folder_of(folders, "llama")
    said = four_ranks.run(_without_plan, folder)
    assert all("attaches to no layer" in text for text in said)


def _without_plan(folder: str) -> str:
    from transformers import LlamaConfig

    plan, LlamaConfig.base_model_tp_plan = LlamaConfig.base_model_tp_plan, {"blocks.*.projection": "colwise"}
    try:
        mesh_checks.model_on(mesh_checks.mesh_of(PAIRS), folder)
    except UserError as error:
        return str(error)
    finally:
        LlamaConfig.base_model_tp_plan = plan
    return "nothing"


def test_adapters_on_cut_layers(four_ranks: Ranks, folders: Path) -> None:
    """Cut with their layers, sharded or not, and on keys and values that are whole on each rank."""
    folder = folder_of(folders, "qwen3")
    expected = in_one_process(folder, lora=True)
    for axes, first in (((("fsdp", 2), ("tp", 2)), [0, 2]), ((("tp", 4),), [0])):
        found = four_ranks.run(train_on, [(axes, [0, 1, 2, 3])], folder, False, {"lora": True})
        assert_same([found[rank] for rank in first], expected, places=len(first))


def test_an_adapter_on_the_embedding_is_refused(four_ranks: Ranks, folders: Path) -> None:
    said = four_ranks.run(_adapter_on_embedding, folder_of(folders, "llama"))
    assert all("model.lora.target_modules" in text for text in said)


def _adapter_on_embedding(folder: str) -> str:
    mesh = mesh_checks.mesh_of(PAIRS)
    lora = LoraSettings(rank=2, target_modules=("q_proj", "embed_tokens"))
    settings = mesh_checks.settings_of(folder).model_copy(update={"lora": lora})
    with pytest.raises(UserError) as caught:
        build_model(settings, mesh, mesh_checks.BOUND, None)
    return str(caught.value)
