"""Values as a JSON header and raw bytes: what may travel between processes.

Owns: which types travel, and how. Refuses to know: sockets. Always holds: reading runs no code but the constructors of
registered records, meshloom's own dataclasses, settings and enums: nothing is pickled; what is read equals what was written,
tensors bit for bit, on the CPU; a tensor that occurs twice in a value travels once.

Registered are all records of ``meshloom``, and what ``register`` was told in both processes.
"""

import dataclasses
import enum
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshloom.config.base import Settings
from meshloom.config.provenance import Provenance

Blob = bytes | bytearray | memoryview
_TAG = "$"
_REGISTERED: dict[str, type] = {}


def register(kind: type) -> type:
    """Let a dataclass, pydantic model or enum from outside ``meshloom`` travel; both processes must do so."""
    _REGISTERED[_name(kind)] = kind
    return kind


def encode(value: Any) -> tuple[Any, list[Blob]]:
    """A value as JSON and the bytes that it refers to.

    Raises:
        TypeError: if a part of it may not travel; the message says where it is.
    """
    writer = _Writer()
    return writer.write(value, "value"), writer.blobs


def decode(header: Any, blobs: Sequence[Blob]) -> Any:
    """The value that ``encode`` took apart; the tensors use the memory of the blobs."""
    return _Reader(blobs).read(header)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _kind(name: str) -> type:
    """The registered type of a name."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    module, _, path = name.partition(":")
    if module != "meshloom" and not module.startswith("meshloom."):
        raise ValueError(f"{name} is not registered")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = vars(found)[part]
    if not isinstance(found, type) or not _is_record(found):
        raise ValueError(f"{name} is no record")
    return found


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel | enum.Enum)


def _may_travel(kind: type) -> bool:
    ours = kind.__module__ == "meshloom" or kind.__module__.startswith("meshloom.")
    return _is_record(kind) and (_name(kind) in _REGISTERED or (ours and "<locals>" not in kind.__qualname__))


class _Writer:
    def __init__(self) -> None:
        self.blobs: list[Blob] = []
        self._kept: list[Any] = []
        self._places: dict[int, int] = {}

    def write(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.write(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if kind is dict and all(type(key) is str and not key.startswith(_TAG) for key in value):
            return {key: self.write(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, enum.Enum) and _may_travel(kind):
            return {_TAG: "enum", "type": _name(kind), "name": value.name}
        written = self._container(value, where) or self._of_torch(value, where) or self._record(value, where)
        if written is None:
            fix = "; register its type" if _is_record(kind) else ""
            raise TypeError(f"{where} is a {_name(kind)}, which cannot travel between processes{fix}")
        return written

    def _container(self, value: Any, where: str) -> dict[str, Any] | None:
        kind = type(value)
        if kind is tuple:
            return {_TAG: "tuple", "items": self.write(list(value), where)}
        if kind in (set, frozenset):
            return {_TAG: kind.__name__, "items": self.write(list(value), where)}
        if isinstance(value, Mapping):
            pairs = [
                [self.write(key, f"key of {where}"), self.write(item, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
            return {_TAG: "dict", "pairs": pairs}
        if kind in (bytes, bytearray):
            return {_TAG: "bytes", "blob": self._blob(value)}
        if kind is range:
            return {_TAG: "range", "items": [value.start, value.stop, value.step]}
        return {_TAG: "path", "text": str(value)} if isinstance(value, Path) else None

    def _of_torch(self, value: Any, where: str) -> dict[str, Any] | None:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._tensor(torch, value, where)
        if isinstance(value, torch.dtype):
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {_TAG: "device", "name": str(value)}
        return {_TAG: "size", "items": list(value)} if isinstance(value, torch.Size) else None

    def _tensor(self, torch: Any, value: Any, where: str) -> dict[str, Any]:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise TypeError(f"{where} is a {type(value).__name__}, of which only plain tensors travel")
        place = self._places.get(id(value))
        if place is None:
            self._kept.append(value)  # an object that is freed would lend its id to another
            flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            place = self._places[id(value)] = self._blob(memoryview(flat.view(torch.uint8).numpy()))
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TAG: "tensor", "blob": place, "dtype": dtype, "shape": list(value.shape)}

    def _record(self, value: Any, where: str) -> dict[str, Any] | None:
        kind = type(value)
        if not _may_travel(kind):
            return None
        if isinstance(value, BaseModel):
            names = [name for name in kind.model_fields if name in value.model_fields_set]
        else:
            names = [field.name for field in dataclasses.fields(value)]
        fields = {name: self.write(getattr(value, name), f"{where}.{name}") for name in names}
        written = {_TAG: "record", "type": _name(kind), "fields": fields}
        if isinstance(value, Settings):
            written["origins"] = dict(value.provenance.origins)
        return written

    def _blob(self, data: Blob) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1


class _Reader:
    def __init__(self, blobs: Sequence[Blob]) -> None:
        self._blobs = blobs
        self._tensors: dict[int, Any] = {}

    def read(self, header: Any) -> Any:
        if isinstance(header, list):
            return [self.read(item) for item in header]
        if not isinstance(header, dict):
            return header
        if _TAG not in header:
            return {key: self.read(item) for key, item in header.items()}
        return self._tagged(header[_TAG], header)

    def _tagged(self, tag: str, header: dict[str, Any]) -> Any:
        match tag:
            case "tuple" | "set" | "frozenset":
                return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](self.read(header["items"]))
            case "dict":
                return {self.read(key): self.read(item) for key, item in header["pairs"]}
            case "bytes":
                return bytes(self._blobs[header["blob"]])
            case "range":
                return range(*header["items"])
            case "path":
                return Path(header["text"])
            case "enum":
                return _kind(header["type"])[header["name"]]  # type: ignore[index]
            case "record":
                return self._record(_kind(header["type"]), header)
            case "tensor" | "dtype" | "device" | "size":
                return self._of_torch(tag, header)
        raise ValueError(f"unknown tag {tag!r}")

    def _of_torch(self, tag: str, header: dict[str, Any]) -> Any:
        import torch

        if tag == "size":
            return torch.Size(header["items"])
        if tag == "device":
            return torch.device(header["name"])
        dtype = getattr(torch, header["dtype" if tag == "tensor" else "name"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype!r} is no dtype")
        if tag == "dtype":
            return dtype
        place = header["blob"]
        if place not in self._tensors:
            data = self._blobs[place]
            flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
            self._tensors[place] = flat.view(dtype).reshape(header["shape"])
        return self._tensors[place]

    def _record(self, kind: type, header: dict[str, Any]) -> Any:
        fields = {name: self.read(item) for name, item in header["fields"].items()}
        if issubclass(kind, BaseModel):
            made = kind.model_validate(fields)
            if isinstance(made, Settings):
                made._provenance = Provenance(header["origins"])
            return made
        given = {field.name: fields[field.name] for field in dataclasses.fields(kind) if field.init}
        made = kind(**given)
        for field in dataclasses.fields(kind):
            if not field.init:
                object.__setattr__(made, field.name, fields[field.name])
        return made
