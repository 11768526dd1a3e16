"""The two sides of a movement between layouts: what a rank gives, what it takes.

Owns: the protocols, and the sides for tensors, whole or sharded, and for the places of an engine that were traced. Refuses to
know: who sends what to whom. Always holds: a side describes its parts without reading a value; tied tensors come once, under
their first name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshloom.weights.layouts import Box, box_of
from meshloom.weights.tracing import PlaceTable


@dataclass(frozen=True)
class Part:
    """What a rank has of a tensor, or needs of it.

    Args:
        shape: of all of the tensor.
        boxes: one on the side that gives; on the other side any number.
        dtype: of values as they are there.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dtype: torch.dtype


class Giver(Protocol):
    """A rank's parts of the weights, on its device."""

    def parts(self) -> dict[str, Part]:
        """Each tensor's part, by name, in the same order on every rank."""
        ...

    def begin(self) -> None:
        """A movement begins: due on all ranks that give."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """The values of some of a part."""
        ...


class Taker(Protocol):
    """Where a rank's parts go, on its device."""

    def parts(self) -> dict[str, Part]:
        """What is needed of each tensor, by name."""
        ...

    def begin(self) -> None:
        """A movement begins: places may have moved since the last one."""
        ...

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The places that together hold a part of what is needed: which part of it each is, and the tensor that holds it."""
        ...


class HeldTensors:
    """Tensors as they are on a rank: each whole, or the shard of a DTensor.

    Args:
        tensors: gives names and tensors; asked at each movement, so that tensors may have moved since. Tensors on the same
            memory as an earlier one (tied ones) are left out.
    """

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._tensors = tensors
        self._now: dict[str, tuple[Box, Tensor]] = {}

    def parts(self) -> dict[str, Part]:
        return {
            name: Part(tuple(tensor.shape), (held_by(tensor),), tensor.dtype)
            for name, tensor in untied(self._tensors())
        }

    def begin(self) -> None:
        self._now = {name: (held_by(tensor), local_of(tensor)) for name, tensor in untied(self._tensors())}

    def view(self, name: str, box: Box) -> Tensor:
        """Some of what is held of a tensor, itself."""
        held, tensor = self._now[name]
        return box.of(tensor, held)


class TensorGiver(HeldTensors):
    """Gives them."""

    def read(self, name: str, box: Box) -> Tensor:
        return self.view(name, box)


class HeldTaker(HeldTensors):
    """Takes into them; they stay the same objects."""

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        yield box, self.view(name, box)


class TensorTaker:
    """Plain tensors that hold one box each.

    Args:
        held: by name: the shape of the whole, the box, and the tensor that holds it.
    """

    def __init__(self, held: Mapping[str, tuple[tuple[int, ...], Box, Tensor]]) -> None:
        self._held = dict(held)

    @classmethod
    def whole(cls, tensors: Iterable[tuple[str, Tensor]]) -> "TensorTaker":
        """Tensors that are needed whole, tied ones once."""
        found = ((name, tensor.detach()) for name, tensor in untied(tensors))
        return cls({name: (tuple(tensor.shape), Box.whole(tensor.shape), tensor) for name, tensor in found})

    def parts(self) -> dict[str, Part]:
        return {name: Part(shape, (box,), tensor.dtype) for name, (shape, box, tensor) in self._held.items()}

    def begin(self) -> None:
        """Nothing: the tensors stay where they are."""

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        _, held, tensor = self._held[name]
        yield box, box.of(tensor, held)


class ModuleTaker(HeldTaker):
    """A module's parameters, looked up at each movement: an engine may have laid them elsewhere since.

    Args:
        module: whose parameters are filled, whole, or the parts that DTensors say; tied ones once, under their first name.
        held: of plain parameters that are parts, by name: the shape of the whole tensor and the box that each is.
    """

    def __init__(self, module: nn.Module, held: Mapping[str, tuple[tuple[int, ...], Box]] | None = None) -> None:
        super().__init__(module.named_parameters)
        self._module, self._held = module, dict(held or {})

    def parts(self) -> dict[str, Part]:
        found = {}
        for name, parameter in self._module.named_parameters():
            shape, box = self._held.get(name, (tuple(parameter.shape), held_by(parameter)))
            if box.shape != tuple(local_of(parameter).shape):
                raise ValueError(f"{name} is {list(parameter.shape)}, and is to hold {box}")
            found[name] = Part(shape, (box,), parameter.dtype)
        return found

    def begin(self) -> None:
        self._now = {
            name: (self._held[name][1] if name in self._held else held_by(parameter), local_of(parameter))
            for name, parameter in self._module.named_parameters()
        }


class PlacedTaker:
    """The places in an engine's parameters that hold tensors of the model's folder (``tracing.watch_loading``): queries, keys
    and values in one matrix, a rank's part of a layer that is cut.

    Args:
        table: the places.
        shapes: of the full tensors, by name.

    Raises:
        ValueError: if a place holds something that is no box of its tensor; it names the tensor.
    """

    def __init__(self, table: PlaceTable, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._places = {
            name: [
                (_box_of_place(name, shapes[name], place.size, place.stride, place.offset), place.target)
                for place in places
            ]
            for name, places in table.places.items()
        }

    def parts(self) -> dict[str, Part]:
        return {
            name: Part(self._shapes[name], tuple(box for box, _ in places), places[0][1].dtype)
            for name, places in self._places.items()
        }

    def begin(self) -> None:
        """Nothing: the places stay where they are."""

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        for held, target in self._places[name]:
            if (common := box.meet(held)) is not None:
                yield common, common.of(target.view(held.shape), held)


def _box_of_place(
    name: str, shape: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Box:
    """The box of a tensor, whole in memory, that a view by size, stride and offset shows."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    starts, rest = [], offset
    for step in strides:
        starts.append(rest // step)
        rest %= step
    same = len(size) == len(shape) and all(s == t or n == 1 for s, t, n in zip(stride, strides, size, strict=True))
    stops = tuple(start + count for start, count in zip(starts, size, strict=True)) if same else ()
    if not same or any(stop > whole for stop, whole in zip(stops, shape, strict=True)):
        raise ValueError(f"a place holds {list(size)} of {name} {list(shape)} that is no range of each dimension")
    return Box(tuple(starts), stops)


def untied(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors on memory that no earlier one is on."""
    seen: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}
    for name, tensor in tensors:
        here = local_of(tensor)
        key = here.untyped_storage()._cdata, here.storage_offset(), tuple(here.shape)
        if key not in seen:
            seen[key] = here  # held, as another one could else come to be where it was
            yield name, tensor


def held_by(tensor: Tensor) -> Box:
    """What this rank holds of a tensor."""
    return box_of(tensor) if isinstance(tensor, DTensor) else Box.whole(tensor.shape)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: itself, or the shard in it."""
    with torch.no_grad():  # which gives the shard itself, not a view of it
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
