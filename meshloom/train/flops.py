"""Arithmetic of training passes, and what a device could do at most.

Owns: the formula of MFU and the table of peaks. Refuses to know: seconds. Always holds: what is counted was computed for the
model's gradient; recompute, padding and shared prompts computed again would not count, and attention is counted apart.

A token costs 2 operations a parameter forward, 2 backward for the gradient of its input, and 2 for that of the parameter if it
is trained: 6, or 4 for a frozen one. N of the layers are all their parameters; N of the head is its matrix; the embedding is
looked up and costs nothing. Attention costs 12 · layers · query width a pair of tokens of which one sees the other (Chowdhery
et al. 2022, arXiv:2204.02311, appendix B, where both halves of the causal square count).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_TERA = 1e12
_PEAKS = {
    "H200 NVL": 836,
    "H200": 989,
    "H100 NVL": 836,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L4": 121,
    "A10": 125,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Dense bfloat16 with float32 sums, TFLOP/s by the vendor's data sheets. The first name found in the device's own counts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second that a device could do in a dtype's matrix products; none where that is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return known_peak(torch.cuda.get_device_name(device))


def known_peak(name: str) -> float | None:
    """The table's entry for a device's name, such as ``NVIDIA H100 80GB HBM3``."""
    words = f" {name.replace('-', ' ')} "
    return next((peak * _TERA for known, peak in _PEAKS.items() if f" {known} " in words), None)


@dataclass(frozen=True)
class Cost:
    """Operations of forward and backward.

    Args:
        per_token: of a token that the layers compute.
        per_prediction: of a token that the head predicts.
        per_pair: of two tokens that see each other in attention.
    """

    per_token: float
    per_prediction: float
    per_pair: float

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


@dataclass(frozen=True)
class Work:
    """What was computed, forward and backward.

    Args:
        tokens: that the layers computed; a shared prompt counts once.
        predictions: rows that met the head.
        pairs: tokens that see each other in attention, over samples.
    """

    tokens: int = 0
    predictions: int = 0
    pairs: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.predictions + other.predictions, self.pairs + other.pairs)

    def flops(self, cost: Cost) -> float:
        """Operations, attention left out."""
        return self.tokens * cost.per_token + self.predictions * cost.per_prediction

    def attention_flops(self, cost: Cost) -> float:
        """Operations of attention's scores and sums."""
        return self.pairs * cost.per_pair
