"""Parts of a model that leave the device and come back: bit for bit, with their memory freed meanwhile, or an error."""

import copy
from pathlib import Path

import pytest
import torch

from meshloom.config.errors import RunFault
from meshloom.config.settings import LoraSettings, ModelSettings, OptimizerSettings
from meshloom.plan.residency import Residency
from meshloom.plan.stays import Part
from meshloom.rollout.decode_stack import DecodeStack
from meshloom.rollout.paged_ops import TorchOps
from meshloom.train.attention import use_layouts
from meshloom.train.load import add_lora, load_model
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.residency import ResidentModel
from meshloom.train.shelves import DiskShelf, HostShelf, empty, fill, stretches
from tests.models import tiny_model
from tests.test_train_model import make_samples, weighted

AWAY = [Residency.HOST, Residency.DISK]
SETTINGS = ModelSettings(path="-", logits_chunk_bytes=97 * 8 * 7)


def build(family: str = "qwen2", dtype: torch.dtype = torch.float32, lora: bool = False) -> TrainedModel:
    """qwen2 has tied embeddings."""
    module = tiny_model(family, dtype)
    use_layouts(module)
    settings = SETTINGS
    if lora:
        module = add_lora(module, LoraSettings(rank=2), seed=0)
        settings = SETTINGS.model_copy(update={"lora": LoraSettings(rank=2)})
    return TrainedModel(module, settings, MicrobatchBound(200), OptimizerSettings(lr=1e-2))


def resident(model: TrainedModel, place: Residency, folder: Path) -> ResidentModel:
    return ResidentModel("actor", model, dict.fromkeys(Part, place), folder=folder)


