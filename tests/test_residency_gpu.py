"""On a GPU: parts leave beside what is computed and are there when they are needed; their memory is free meanwhile."""

import copy
from pathlib import Path

import pytest
import torch

from meshloom.config.settings import ModelSettings
from meshloom.plan.residency import Residency
from meshloom.plan.stays import Part
from meshloom.train.attention import use_layouts
from meshloom.train.residency import ResidentModel
from meshloom.train.shelves import DiskShelf, HostShelf
from meshloom.train.snapshot import ModelSnapshot
from meshloom.train.streaming import OptimizerStream
from tests.models import tiny_model
from tests.test_train_model import make_samples, trained, weighted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("place", [Residency.HOST, Residency.DISK])
def test_a_run_with_parts_that_leave_is_the_run_without(tmp_path: Path, place: Residency) -> None:
    """Bfloat16 with float32 masters; a pass begins while its weights still arrive."""
    module = tiny_model("qwen2", torch.bfloat16).to("cuda")
    use_layouts(module)
    settings = ModelSettings(path="-", compile=False)
    stays, moves = (trained(copy.deepcopy(module), 60, settings=settings) for _ in range(2))
    around = ResidentModel("actor", moves, dict.fromkeys(Part, place), folder=tmp_path)
    for _ in range(4):
        for model in (stays, moves):
            if model is moves:
                around.fetch(Part.PARAMETERS) if around.at[Part.PARAMETERS] is place else None
            model.forward_backward(make_samples(), weighted, temperature=1.0)
            if model is moves and around.at[Part.OPTIMIZER] is place:
                around.fetch(Part.OPTIMIZER)
            model.optim_step(10)
        for part in Part:
            around.park(part)
            assert around.held_bytes(part) == 0
    for part in Part:
        around.fetch(part)
        around.wait(part)
    for name, tensor in stays.optimizer.state_tensors().items():
        assert torch.equal(moves.optimizer.state_tensors()[name], tensor), name
    for (name, tensor), (_, other) in zip(stays.weights(), moves.weights(), strict=True):
        assert torch.equal(tensor, other), name
    around.close()


@pytest.mark.parametrize("place", [Residency.HOST, Residency.DISK])
def test_an_optimizer_that_comes_in_turns_makes_the_same_updates(tmp_path: Path, place: Residency) -> None:
    """Pieces arrive and leave beside the updates of others."""
    module = tiny_model("qwen2", torch.bfloat16).to("cuda")
    use_layouts(module)
    settings = ModelSettings(path="-", compile=False)
    stays, streams = (trained(copy.deepcopy(module), 60, settings=settings) for _ in range(2))
    stream = OptimizerStream("actor", streams.optimizer, place, device=streams.device, folder=tmp_path, pieces=6)
    stream.park(Part.OPTIMIZER)
    for _ in range(4):
        for model in (stays, streams):
            model.forward_backward(make_samples(), weighted, temperature=1.0)
            model.optim_step(10)
        stream.require(Part.OPTIMIZER, place)
    kept = ModelSnapshot.take(streams, None).optimizer
    for name, tensor in ModelSnapshot.take(stays, None).optimizer.items():
        assert torch.equal(kept[name], tensor), name
    for (name, tensor), (_, other) in zip(stays.weights(), streams.weights(), strict=True):
        assert torch.equal(tensor, other), name
    stream.close()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_memory_is_given_back_and_every_byte_comes_again(tmp_path: Path, place: str) -> None:
    """Larger than a slab and than the staging memory, and changed by kernels right before and after."""
    device = torch.device("cuda", torch.cuda.current_device())
    shelf = HostShelf(device) if place == "host" else DiskShelf(device, tmp_path / "part")
    tensors = [torch.arange(count, device=device) for count in (50_000_000, 3, 1_000_001)]
    groups = [[tensors[0].untyped_storage()], [tensor.untyped_storage() for tensor in tensors[1:]]]
    for step in range(3):
        for tensor in tensors:
            tensor.add_(1)
        held = torch.cuda.memory_allocated(device)
        shelf.put(groups)
        assert held - torch.cuda.memory_allocated(device) >= 8 * 51_000_000
        other = torch.full((50_000_000,), -1, device=device)  # may get the memory that was given back
        shelf.take(groups).wait()
        for tensor in tensors:
            assert torch.equal(tensor, torch.arange(len(tensor), device=device) + step + 1)
        del other
    shelf.close()
