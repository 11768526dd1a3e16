"""Samples as files: tensors for safetensors, the rest as JSON.

Always holds: what is read back equals what was written, column by column.
"""

from typing import Any

import torch
from torch import Tensor

from meshloom.samples.ragged import Samples


def to_parts(samples: Samples) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Tensors by ``kind/name`` and JSON columns by name."""
    tensors = {"lengths": samples.lengths}
    tensors |= {f"tokens/{name}": column.contiguous() for name, column in samples.tokens.items()}
    tensors |= {f"rows/{name}": column.contiguous() for name, column in samples.rows.items()}
    return tensors, dict(samples.meta)


def from_parts(tensors: dict[str, Tensor], meta: dict[str, list[Any]]) -> Samples:
    """The samples that ``to_parts`` took apart."""
    columns: dict[str, dict[str, Tensor]] = {"tokens": {}, "rows": {}}
    for key, tensor in tensors.items():
        if key != "lengths":
            kind, name = key.split("/", 1)
            columns[kind][name] = tensor
    return Samples(tensors.get("lengths", torch.zeros(0, dtype=torch.int64)), columns["tokens"], columns["rows"], meta)
