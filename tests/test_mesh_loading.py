"""What ranks read, hold and compute in when a model is built on a mesh."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshloom.config.settings import ModelSettings
from meshloom.train.build_on_mesh import build_model
from meshloom.train.load import load_model
from meshloom.train.load_sharded import WeightFiles
from meshloom.train.model import TrainedModel
from tests import mesh_checks
from tests.mesh_checks import BOUND, CPU, OPTIMIZER, UPDATES, Axes, folder_of, make_batch, mesh_of
from tests.models import tiny_model
from tests.ranks import Ranks

ALL = [0, 1, 2, 3]


@pytest.mark.parametrize("axes", [(("fsdp", 4),), (("fsdp", 2), ("tp", 2)), (("pp", 2), ("fsdp", 2))])
def test_each_rank_reads_and_holds_its_own_part(four_ranks: Ranks, folders: Path, axes: Axes) -> None:
    folder = folders / "in-several-files"
    model = tiny_model("llama", vocab_size=96, num_hidden_layers=2)
    if not folder.exists():
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 3
    whole = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    found = four_ranks.run(_read_and_held, axes, str(folder))
    assert all(read == held for read, held in found)
    twice = norms if axes[-1] == ("tp", 2) else 0
    assert sum(read for read, _ in found) == whole + twice


def _read_and_held(axes: Axes, folder: str) -> tuple[int, int]:
    """Values read from the files, and values held."""
    counted: list[int] = []

    class Counting(WeightFiles):
        def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
            part = super().read(name, box)
            counted.append(part.numel())
            return part

    from meshloom.train import load_sharded

    load_sharded.WeightFiles = Counting
    try:
        model = mesh_checks.model_on(mesh_of([(axes, ALL)]), folder)
    finally:
        load_sharded.WeightFiles = WeightFiles
    return sum(counted), sum(p.to_local().numel() for p in model.module.parameters())


def test_names_of_another_kind_are_loaded_whole(four_ranks: Ranks, folders: Path) -> None:
    """A folder of the layers alone: transformers finds their names; the head is the table."""
    folder = folders / "layers-alone"
    model = tiny_model("qwen2", vocab_size=96, num_hidden_layers=2)
    model.model.save_pretrained(folder)
    expected = dict(load_model(folder, torch.float32, CPU).state_dict())
    for found in four_ranks.run(_weights_of, str(folder)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def _weights_of(folder: str) -> dict[str, torch.Tensor]:
    model = mesh_checks.model_on(mesh_of([((("fsdp", 2), ("tp", 2)), ALL)]), folder)
    return {name: tensor.full_tensor() for name, tensor in model.weights()}


def test_narrow_arithmetic_on_wide_weights(four_ranks: Ranks, folders: Path) -> None:
    """bfloat16 passes, float32 sums and weights; what is only asked is held in bfloat16."""
    folder = folder_of(folders, "llama")
    settings = ModelSettings(path=folder, dtype="bfloat16")
    one = TrainedModel(load_model(folder, torch.bfloat16, CPU), settings, BOUND, OPTIMIZER)
    expected = mesh_checks.updates(one, [make_batch(step) for step in range(UPDATES)])
    found = four_ranks.run(_narrow, settings)
    for update in range(UPDATES):
        total = sum(losses[update] for losses, _, _ in found[::2])
        assert total == pytest.approx(expected.losses[update], abs=0.03)
    for _, trained, asked in found:
        assert trained == {torch.float32} and asked == {torch.bfloat16}


def _narrow(settings: ModelSettings) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    mesh = mesh_of([((("fsdp", 2), ("tp", 2)), ALL)])
    model = build_model(settings, mesh, BOUND, OPTIMIZER)
    found = mesh_checks.updates(model, [mesh_checks.local_part(make_batch(step), mesh) for step in range(UPDATES)])
    reference = build_model(settings, mesh, BOUND, None)
    reference.forward(mesh_checks.local_part(make_batch(0), mesh), temperature=1.0)
    kinds = [{p.dtype for p in m.module.parameters() if isinstance(p, DTensor)} for m in (model, reference)]
    return found.losses, kinds[0], kinds[1]
