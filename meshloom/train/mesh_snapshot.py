"""What a checkpoint holds of a model on a mesh: the files of ``train.snapshot``, written by all ranks, each the parts it holds.

Owns: which part of which tensor a rank writes and reads. Refuses to know: when to save, what else a checkpoint holds. Always
holds: the files are those that one device writes, so a run goes on from them on any mesh, or on one device; every value is
written once; no rank holds more than its own parts, and their copies in host memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshloom.train.head import plain_model
from meshloom.train.load_sharded import box_of, tensor_dim_of
from meshloom.train.mesh import TrainMesh
from meshloom.train.mesh_model import MeshModel
from meshloom.train.shared_files import Part, SharedFile, Spec
from meshloom.train.snapshot import ADAPTER, model_name, optimizer_name, save_adapter_config
from meshloom.train.value_head import architecture_of, is_critic

ADAPTER_FILE = f"{ADAPTER}/adapter_model.safetensors"


def weights_file(model: MeshModel) -> str:
    """File of what a checkpoint holds of a model's weights: all of them, or the adapters."""
    return f"{model_name(model)}/model.safetensors" if model.settings.lora is None else ADAPTER_FILE


@dataclass(frozen=True)
class Held:
    """A part of a tensor that this rank holds.

    Args:
        spec: of the whole tensor, as the file has it.
        part: what is held here.
        values: of the part; may be wider than the file's.
        writes: whether this rank writes it; other ranks hold the same.
    """

    spec: Spec
    part: Part
    values: Tensor
    writes: bool


def held(model: MeshModel) -> dict[str, dict[str, Held]]:
    """Everything that a checkpoint holds of a model, by file and name, as far as this rank has it."""
    trained = model.settings.lora is not None
    files = {weights_file(model): dict(_weights(model, only_adapters=trained))}
    if model.optimizer is not None:
        files[optimizer_name(model)] = dict(_optimizer(model, model.optimizer.masters))
    return files


def _place(model: MeshModel, parameter: DTensor) -> tuple[Part, bool]:
    """Which part of a parameter this rank holds, and whether it is the one that writes it."""
    mesh = model.mesh
    box = box_of(parameter, mesh)
    part = Part(tuple(edge.start for edge in box), tuple(edge.stop - edge.start for edge in box))
    is_copy = tensor_dim_of(parameter) is None and mesh.place["tp"] > 0
    return part, mesh.place["replicate"] == 0 and not is_copy


def _weights(model: MeshModel, *, only_adapters: bool) -> Iterator[tuple[str, Held]]:
    for name, parameter in model.module.named_parameters():
        if only_adapters and ".lora_" not in name:
            continue
        part, writes = _place(model, parameter)
        spec = Spec(tuple(parameter.shape), model.compute if parameter.is_floating_point() else parameter.dtype)
        yield name.replace(".default.", "."), Held(spec, part, parameter.detach().to_local(), writes)
    if only_adapters:
        return
    kept = model.module.state_dict()
    for name, buffer in model.module.named_buffers():
        if name in kept:
            whole = Part.whole(buffer.shape)
            yield name, Held(Spec(tuple(buffer.shape), buffer.dtype), whole, buffer, model.mesh.rank == 0)


def _optimizer(model: MeshModel, names: Iterable[str]) -> Iterator[tuple[str, Held]]:
    """Moments, step counts, and float32 weights where the model computes in a narrower dtype, of these parameters."""
    optimizer = model.optimizer
    for name in names:
        parameter = optimizer.parameters[name]
        part, writes = _place(model, parameter)
        whole = tuple(parameter.shape)
        master = optimizer.masters[name]
        for kind, value in optimizer.adamw.state.get(master, {}).items():
            if value.ndim:
                yield f"{kind}/{name}", Held(Spec(whole, value.dtype), part, value, writes)
            else:
                yield f"{kind}/{name}", Held(Spec((), value.dtype), Part((), ()), value, is_first(model.mesh))
        if model.compute.itemsize < master.dtype.itemsize:
            yield f"master/{name}", Held(Spec(whole, master.dtype), part, master, writes)


