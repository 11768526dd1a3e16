"""What ranks do in tests of models over a mesh whose parts leave, or whose weights go to engines."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshloom.loop.handing import handed_on
from meshloom.loop.parcels import KeptSamples, Parcel
from meshloom.plan.residency import Residency
from meshloom.plan.stays import Part
from meshloom.train.load import load_model
from meshloom.train.mesh import make_mesh
from meshloom.train.mesh_model import MeshModel
from meshloom.train.residency import ResidentModel
from meshloom.train.tensor_parallel import cut_layers
from meshloom.weights.engine_copy import EngineCopy
from meshloom.weights.mesh_giver import MeshGiver
from meshloom.weights.mesh_probe import Asked, MeshProbe
from meshloom.weights.reshard import Resharder
from meshloom.weights.whole_tensors import WholeTaker
from tests.mesh_checks import CPU, UPDATES, Axes, Outcome, local_part, make_batch, mesh_of, model_on, weighted
from tests.movement_checks import fault_of


def take_handed(parcels: list[Parcel]) -> dict[str, torch.Tensor]:
    """The token columns that this rank has of its parcel."""
    return dict(KeptSamples().take(handed_on(parcels[dist.get_rank()])).tokens)


def train_with_moves(
    meshes: list[tuple[Axes, list[int]]], folder: str, place: Residency, files: Path, lora: bool = False
) -> Outcome:
    """``mesh_checks.train_on`` with every part away between the verbs that need it."""
    mesh = mesh_of(meshes)
    model = model_on(mesh, folder, lora=lora)
    around = ResidentModel("actor", model, dict.fromkeys(Part, place), folder=files, rank=dist.get_rank())
    losses, norms, logprobs = [], [], []
    for step in range(UPDATES):
        batch = local_part(make_batch(step), mesh)
        for part in Part:
            around.park(part)
        assert held_bytes(model) == 0
        assert "while it is on the" in fault_of(lambda: model.forward(batch, temperature=0.9))  # noqa: B023
        for part in Part:
            around.fetch(part)
        losses.append(float(model.forward_backward(batch, weighted, temperature=0.9)["loss"]))
        norms.append(model.optim_step(UPDATES).grad_norm)
        around.park(Part.OPTIMIZER)
        logprobs.append(torch.stack(model.forward(batch, temperature=0.9)))
        around.fetch(Part.OPTIMIZER)
    whole = {name: tensor.full_tensor() for name, tensor in model.weights()}
    around.close()
    return Outcome(losses, norms, logprobs, whole if mesh.rank == 0 else {})


def held_bytes(model: MeshModel) -> int:
    """Of parameters and moments."""
    tensors = [*model.module.parameters(), *model.optimizer.state_tensors().values()]
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor.numel() > 1)
    return sum(part.untyped_storage().nbytes() for part in parts)


def feed_engines(
    meshes: list[tuple[Axes, list[int]]],
    folder: str,
    engines: list[int],
    dtype: torch.dtype,
    lora: bool = False,
    stages_per_device: int = 1,
) -> list[str]:
    """Bring a trained model's weights to whole copies; names of tensors that are not what they should be."""
    mesh, cut = mesh_of(meshes), {"lora": lora, "stages_per_device": stages_per_device}
    model = model_on(mesh, folder, **cut) if dist.get_rank() in meshes[0][1] else None
    copy = EngineCopy(load_model(folder, dtype, CPU)) if dist.get_rank() in engines else None
    resharder = Resharder(
        None if model is None else MeshGiver(model),
        None if copy is None else copy.taker,
        device=CPU,
        bucket_bytes=20_000,
        keep_buffers=False,
    )
    wrong: list[str] = []
    probe: MeshProbe | None = None
    for step in range(2):
        if model is not None:
            model.forward_backward(local_part(make_batch(step), mesh), weighted, temperature=0.9)
            model.optim_step(UPDATES)
        if copy is not None:
            copy.empty()
            assert copy.num_bytes == 0
            copy.take_memory()
        resharder.move(step)
        if probe is None:
            probe = MeshProbe(model, None if copy is None else Asked.of_module(copy.module), None)
        assert probe.prove() < 1e-5 or dtype is not torch.float32
        wrong += _unlike(model, copy, dtype)
    if copy is not None and dist.get_rank() == engines[-1]:
        with torch.no_grad():
            copy.module.get_input_embeddings().weight.mul_(3)
    said = fault_of(probe.prove)
    assert f"the engine of rank {engines[-1]} and the trainer disagree about fixed tokens" in said, said
    return wrong


def feed_cut_engines(meshes: list[tuple[Axes, list[int]]], folder: str, axes: Axes, ranks: list[int]) -> list[str]:
    """Bring a trained model's weights to copies whose layers are cut; names of tensors that are not what they should be."""
    mesh, engine_mesh = mesh_of(meshes), make_mesh(axes, ranks, CPU)
    model = model_on(mesh, folder) if dist.get_rank() in meshes[0][1] else None
    copy = None
    if engine_mesh is not None:
        plain = load_model(folder, torch.bfloat16, CPU)
        cut_layers(plain, engine_mesh)
        copy = EngineCopy(plain)
        copy.empty()
        copy.take_memory()
    resharder = Resharder(
        None if model is None else MeshGiver(model),
        None if copy is None else copy.taker,
        device=CPU,
        bucket_bytes=9_000,
    )
    resharder.move(0)
    return _unlike(model, copy, torch.bfloat16)


def _unlike(model: MeshModel | None, copy: EngineCopy | None, dtype: torch.dtype) -> list[str]:
    """Names of a copy's tensors that are not the trainer's, gathered whole."""
    mine = {} if model is None else {n: whole_of(tensor).clone() for n, tensor in model.module.named_parameters()}
    told: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    if copy is None:
        return []
    whole = {name: tensor for each in told for name, tensor in each.items()}
    found = {name: whole_of(parameter) for name, parameter in copy.module.named_parameters()}
    return [
        name for name, value in merged(whole).items() if not torch.allclose(found[name], value.to(dtype), rtol=1e-6)
    ]


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def merged(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with their adapters, rank 4 and alpha 32, under the names of the folder."""
    found = {}
    for name, tensor in whole.items():
        if ".lora_" in name:
            continue
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            down, up = (whole[f"{stem}.lora_{kind}.default.weight"] for kind in "AB")
            tensor = tensor + SCALE * up @ down
        found[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = tensor
    return found


SCALE = 32 / 4


def hand_over_whole(meshes: list[tuple[Axes, list[int]]], folder: str, engines: list[int], bucket_bytes: int) -> None:
    """Bring a trained model's weights to loaders that want whole tensors, bucket by bucket; each comes once, right, and is then
    no longer held."""
    mesh = mesh_of(meshes)
    model = model_on(mesh, folder) if dist.get_rank() in meshes[0][1] else None
    expected = {name: tensor.detach() for name, tensor in load_model(folder, torch.bfloat16, CPU).named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    taker = WholeTaker(shapes, torch.bfloat16, CPU) if dist.get_rank() in engines else None
    giver = None if model is None else MeshGiver(model)
    resharder = Resharder(giver, taker, device=CPU, bucket_bytes=bucket_bytes)
    largest = max(tensor.nbytes for tensor in expected.values())
    for version in range(2):
        seen: list[str] = []
        for _ in resharder.moving(version):
            for name, tensor in taker.finished() if taker is not None else ():
                assert torch.equal(tensor, expected[name]), name
                seen.append(name)
            assert taker is None or taker.num_bytes <= largest + 2 * bucket_bytes
        assert taker is None or (sorted(seen) == sorted(expected) and taker.num_bytes == 0)
