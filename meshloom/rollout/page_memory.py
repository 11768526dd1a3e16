"""The memory of the pages: how much they may take, taking it, and giving it back.

Owns: the allocator's state around a generation. Refuses to know: who uses the pages. Always holds: pages are taken a layer
at a time, so memory in pieces serves too; where it does not suffice, there are fewer pages instead of an error.
"""

import psutil
import torch
from torch import Tensor

from meshloom.config.errors import RunFault
from meshloom.rollout.kv_cache import CacheShape


def spare_bytes(device: torch.device, *, beside: int) -> int:
    """Bytes that pages may take now: on a GPU nine tenths of what is free beside ``beside`` bytes, else a quarter."""
    if device.type != "cuda":
        return psutil.virtual_memory().available // 4
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, (torch.cuda.mem_get_info(device)[0] + unused - beside) * 9 // 10)


def take_pages(shape: CacheShape, page: int, *, wanted: int, fewest: int) -> list[Tensor]:
    """A tensor [pages, 2, K, page, D] for each layer, uninitialised.

    Args:
        shape: of the cache.
        page: tokens of a page.
        wanted: pages that are useful.
        fewest: pages without which nothing can run.

    Raises:
        RunFault: if not even those can be had.
    """
    count = max(wanted, fewest)
    if shape.device.type == "cuda" and count * page * shape.bytes_per_token > torch.cuda.mem_get_info(shape.device)[0]:
        torch.cuda.empty_cache()
    while True:
        size = (count, 2, shape.num_kv_heads, page, shape.head_dim)
        layers: list[Tensor] = []
        try:
            for _ in range(shape.num_layers):
                layers.append(torch.empty(size, dtype=shape.dtype, device=shape.device))
            return layers
        except torch.OutOfMemoryError as error:
            if count == fewest:
                raise RunFault(
                    f"{count} pages of the key-value cache do not fit the GPU's memory",
                    where="rollout.kv_cache_bytes",
                    why=str(error).partition(". ")[0],
                    fix="a smaller model, shorter responses, or a GPU that nothing else uses",
                ) from error
        layers.clear()
        torch.cuda.empty_cache()
        count = max(fewest, count * 3 // 4)


def settle(device: torch.device) -> None:
    """Give unused memory back, before what stays for the whole run (an optimizer's state) is put among it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
