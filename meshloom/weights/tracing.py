"""Where a receiving model keeps the trainer's tensors: learned once by watching its own loaders copy.

Owns: the table from a tensor's name to the places in the receiver's parameters that hold it, in whatever layout the
receiver has (query, key and value in one matrix, gate and up in one, padded vocabularies). Refuses to know: which receiver
it is, names and layouts of any model. Always holds: a table is used only if copying by it gives, bit for bit, what the
loaders gave; a loader that computes instead of copying makes no table, and its tensors are named.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.weights.checksum import Checksums
from meshloom.weights.manifest import Manifest


@dataclass(frozen=True)
class Place:
    """Where a part of a source tensor belongs.

    Args:
        size, stride, offset: the part, as a view of the source; the offset counts elements from the source's first.
        target: the view of the receiver's parameter that holds it.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target: Tensor

    def part(self, source: Tensor) -> Tensor:
        """The part of the source that goes there."""
        if self.offset == 0 and source.shape == self.size and source.stride() == self.stride:
            return source
        return source.as_strided(self.size, self.stride, source.storage_offset() + self.offset)


@dataclass(frozen=True)
class PlaceTable:
    """Places of each source tensor, and elements copied of it, by its name."""

    places: dict[str, list[Place]] = field(default_factory=dict)
    copied_elements: dict[str, int] = field(default_factory=dict)
    fills: list[tuple[Tensor, float]] = field(default_factory=list)
    """Places that the loaders set to a constant (the rows that a vocabulary is padded with), and which."""

    def incomplete(self, manifest: Manifest) -> list[str]:
        """Names of tensors that the loaders did not copy whole."""
        specs = manifest.specs.items()
        return [name for name, spec in specs if self.copied_elements.get(name, 0) < math.prod(spec.shape)]


_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class _Watch(TorchDispatchMode):
    """Records each ``copy_`` whose source lies in a tensor that was handed to the loaders, and each constant that is filled in.
    Holds no tensor of the source."""

    def __init__(self, tied: Mapping[str, str]) -> None:
        super().__init__()
        self.tied = tied
        self.handed: list[tuple[int, int, str, torch.dtype]] = []
        self.table = PlaceTable()
        self.looks = True
        """Whether what is copied now is copied by the loaders, and not on the way to them."""

    def hand_over(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._unseen(iter(tensors)):
            begin = tensor.data_ptr()
            self.handed.append((begin, begin + tensor.nbytes, self.tied.get(name, name), tensor.dtype))
            yield name, tensor

    def _unseen(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while True:
            self.looks = False
            try:
                found = next(tensors)
            except StopIteration:
                return
            finally:
                self.looks = True
            yield found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self.looks:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            self._note(args[0], args[1])
        elif func in _FILLS and args[0].numel() and not args[0].is_meta:
            self.table.fills.append((args[0].detach(), float(args[1]) if len(args) > 1 else 0.0))
        return func(*args, **(kwargs or {}))

    def _note(self, target: Tensor, source: Tensor) -> None:
        address = source.data_ptr()
        # Newest first: a tensor made on the way may stand where an older one stood that is gone.
        for begin, end, name, dtype in reversed(self.handed):
            if begin <= address < end and source.dtype == dtype:
                offset = (address - begin) // source.itemsize
                place = Place(tuple(source.shape), tuple(source.stride()), offset, target.detach())
                self.table.places.setdefault(name, []).append(place)
                self.table.copied_elements[name] = self.table.copied_elements.get(name, 0) + source.numel()
                return


def watch_loading(
    load: Callable[[Iterator[tuple[str, Tensor]]], Any],
    tensors: Iterable[tuple[str, Tensor]],
    tied: Mapping[str, str] | None = None,
) -> PlaceTable:
    """Let a receiver's own loaders load tensors, and note what they copied where.

    Args:
        load: the receiver's ``load_weights``; it pulls the tensors one by one.
        tensors: all of them, by name.
        tied: names that mean another name's tensor, and that name.
    """
    watch = _Watch(tied or {})
    with torch.no_grad(), watch:
        load(watch.hand_over(tensors))
    return watch.table


@torch.no_grad()
def unlike_loaders(model: nn.Module, copy: Callable[[], Any]) -> list[str]:
    """Names of the model's parameters for which ``copy`` does not give what its loaders just gave, bit for bit.

    Every parameter is overwritten first, so that any part that is not copied shows.
    """
    loaded = _parameter_checksums(model)
    for parameter in model.parameters():
        parameter.fill_(-1)
    copy()
    return loaded.differing(_parameter_checksums(model))


def _parameter_checksums(model: nn.Module) -> Checksums:
    named = dict(model.named_parameters())
    return Checksums.of(list(named), list(named.values()))
