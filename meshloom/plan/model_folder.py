"""A Hugging Face model folder, read without torch and without its weights.

Owns: the shapes of a model, from config.json and the headers of its safetensors files. Refuses to know: what the model is
used for. Always holds: parameters are counted from the files themselves where there are any, and else exactly from the
configuration, never guessed; no weight is read; a cut-off file or a pickle is refused.
"""

import difflib
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.matrices import linear_matrices
from meshloom.plan.model_config import require_config
from meshloom.plan.parameters import UnknownFamily, count_parameters

_HEADER_LIMIT, _SIZE_LIMIT = 100_000_000, 2**48
_INDEX = "model.safetensors.index.json"
_LOCAL = "give a local folder with config.json and safetensors"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")
_HEADS = ("lm_head.weight",)
_TABLES = ("embed_tokens.weight", "wte.weight")


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says of one tensor: its element type as the format names it (``BF16``), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def read_safetensors_header(path: Path) -> dict[str, TensorHeader]:
    """Tensors of a safetensors file by name, without reading their values.

    The file is 8 bytes of header length (little endian), that many bytes of JSON, then the values
    (https://huggingface.co/docs/safetensors).

    Raises:
        UserError: if the file is something else, or ends before its last tensor.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
        if length > min(_HEADER_LIMIT, size - 8):
            raise _not_safetensors(path, start, size)
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
            tensors = {name: TensorHeader(entry["dtype"], _shape(entry["shape"])) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise _not_safetensors(path, start, size) from error
    if size < (needed := 8 + length + max(ends, default=0)):
        raise UserError(
            f"{path.name} is cut off: it has {size} bytes, its header needs {needed}",
            where=str(path),
            fix="copy or download the file again",
        )
    return tensors


def _shape(sizes: list[Any]) -> tuple[int, ...]:
    """Sizes of a tensor.

    Raises:
        ValueError: if one cannot be.
    """
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < _SIZE_LIMIT for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return tuple(sizes)


def _not_safetensors(path: Path, start: bytes, size: int) -> UserError:
    kinds = {
        b"PK\x03\x04": "a zip archive, as torch.save writes",
        b"\x80\x02": "a pickle",
        b"vers": "a Git LFS pointer",
    }
    seen = next((kind for magic, kind in kinds.items() if start.startswith(magic)), f"{size} bytes of something else")
    fix = "fetch the file itself (git lfs pull)" if start.startswith(b"vers") else "save the model as safetensors"
    return UserError(f"{path.name} is not a safetensors file: it is {seen}", where=str(path), fix=fix)


@dataclass(frozen=True)
class ModelFolder:
    """What a model folder says of the model.

    Args:
        path: the folder.
        config: config.json.
        tensors: all tensors of the safetensors files, by name; without such files the matrices that config.json tells of.
        counted: parameters by config.json, where there are no files of weights; none where there are.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]
    counted: int | None = None

    @property
    def has_weights(self) -> bool:
        """Whether there are files of weights."""
        return self.counted is None

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the configuration."""
        return self.config.get("text_config", self.config)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""
        heads = [name for name in self.tensors if name.endswith(_HEADS)]
        return not heads or bool(
            self.config.get("tie_word_embeddings", self.text_config.get("tie_word_embeddings", False))
        )

    @cached_property
    def num_parameters(self) -> int:
        """Parameters, a tied output head counted once."""
        if self.counted is not None:
            return self.counted
        skipped = _HEADS if self.tied else ()
        return sum(t.num_values for name, t in self.tensors.items() if not (skipped and name.endswith(skipped)))

    @cached_property
    def other_than_llama(self) -> DecoderNumbers | None:
        """The decoder in numbers where its layers are not of the Llama shape: experts, or keys and values from a latent vector;
        none for others, and for families whose parameters cannot be counted. Its parameters are those of the files."""
        try:
            model = count_parameters(self.config)
        except UnknownFamily:
            return None
        latent = model.cached != 2 * model.key_value_width
        if not latent and not any(layer.experts for layer, _ in model.layers.runs):
            return None
        return replace(model, embedding=model.embedding + self.num_parameters - model.total)

    def changing_rotary(self) -> dict[str, int]:
        """Kinds of rotary embeddings that depend on the longest sequence of a pass, and up to which position they do not."""
        given = self.text_config.get("rope_parameters") or self.text_config.get("rope_scaling") or {}
        made_for = self.text_config.get("original_max_position_embeddings")
        made_for = made_for or self.text_config.get("max_position_embeddings") or 0
        limits: dict[str, int] = {}
        # Families with several kinds of layers give parameters for each kind.
        for rope in (given, *(entry for entry in given.values() if isinstance(entry, Mapping))):
            kind = str(rope.get("rope_type") or rope.get("type") or "")
            if "dynamic" in kind or kind == "longrope":
                limits[kind] = rope.get("original_max_position_embeddings") or made_for
        return limits

    def linear_layers(self, targets: tuple[str, ...]) -> dict[str, TensorHeader]:
        """Matrices that adapters attach to, by the name of their layer.

        Args:
            targets: last names of layers, or ``all-linear``: all but the output head and the embedding tables.
        """
        layers = {
            name.removesuffix(".weight"): tensor
            for name, tensor in self.tensors.items()
            if name.endswith(".weight") and len(tensor.shape) == 2 and not name.endswith(_TABLES)
        }
        if targets == ("all-linear",):
            return {name: tensor for name, tensor in layers.items() if not f"{name}.weight".endswith(_HEADS)}
        return {
            name: tensor
            for name, tensor in layers.items()
            if any(name == target or name.endswith(f".{target}") for target in targets)
        }


def read_model_folder(path: Path, *, needs_weights: bool = True, setting: str = "model.path") -> ModelFolder:
    """Read config.json and the headers of the weights.

    Args:
        path: the folder.
        needs_weights: whether a folder without any weights is refused; else its config.json alone is read, which has to be of a
            family whose parameters can be counted.
        setting: that names the folder.

    Raises:
        UserError: if the folder, its configuration or a file of weights is missing or unreadable, or weights are pickles.
    """
    where = f"{setting} ({path})"
    try:
        return _read_model_folder(path, where, needs_weights=needs_weights)
    except OSError as error:
        what = f"{error.filename or path} cannot be read: {error.strerror or error}"
        raise UserError(what, where=where, fix=_LOCAL) from error


def _read_model_folder(path: Path, where: str, *, needs_weights: bool) -> ModelFolder:
    if not path.is_dir():
        folders = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, folders, n=4, cutoff=0.4)
        fix = f"folders nearby: {', '.join(near)}" if near else _LOCAL
        if not near and folders:
            fix = f"{path.parent} has the folders {', '.join(sorted(folders)[:6])}; {_LOCAL}"
        # A folder of that name in front says that a path was meant, and no name of the hub.
        elif not near and _HUB_NAME.fullmatch(str(path)) and not path.parent.is_dir():
            fix = f"nothing is downloaded here: hf download {path} --local-dir {path}, then the same path is a folder"
        why = "" if path.is_absolute() else f"paths are relative to the current directory, {Path.cwd()}"
        raise UserError(f"there is no model folder {path}", where=where, why=why, fix=fix)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise UserError(
            f"{path} has no config.json", where=where, why=f"it holds: {held}", fix=_model_near(path)
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path / 'config.json'} is not JSON: {error}", where=where) from error
    config = require_config(config, path / "config.json", where)
    if not needs_weights and not _has_weights(path):
        return _without_weights(path, config, where)
    tensors: dict[str, TensorHeader] = {}
    for name in _weight_files(path, where):
        tensors |= read_safetensors_header(path / name)
    return ModelFolder(path, config, tensors)


def _has_weights(path: Path) -> bool:
    """Whether there is a file of weights of any kind, or an index of them."""
    kinds = (".safetensors", *_PICKLES)
    return (path / _INDEX).is_file() or any(entry.suffix in kinds for entry in path.iterdir() if entry.is_file())


def _without_weights(path: Path, config: Mapping[str, Any], where: str) -> ModelFolder:
    """A model that config.json alone tells of."""
    try:
        model = count_parameters(config)
    except UnknownFamily as error:
        why = f"its parameters cannot be counted by config.json either: {error}"
        what = f"{path} has no weights: model.safetensors is missing"
        raise UserError(what, where=where, why=why, fix=_LOCAL) from error
    shapes = linear_matrices(model, config.get("text_config", config))
    tensors = {name: TensorHeader("BF16", shape) for name, shape in shapes.items()}
    return ModelFolder(path, config, tensors, counted=model.total)


def _model_near(path: Path) -> str:
    """Where the model is, if a folder is one that a run has made and that is none itself."""
    if (path / "model" / "config.json").is_file():
        return f"the model of this checkpoint is {path / 'model'}"
    if (path / "checkpoints").is_dir() or (path / "adapter").is_dir():
        return f"make a model folder of it: meshloom export {path} DEST"
    if (path / "adapter_config.json").is_file():
        return "it holds adapters alone; export the run or the checkpoint without --adapter: meshloom export RUN DEST"
    return _LOCAL


def _weight_files(path: Path, where: str) -> list[str]:
    """The files transformers reads: model.safetensors, or those its index names."""
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = path / _INDEX
    if not index.is_file():
        refuse_pickles(path)
        raise UserError(f"{path} has no weights: model.safetensors is missing", where=where)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        strangers = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if strangers or not names:
            raise ValueError(f"it names {strangers[0]!r}, no file of this folder" if strangers else "it names no file")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(
            f"{index} is no index of weights", where=where, why=f"{type(error).__name__}: {error}"
        ) from error
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(names)} files of weights are missing: {', '.join(missing[:4])}",
            where=where,
            fix="copy or download them",
        )
    return names


_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def refuse_pickles(folder: Path, *, beside_safetensors: bool = False) -> None:
    """Refuse a folder with pickles in place of safetensors: loading a pickle runs code that is in it.

    Folders inside are looked at too.

    Args:
        folder: of a model or checkpoint.
        beside_safetensors: refuse pickles that stand beside safetensors too; else they are let be, as they are never read.

    Raises:
        UserError: that names the first such file.
    """
    for inside in (folder, *sorted(entry for entry in folder.rglob("*") if entry.is_dir())):
        files = sorted(entry for entry in inside.iterdir() if entry.is_file())
        pickles = [file for file in files if file.suffix in _PICKLES]
        if pickles and (beside_safetensors or not any(file.suffix == ".safetensors" for file in files)):
            raise UserError(
                f"{pickles[0].name} is a pickle, not safetensors",
                where=str(pickles[0]),
                why="loading a pickle runs code that is in it",
                fix="save the model with save_pretrained, which writes safetensors",
            )
