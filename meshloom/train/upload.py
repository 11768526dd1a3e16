"""Moving small tensors of the processor to a device.

Owns: doing it in few copies that nobody waits for. Always holds: values and dtypes are kept; on the processor itself the
tensors are returned as they are.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from meshloom.samples import Samples

Key = TypeVar("Key", bound=Hashable)


def upload(tensors: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
    """The tensors on a device, by their names.

    All tensors of a dtype travel in one copy from pinned memory, in the order of the device's work; a copy from ordinary
    memory would make the processor wait until the device has done what it was given before.
    """
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    moved: dict[Key, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        names = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
        flat = torch.cat([tensors[name].reshape(-1) for name in names]).pin_memory().to(device, non_blocking=True)
        parts = flat.split([tensors[name].numel() for name in names])
        moved |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    return moved


def upload_samples(samples: Samples, device: torch.device) -> Samples:
    """Token and sample columns on a device; lengths stay on the CPU."""
    tokens = {("tokens", name): column for name, column in samples.tokens.items()}
    rows = {("rows", name): column for name, column in samples.rows.items()}
    moved = upload(tokens | rows, device)
    return replace(
        samples,
        tokens={name: moved["tokens", name] for name in samples.tokens},
        rows={name: moved["rows", name] for name in samples.rows},
    )
