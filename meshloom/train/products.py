"""Matrix products whose result is wider than their factors.

Owns: which of torch's calls makes one on a device. Always holds: no wide copy of a factor is made on a GPU, whose matrix
units add up in float32 in any case; the processor widens the factors, which gives the same sums, and the right one of
``wide_product`` in pieces.
"""

from functools import cache

import torch
from torch import Tensor

_PIECE_BYTES = 2**20
"""Of a factor widened at once, about what the cache of a core holds."""


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in float32, of narrower factors, of which the right one may be large."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    wide, out = left.float(), torch.empty(len(left), right.shape[1], dtype=torch.float32, device=left.device)
    columns = max(1, _PIECE_BYTES // (4 * right.shape[0]))
    for at in range(0, right.shape[1], columns):
        out[:, at : at + columns] = wide @ right[:, at : at + columns].float()
    return out


def put_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out = left @ right``, in the dtype of ``out``: that of the factors, or float32."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in the dtype of ``total``: that of the factors, or float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif not left.is_cuda:
        total += left.to(total.dtype) @ right.to(total.dtype)
    elif way_to_add(total.device, left.dtype) == "addmm":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif way_to_add(total.device, left.dtype) == "baddbmm":
        batch = total[None]
        torch.baddbmm(batch, left[None], right[None], out_dtype=total.dtype, out=batch)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


@cache
def way_to_add(device: torch.device, narrow: torch.dtype) -> str:
    """Which call adds a product of narrow factors to a float32 total where it lies: ``addmm``, ``baddbmm``, or ``add``, which
    makes the product apart first. It differs between versions of torch, so it is tried once on small matrices."""
    factor, total = torch.ones(16, 16, dtype=narrow, device=device), torch.ones(1, 16, 16, device=device)
    tries = {
        "addmm": lambda: torch.addmm(total[0], factor, factor, out_dtype=torch.float32, out=total[0]),
        "baddbmm": lambda: torch.baddbmm(total, factor[None], factor[None], out_dtype=torch.float32, out=total),
    }
    for name, add in tries.items():
        total.fill_(1.0)
        try:
            add()
        except RuntimeError:  # this version wants the total to be as narrow as the factors
            continue
        if bool((total == 17.0).all()):
            return name
    return "add"
