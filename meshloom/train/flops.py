"""Arithmetic of training passes of a model that is there, and what its device could do at most.

Owns: reading a model's costs off its modules. Refuses to know: seconds; the formula itself is ``plan.arithmetic``'s, the
table of devices ``plan.hardware``'s. Always holds: what is counted was computed for the model's gradient.
"""

import torch
from torch import Tensor, nn

from meshloom.plan.arithmetic import Cost as PassCost
from meshloom.plan.arithmetic import Work
from meshloom.plan.hardware import known_peak

__all__ = ["Cost", "Work", "known_peak", "peak_flops"]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second that a device could do in a dtype's matrix products; none where that is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return known_peak(torch.cuda.get_device_name(device))


class Cost(PassCost):
    """Operations of forward and backward."""

    @classmethod
    def of(cls, decoder: nn.Module, head_weight: Tensor, *, layers: int, query_width: int) -> "Cost | None":
        """Of a model as it stands; none for a mixture of experts, where a token meets a part of the parameters.

        Args:
            decoder: the stack of layers, adapters in it or not.
            head_weight: the output head's matrix.
            layers: number of layers.
            query_width: heads × width of a head.
        """
        tables = {id(m.weight) for m in decoder.modules() if isinstance(m, nn.Embedding)}
        of_layers = [p for p in decoder.parameters() if id(p) not in tables]
        if any(p.ndim > 2 for p in of_layers):
            return None
        return cls(
            per_token=float(sum(p.numel() * (6 if p.requires_grad else 4) for p in of_layers)),
            per_prediction=float(head_weight.numel() * (6 if head_weight.requires_grad else 4)),
            per_pair=12.0 * layers * query_width,
        )
