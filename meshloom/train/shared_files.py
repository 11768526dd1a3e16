"""Safetensors files that several processes write together, each what it holds, and read again in whatever parts they need.

Owns: the place of every part of a tensor in a file. Refuses to know: models, meshes, who holds what. Always holds: the file is
an ordinary safetensors file once every part was written; nobody holds more than its own part; what is read equals what was
written, however it is cut.

The file has its final size before anything is written into it, so parts are written in any order, from any process that sees
the folder.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True)
class Spec:
    """A whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """A box of a tensor.

    Args:
        offsets: where it begins, on each axis.
        shape: its size on each axis.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Part":
        return cls((0,) * len(shape), tuple(shape))


def create(file: Path, specs: Mapping[str, Spec]) -> None:
    """Make a file for whole tensors, without their values."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    # Wide values first, so that each tensor begins at a multiple of its own width.
    for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
        spec = specs[name]
        end = place + spec.num_bytes
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as made:
        made.write(_SIZE.pack(len(text)) + text)
        made.truncate(_SIZE.size + len(text) + place)


class SharedFile:
    """A file that ``create`` made, or any other of safetensors; a context.

    Args:
        file: its path.
        write: whether parts are going to be written.
    """

    def __init__(self, file: Path, *, write: bool = False) -> None:
        self._file = os.open(file, os.O_RDWR if write else os.O_RDONLY)
        try:
            (size,) = _SIZE.unpack(os.pread(self._file, _SIZE.size, 0))
            header = json.loads(os.pread(self._file, size, _SIZE.size))
        except BaseException:
            os.close(self._file)
            raise
        header.pop("__metadata__", None)
        self.specs = {name: Spec(tuple(e["shape"]), _DTYPES[e["dtype"]]) for name, e in header.items()}
        self._starts = {name: _SIZE.size + size + e["data_offsets"][0] for name, e in header.items()}

    def __enter__(self) -> "SharedFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, name: str, part: Part, values: Tensor) -> None:
        """Write a part of a tensor.

        Args:
            name: of the tensor.
            part: where the values belong.
            values: of the part's shape and the tensor's dtype, on the CPU.
        """
        spec = self.specs[name]
        if tuple(values.shape) != part.shape or values.dtype != spec.dtype:
            raise ValueError(f"{name} takes {part.shape} of {spec.dtype}, not {tuple(values.shape)} of {values.dtype}")
        if not values.numel():
            return
        data = memoryview(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        done = 0
        for place, length in self._runs(name, part):
            run = data[done : done + length]
            while run:
                count = os.pwrite(self._file, run, place)
                place, run = place + count, run[count:]
            done += length

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """A part of a tensor, or all of it."""
        spec = self.specs[name]
        part = part or Part.whole(spec.shape)
        values = torch.empty(part.shape, dtype=spec.dtype)
        if not values.numel():
            return values
        data, done = memoryview(values.reshape(-1).view(torch.uint8).numpy()), 0
        for place, length in self._runs(name, part):
            end = done + length
            while done < end:
                count = os.preadv(self._file, [data[done:end]], place)
                if not count:
                    raise ValueError(f"{name} is cut off")
                place, done = place + count, done + count
        return values

    def sync(self) -> None:
        """Bring what was written to the disk."""
        os.fsync(self._file)

    def _runs(self, name: str, part: Part) -> Iterator[tuple[int, int]]:
        """Place and length, in bytes, of each stretch of the file that a part fills, in the order of its values."""
        spec, width = self.specs[name], self.specs[name].dtype.itemsize
        if len(part.shape) != len(spec.shape) or any(
            offset < 0 or offset + size > whole
            for offset, size, whole in zip(part.offsets, part.shape, spec.shape, strict=True)
        ):
            raise ValueError(f"{part} is no part of {name}, which has {spec.shape}")
        strides = [width * math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
        inner = len(spec.shape)
        while inner and part.shape[inner - 1] == spec.shape[inner - 1]:
            inner -= 1
        # The axes from ``inner`` on are whole: with the one before them they lie in one stretch.
        outer = max(inner - 1, 0)
        length = width * math.prod(part.shape[outer:])
        start = self._starts[name] + sum(o * s for o, s in zip(part.offsets, strides, strict=True))
        yield from ((start + shift, length) for shift in _shifts(part.shape[:outer], strides))


def _shifts(shape: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    """What each index of some outer axes adds to a place, the last axis fastest."""
    if not shape:
        yield 0
        return
    for index in range(shape[0]):
        for inner in _shifts(shape[1:], strides[1:]):
            yield index * strides[0] + inner
