"""What is moved: names, shapes and dtypes, agreed once between the two sides.

Owns: the record and the comparison. Refuses to know: where tensors are. Always holds: a mismatch is an error that names the
tensor.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.config.errors import RunFault


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a manifest."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Manifest:
    """Tensors by name."""

    specs: dict[str, TensorSpec]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> "Manifest":
        return cls({name: TensorSpec.of(tensor) for name, tensor in tensors})

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs.values())

    def require(self, name: str, tensor: Tensor) -> None:
        """Check one tensor that arrives.

        Raises:
            RunFault: that names it, if it is unknown or has another shape or dtype.
        """
        expected = self.specs.get(name)
        if expected is None:
            raise _mismatch(name, "it was not among the tensors agreed on at the start")
        if expected.shape != tensor.shape or expected.dtype != tensor.dtype:
            raise _mismatch(name, f"it is {TensorSpec.of(tensor)}, agreed was {expected}")

    def require_all(self, names: Iterable[str]) -> None:
        """Check that every tensor came.

        Raises:
            RunFault: that names the first one missing.
        """
        missing = sorted(self.specs.keys() - set(names))
        if missing:
            raise _mismatch(missing[0], f"it did not come, nor did {len(missing) - 1} others")


def _mismatch(name: str, why: str) -> RunFault:
    return RunFault(f"the trainer's weights do not match what was agreed on: {name}", where="weights", why=why)