def specs_of(files: Mapping[str, Mapping[str, Held]]) -> dict[str, dict[str, Spec]]:
    """The whole tensors of each file that this rank has parts of."""
    return {file: {name: one.spec for name, one in tensors.items()} for file, tensors in files.items()}


def is_first(mesh: TrainMesh) -> bool:
    """Whether this rank is the first of its stage."""
    return mesh.place["replicate"] == 0 and mesh.shard_place == 0 and mesh.place["tp"] == 0


def full_bytes(model: MeshModel) -> int:
    """About what the files of a checkpoint will take for this rank's stage, known before the first update."""
    total = 0
    for file, tensors in held(model).items():
        total += sum(one.spec.num_bytes for one in tensors.values() if file != optimizer_name(model))
    if model.optimizer is not None:
        for name, parameter in model.optimizer.parameters.items():
            width = model.optimizer.masters[name].dtype.itemsize
            total += (2 if model.compute.itemsize >= width else 3) * width * parameter.numel()
    return total


@dataclass(frozen=True)
class MeshSnapshot:
    """What this rank writes of a checkpoint, in host memory."""

    files: dict[str, dict[str, Held]]

    @classmethod
    def take(cls, *models: MeshModel) -> "MeshSnapshot":
        """Copy what this rank writes of models; it does not change when training goes on."""
        files: dict[str, dict[str, Held]] = {}
        for model in models:
            trained = model.settings.lora is not None
            files[weights_file(model)] = _copies(_weights(model, only_adapters=trained))
            if model.optimizer is not None:
                of_optimizer = files.setdefault(optimizer_name(model), {})
                for names in model.optimizer.visit(changes=False):
                    of_optimizer |= _copies(_optimizer(model, names))
        return cls(files)

    def write(self, folder: Path) -> None:
        """Write this rank's parts into files that are there (``shared_files.create``)."""
        for file, tensors in self.files.items():
            with SharedFile(folder / file, write=True) as opened:
                for name, one in tensors.items():
                    opened.write(name, one.part, one.values)
                opened.sync()


def _copies(tensors: Iterable[tuple[str, Held]]) -> dict[str, Held]:
    """What this rank writes of them, in host memory."""
    return {
        name: replace(one, values=one.values.detach().to("cpu", one.spec.dtype, copy=True))
        for name, one in tensors
        if one.writes
    }


def write_config(model: MeshModel, folder: Path) -> None:
    """Everything of the model's folder but weights and tokenizer."""
    if model.settings.lora is not None:
        save_adapter_config(model, folder / ADAPTER)
        return
    plain = plain_model(model.module)
    config = type(plain.config).from_dict(plain.config.to_dict())
    architecture = architecture_of(plain) if is_critic(plain) else type(plain).__name__
    config.architectures, config.dtype = [architecture], model.compute
    config.save_pretrained(folder / model_name(model))
    if plain.generation_config is not None:
        plain.generation_config.save_pretrained(folder / model_name(model))


@torch.no_grad()
def restore_on_mesh(model: MeshModel, folder: Path, updates: int) -> None:
    """Load a checkpoint's adapters and optimizer, this rank's parts of them, into a model built from the same settings.

    As for one device, the weights of a model without adapters are not read here: it is built from its folder there.
    """
    if model.settings.lora is not None:
        with SharedFile(folder / ADAPTER_FILE) as opened:
            for name, one in _weights(model, only_adapters=True):
                one.values.copy_(opened.read(name, one.part))
    if model.optimizer is None:
        return
    state: dict[str, Tensor] = {}
    with SharedFile(folder / optimizer_name(model)) as opened:
        for key, spec in opened.specs.items():
            parameter = model.optimizer.parameters.get(key.split("/", 1)[1])
            if parameter is not None:  # it is another stage's otherwise
                state[key] = opened.read(key, _place(model, parameter)[0] if spec.shape else Part((), ()))
    model.optimizer.load_state_tensors(state, updates)
