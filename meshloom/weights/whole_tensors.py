"""The side of a movement that takes whole tensors, one after the other, for an engine whose own loaders place them.

Owns: the memory of tensors that are not yet whole. Refuses to know: engines, who sends. Always holds: a tensor is handed over
once and whole, in the order in which tensors become whole; what was handed over is not held here any longer, so that no more
is alive than the buckets in flight and the tensors that they complete.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshloom.weights.layouts import Box
from meshloom.weights.shards import Part


class WholeTaker:
    """Takes every tensor whole.

    Args:
        shapes: of all tensors, by name.
        dtype: that the engine has them in.
        device: where they are made.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = dict(shapes), dtype, device
        self._open: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of tensors that are not yet handed over."""
        return sum(tensor.nbytes for tensor in self._open.values())

    def parts(self) -> dict[str, Part]:
        return {name: Part(shape, (Box.whole(shape),), self._dtype) for name, shape in self._shapes.items()}

    def begin(self) -> None:
        self._open, self._missing = {}, {}

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        shape = self._shapes[name]
        if name not in self._open:
            self._open[name] = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._missing[name] = Box.whole(shape).numel
        self._missing[name] -= box.numel
        yield box, box.of(self._open[name], Box.whole(shape))

    def finished(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are whole by now, each once."""
        for name in [name for name, count in self._missing.items() if count == 0]:
            del self._missing[name]
            yield name, self._open.pop(name)
