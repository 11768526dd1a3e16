"""Loading a model of which each rank holds a part: built without memory, then each part read from the files by range.

Owns: which part of which tensor a rank reads. Refuses to know: why a model is cut as it is. Always holds: a rank holds no more
than its own part of the model, and one tensor's part on its way; weights come from safetensors only.

A folder whose tensors have other names than the model's parameters (a family that transformers converts as it loads) is loaded
whole by each rank, on the processor.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.train.load import check_model_folder, freeze_apart_from_text, load_model
from meshloom.train.mesh import TrainMesh
from meshloom.train.value_head import is_scalar, put_scalar_head

Box = tuple[slice, ...]
"""A part of a tensor: a range of each dimension."""


class WeightFiles:
    """Tensors of a Hugging Face folder, read by range.

    Args:
        folder: with one ``model.safetensors``, or several and their index.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._file_of = {name: folder / file for name, file in listed.items()}
        else:
            file = folder / "model.safetensors"
            with safe_open(file, framework="pt") as opened:
                self._file_of = dict.fromkeys(opened.keys(), file)
        self._opened = ExitStack()
        self._handles: dict[Path, safe_open] = {}

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, in host memory."""
        file = self._file_of[name]
        if file not in self._handles:
            self._handles[file] = self._opened.enter_context(safe_open(file, framework="pt"))
        return self._handles[file].get_slice(name)[box]


def build_empty(
    path: str | Path, dtype: torch.dtype, *, scalar_head: bool = False, setting: str = "model.path"
) -> PreTrainedModel | None:
    """A model of a folder whose parameters have no memory; none if the folder's tensors have other names than it.

    Args:
        path: the folder.
        dtype: of its parameters.
        scalar_head: whether it gets a head of one output in place of the output head, as a critic has.
        setting: that names the folder.

    Raises:
        UserError: if the folder cannot be used.
    """
    folder = check_model_folder(path, setting)
    try:
        config = AutoConfig.from_pretrained(str(folder.resolve()), local_files_only=True)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the model in {folder} cannot be loaded: {error}", where=setting) from error
    model.tie_weights()
    if scalar_head:
        put_scalar_head(model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    with WeightFiles(folder) as files:
        if not all(name in files or is_scalar(name) for name, _ in model.named_parameters()):
            return None
    model.eval()
    freeze_apart_from_text(model)
    return model


def load_whole(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The same with its weights, in host memory."""
    return load_model(path, dtype, torch.device("cpu"))


def fill(module: nn.Module, named: Sequence[tuple[str, str]], path: str | Path, mesh: TrainMesh) -> None:
    """Give sharded parameters without memory theirs, from the files; zeros to a scalar head that these do not have.

    Args:
        module: sharded.
        named: names of its parameters, each with its name in the files; tied ones once.
        path: the folder.
        mesh: over which it is sharded.
    """
    owners = parameter_owners(module)
    parameters = dict(module.named_parameters())
    with WeightFiles(Path(path)) as files, torch.no_grad():
        for name, source in named:
            parameter = parameters[name]
            if not parameter.is_meta:
                continue
            # A copy: what is read lies on memory that could not be given up while the model is moved away.
            box = box_of(parameter, mesh)
            found = (
                files.read(source, box) if source in files else torch.zeros([part.stop - part.start for part in box])
            )
            local = found.to(mesh.device, parameter.dtype, copy=True)
            whole = DTensor.from_local(
                local.contiguous(),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            filled = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            for owner, leaf in owners[id(parameter)]:
                setattr(owner, leaf, filled)


def box_of(parameter: DTensor, mesh: TrainMesh) -> Box:
    """The part of a parameter that this rank holds.

    Tensor parallelism cuts first, into equal parts; what is left is sharded by rows, as ``torch.chunk`` cuts.
    """
    box = [slice(0, size) for size in parameter.shape]
    tensor_dim = tensor_dim_of(parameter)
    if tensor_dim is not None:
        each = parameter.shape[tensor_dim] // mesh.size("tp")
        box[tensor_dim] = slice(each * mesh.place["tp"], each * (mesh.place["tp"] + 1))
    if box:
        rows = box[0].stop - box[0].start
        each = -(-rows // mesh.shards)
        first = min(rows, each * mesh.shard_place)
        box[0] = slice(box[0].start + first, box[0].start + min(rows, first + each))
    return tuple(box)


def tensor_dim_of(parameter: DTensor) -> int | None:
    """The dimension of a parameter that tensor parallelism cuts; none if it leaves it whole."""
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, parameter.placements, strict=True))
    placement = placements.get("tp")
    return placement.dim if placement is not None and placement.is_shard() else None


def parameter_owners(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """For each parameter, by its identity, the modules that have it and its names there."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((child, name))
    return found


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[None]:
    """Inside, parameters without memory look like ordinary ones, of one value, so that what is made to go with them has memory
    and its usual values."""
    owners = parameter_owners(module)
    empty = [parameter for parameter in module.parameters() if parameter.is_meta]

    def put(values: Sequence[nn.Parameter]) -> None:
        for parameter, value in zip(empty, values, strict=True):
            for owner, leaf in owners[id(parameter)]:
                setattr(owner, leaf, value)

    stands = [nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad) for p in empty]
    put(stands)
    try:
        yield
    finally:
        for parameter, stand in zip(empty, stands, strict=True):
            parameter.requires_grad_(stand.requires_grad)
        put(empty)


def source_names(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of parameters, and those of the files: without what a peft wrapper puts around them; adapters are left out."""
    for name, _ in module.named_parameters():
        if ".lora_" not in name:
            yield name, name.removeprefix("base_model.model.").replace(".base_layer.", ".")
