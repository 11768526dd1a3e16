"""Training of a model of which each rank of a pipeline has several stages gives what one process gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.train.mesh_snapshot import MeshSnapshot, held, restore_on_mesh, specs_of, write_config
from meshloom.train.model import MicrobatchBound
from meshloom.train.shared_files import Spec, create
from meshloom.train.snapshot import MODEL
from tests import critic_checks
from tests.mesh_checks import (
    BOUND,
    UPDATES,
    Axes,
    Outcome,
    assert_same,
    folder_of,
    in_one_process,
    local_part,
    make_batch,
    mesh_of,
    model_on,
    train_on,
    updates,
    weighted,
    with_all_weights,
)
from tests.ranks import Ranks
from tests.test_mesh_pipeline import ALL, PAIRS, answering

TWO: dict[str, Any] = {"stages_per_device": 2}
STAGES: list[tuple[Axes, list[int]]] = [((("pp", 2), ("fsdp", 2)), ALL)]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_two_ranks_with_two_stages_each(four_ranks: Ranks, folders: Path, family: str) -> None:
    """Layers that do not come out even."""
    folder = folder_of(folders / "five", family, num_hidden_layers=5)
    found = four_ranks.run(train_on, PAIRS, folder, False, TWO)
    assert found[0].norms == found[1].norms
    assert_same(answering(found, [1]), in_one_process(folder), places=1)


def test_stages_sharded_cut_or_with_split_sequences(four_ranks: Ranks, folders: Path) -> None:
    """A rank without samples has as many passes as the others; layers are recomputed."""
    folder = folder_of(folders / "five", "qwen3", num_hidden_layers=5)
    expected = in_one_process(folder)
    found = four_ranks.run(train_on, STAGES, folder, False, TWO)
    assert_same(answering(found, [2, 3]), expected, places=2)
    found = four_ranks.run(train_on, STAGES, folder, True, {"recompute": True, **TWO})
    assert_same(answering(found, [2, 3]), expected, places=2, all_on_first=True)
    for axis in ("sp", "tp"):
        found = four_ranks.run(train_on, [((("pp", 2), (axis, 2)), ALL)], folder, False, TWO)
        assert_same(answering(found, [2]), expected, places=1)


@pytest.mark.parametrize("samples", [None, 3, 1])
def test_any_number_of_microbatches_and_a_tied_table(four_ranks: Ranks, folders: Path, samples: int | None) -> None:
    """One or three, fewer than the four ranks; nine, of which four are a round and five another."""
    folder = folder_of(folders / "eight", "qwen2", attention_bias=False, num_hidden_layers=8)
    bound = MicrobatchBound(1_000 if samples is None else BOUND.tokens * 2, samples)
    found = four_ranks.run(train_on, [((("pp", 4),), ALL)], folder, False, {"bound": bound, **TWO})
    assert_same(answering(found, [3]), in_one_process(folder), places=1)


def test_layers_are_gathered_twice_and_tables_once_for_each_pass(four_ranks: Ranks, folders: Path) -> None:
    """Layers of other stages were gathered ahead of time, and given back unused."""
    folder = folder_of(folders / "eight", "qwen2", attention_bias=False, num_hidden_layers=8)
    for gathered, microbatches in four_ranks.run(gathers_of_an_update, folder):
        assert gathered == microbatches * (2 * 4 + 2)


def gathers_of_an_update(folder: str) -> tuple[int, int]:
    """Gathers of weights, and microbatches of one sample each."""
    mesh = mesh_of(STAGES)
    model = model_on(mesh, folder, bound=MicrobatchBound(BOUND.tokens, 1), **TWO)
    samples = local_part(make_batch(0), mesh)
    with Gathers() as counted:
        model.forward_backward(samples, weighted)
    return counted.number, mesh.agree(len(samples))


class Gathers(TorchDispatchMode):
    """Counts collectives that gather tensors."""

    number = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.number += "allgather" in str(op)
        return op(*args, **(kwargs or {}))


def test_adapters_in_stages(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders / "five", "qwen3", num_hidden_layers=5)
    found = four_ranks.run(train_on, STAGES, folder, False, {"lora": True, **TWO})
    assert_same(answering(found, [2, 3]), in_one_process(folder, lora=True), places=2)


def test_a_critic_in_stages(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders / "five", "qwen3", num_hidden_layers=5)
    found = four_ranks.run(critic_in_stages, folder)
    whole = [with_all_weights(found[rank], found) for rank in (2, 3)]
    assert_same(whole, critic_checks.in_one_process(folder), places=2)


def critic_in_stages(folder: str) -> Outcome:
    return critic_checks.train_on(STAGES, folder, stages_per_device=2)


def test_training_goes_on_from_stages_on_other_layouts(four_ranks: Ranks, folders: Path, tmp_path: Path) -> None:
    """Two updates with a table that is on two ranks, the third on split layers and on stages that are not interleaved."""
    folder = folder_of(folders / "four", "qwen2", attention_bias=False, num_hidden_layers=4)
    expected = in_one_process(folder)
    others: list[tuple[Axes, list[int]]] = [((("tp", 2),), [0, 1]), ((("pp", 2),), [2, 3])]
    found = four_ranks.run(train_in_two_parts, others, folder, tmp_path)
    for one in (found[0], with_all_weights(found[3], found[2:])):
        assert one.losses[0] == pytest.approx(expected.losses[-1], abs=1e-5)
        assert one.norms[0] == pytest.approx(expected.norms[-1], rel=1e-5)
        torch.testing.assert_close(one.logprobs[0], expected.logprobs[-1], rtol=1e-5, atol=1e-5)
        assert one.weights.keys() == expected.weights.keys()
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(one.weights[name], tensor, rtol=0, atol=1e-5)


def train_in_two_parts(others: list[tuple[Axes, list[int]]], folder: str, to: Path) -> Outcome:
    """All updates but the last on interleaved stages, the last on other meshes, from a checkpoint."""
    mesh, last = mesh_of(STAGES), UPDATES - 1
    model = model_on(mesh, folder, stages_per_device=2)
    updates(model, [local_part(make_batch(step), mesh) for step in range(last)])
    files: dict[str, dict[str, Spec]] = {}
    for told in mesh.gather(specs_of(held(model))):
        for file, specs in told.items():
            files.setdefault(file, {}).update(specs)
    if mesh.rank == 0:
        (to / MODEL).mkdir()
        for file, specs in files.items():
            create(to / file, specs)
        write_config(model, to)
    mesh.agree(0)
    MeshSnapshot.take(model).write(to)
    mesh.agree(0)
    after = mesh_of(others)
    again = model_on(after, str(to / MODEL))
    restore_on_mesh(again, to, last)
    found = updates(again, [local_part(make_batch(last), after)])
    found.weights.update((name, tensor.full_tensor()) for name, tensor in again.weights())
    return found