def held(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Everything that decides a model's future."""
    return {**dict(model.module.named_parameters()), **model.optimizer.state_tensors()}


def moved_bytes(model: TrainedModel) -> int:
    return sum(tensor.untyped_storage().size() for tensor in held(model).values() if tensor.numel() > 1)


def update(model: TrainedModel) -> None:
    model.forward_backward(make_samples(), weighted, temperature=1.0)
    model.optim_step(10)


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_a_run_with_parts_that_leave_between_updates_is_the_run_without(
    tmp_path: Path, place: Residency, dtype: torch.dtype, lora: bool
) -> None:
    """Gradients that wait, masters, moments, adapters and tied tables among them."""
    stays, moves = build(dtype=dtype, lora=lora), build(dtype=dtype, lora=lora)
    around = resident(moves, place, tmp_path)
    for _ in range(3):
        update(stays)
        for part in Part:
            around.park(part)
        assert moved_bytes(moves) == 0
        around.fetch(Part.PARAMETERS)
        moves.forward_backward(make_samples(), weighted, temperature=1.0)
        if dtype is torch.bfloat16 or not lora:
            around.fetch(Part.OPTIMIZER)
            around.park(Part.OPTIMIZER)  # with the gradients
            assert all(m.grad.untyped_storage().size() == 0 for m in moves.optimizer.masters.values())
            with pytest.raises(RunFault, match="a gradient is to be added to one that is away"):
                moves.forward_backward(make_samples(), weighted, temperature=1.0)
        around.fetch(Part.OPTIMIZER)
        moves.optim_step(10)
    for name, tensor in held(stays).items():
        assert torch.equal(held(moves)[name], tensor), name
    around.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_read_from_files_leave_too_and_stay_tied(tmp_path: Path) -> None:
    """The storages of such tensors cannot be resized as they are."""
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    module = load_model(tmp_path / "model", torch.float32, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = TrainedModel(module, SETTINGS, MicrobatchBound(200), None)
    around = ResidentModel("reference", model, {Part.PARAMETERS: Residency.HOST}, folder=tmp_path)
    around.park(Part.PARAMETERS)
    assert all(p.untyped_storage().size() == 0 for p in module.parameters())
    around.fetch(Part.PARAMETERS)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())


def test_matrices_that_an_engine_laid_side_by_side_are_one_block_still(tmp_path: Path) -> None:
    model = build("qwen3")
    around = resident(model, Residency.HOST, tmp_path)
    around.park(Part.PARAMETERS)
    around.fetch(Part.PARAMETERS)
    stack = DecodeStack(model.module, TorchOps(), 16)
    stack.bind(32)
    attention = model.decoder.layers[0].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    x = torch.randn(3, joined.shape[1])
    expected = stack._layers[0].qkv(x)
    around.park(Part.PARAMETERS)  # laid elsewhere since it was brought, so it must be copied again
    assert attention.k_proj.weight.untyped_storage().size() == 0
    around.fetch(Part.PARAMETERS)
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(torch.cat(parts), joined)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert torch.equal(stack._layers[0].qkv(x), expected)


@pytest.mark.parametrize("place", AWAY)
def test_what_is_away_cannot_be_computed_with(tmp_path: Path, place: Residency) -> None:
    """Its memory is gone: reading it would end the process without a word."""
    model = build()
    around = resident(model, place, tmp_path)
    update(model)
    around.park(Part.OPTIMIZER)
    model.forward_backward(make_samples(), weighted, temperature=1.0)
    with pytest.raises(RunFault, match=f"(?s)the optimizer of the actor are not where.*while it is on the {place}"):
        model.optim_step(10)
    around.park(Part.PARAMETERS)
    with pytest.raises(RunFault, match="the parameters of the actor"):
        model.forward(make_samples(), temperature=1.0)
    with pytest.raises(RunFault, match="it is on the .*, not on the device"):
        around.park(Part.PARAMETERS)
    around.fetch(Part.PARAMETERS)
    with pytest.raises(RunFault, match="on the device already"):
        around.fetch(Part.PARAMETERS)
    model.forward(make_samples(), temperature=1.0)


def test_bytes_that_contradict_the_state_are_an_error(tmp_path: Path) -> None:
    model = build()
    around = resident(model, Residency.HOST, tmp_path)
    empty([[model.decoder.layers[1].mlp.up_proj.weight.untyped_storage()]])
    with pytest.raises(RunFault, match=r"layers\.1\.mlp\.up_proj\.weight is not on the device"):
        around.require(Part.PARAMETERS, Residency.DEVICE)
    other = build()
    around = resident(other, Residency.HOST, tmp_path)
    around.park(Part.PARAMETERS)
    fill([[other.decoder.norm.weight.untyped_storage()]], [[4]])
    with pytest.raises(RunFault, match="has bytes on the device again"):
        around.fetch(Part.PARAMETERS)


def test_what_did_not_change_is_not_copied_again(tmp_path: Path) -> None:
    model = build()
    around = resident(model, Residency.DISK, tmp_path)
    around.park(Part.PARAMETERS)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    before = {name: tensor.clone() for name, tensor in copy.deepcopy(build()).weights()}
    for _ in range(2):
        around.fetch(Part.PARAMETERS)
        around.park(Part.PARAMETERS)
    assert file.stat().st_mtime_ns == written
    around.fetch(Part.PARAMETERS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.weights())
    update(model)
    around.park(Part.PARAMETERS)
    assert file.stat().st_mtime_ns != written


def test_host_memory_is_allocated_once(tmp_path: Path) -> None:
    shelf = HostShelf(torch.device("cpu"))
    groups = [[torch.arange(count, dtype=torch.float32).untyped_storage() for count in (1000, 3, 77)]]
    shelf.put(groups)
    taken = shelf.held_bytes
    at = [slab.data_ptr() for slab in shelf._slabs]
    for _ in range(3):
        shelf.take(groups).wait()
        shelf.put(groups)
    assert shelf.held_bytes == taken < 3 * 1080 * 4
    assert [slab.data_ptr() for slab in shelf._slabs] == at


def test_a_file_that_was_cut_or_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    groups = [[torch.ones(5000).untyped_storage()]]
    shelf = DiskShelf(torch.device("cpu"), tmp_path / "actor.parameters.0")
    shelf.put(groups)
    (tmp_path / "actor.parameters.0").write_bytes(b"short")
    with pytest.raises(RunFault, match=r"(?s)not there any more.*actor\.parameters\.0"):
        shelf.take(groups)
    (tmp_path / "file").write_text("")
    shelf = DiskShelf(torch.device("cpu"), tmp_path / "file" / "actor.parameters.0")
    with pytest.raises(RunFault, match=r"(?s)could not be written.*offload\.folder"):
        shelf.put([[torch.ones(3).untyped_storage()]])


def test_stretches_cover_every_byte_once_and_cross_no_border() -> None:
    sizes = [[1, 511, 4096], [], [9000, 0, 3]]
    found = list(stretches(sizes, 2048))
    covered: dict[tuple[int, int], list[int]] = {}
    places: set[int] = set()
    for part in found:
        assert part.place // 2048 == (part.place + part.stop - part.start - 1) // 2048
        covered.setdefault((part.group, part.index), []).extend(range(part.start, part.stop))
        taken = set(range(part.place, part.place + part.stop - part.start))
        assert not places & taken
        places |= taken
    assert covered == {
        (0, 0): [0],
        (0, 1): [*range(511)],
        (0, 2): [*range(4096)],
        (2, 0): [*range(9000)],
        (2, 2): [0, 1, 2],
    }


def test_a_storage_without_bytes_has_them_again_under_every_view() -> None:
    whole = torch.arange(12.0)
    views = [whole[3:], whole.view(3, 4)[1]]
    empty([[whole.untyped_storage()]])
    assert whole.untyped_storage().nbytes() == 0
    fill([[whole.untyped_storage()]], [[48]])
    whole.copy_(torch.arange(12.0))
    assert [view.sum().item() for view in views] == [63.0, 22.0]
