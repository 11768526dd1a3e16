"""Attention kernels that take samples end to end in one call: what they are given, and the flash-attn package's.

Owns: bounds of samples, how flash-attn is called in each supported version. Refuses to know: layouts, which kernel a run uses,
torch's own kernel (``attention_op``). Always holds: queries are the last tokens of their samples, aligned at the sample's end;
grouped key-value heads go in as they are wherever the kernel takes them.

Legend: H query heads, K key-value heads, T query tokens, U key tokens, S samples, D width of a head.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from meshloom.train.gather import RowIndex, take_rows


class Bounds:
    """Where samples that stand end to end begin and end.

    Args:
        lengths: tokens of each sample, in their order.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.longest = max(lengths, default=0)
        self._cumulative = list(accumulate(lengths, initial=0))
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Cumulative lengths, int32 [S + 1]; copied to the device once, without waiting for it."""
        if device not in self._on:
            bounds_S1 = torch.tensor(self._cumulative, dtype=torch.int32)
            if device.type == "cuda":
                bounds_S1 = bounds_S1.pin_memory().to(device, non_blocking=True)
            self._on[device] = bounds_S1
        return self._on[device]


class Kernel(Protocol):
    """Causal attention over samples end to end."""

    def __call__(
        self,
        query_THD: Tensor,
        key_UKD: Tensor,
        value_UKD: Tensor,
        queries: Bounds,
        keys: Bounds,
        seen: RowIndex | None,
        /,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attention output [T, H, D].

        Args:
            query_THD, key_UKD, value_UKD: of all samples, end to end.
            queries, keys: of each sample.
            seen: which of the given keys and values each sample's are; none: they are whole.
            scale: of the scores.
            window: a token sees itself and window − 1 before it; none: all before it.
        """
        ...


@cache
def flash_attn_kernel() -> Kernel | None:
    """The flash-attn package's kernel (github.com/Dao-AILab/flash-attention); none if it cannot be imported."""
    function = _flash_attn_function()
    if function is None:
        return None

    def attend(query_THD, key_UKD, value_UKD, queries, keys, seen, *, scale, window):
        device = query_THD.device
        if seen is not None:
            key_UKD, value_UKD = take_rows(key_UKD, seen), take_rows(value_UKD, seen)
        return function(
            query_THD,
            key_UKD,
            value_UKD,
            queries.on(device),
            keys.on(device),
            queries.longest,
            keys.longest,
            softmax_scale=scale,
            causal=True,
            window_size=_sides(window),
        )

    return attend


def _flash_attn_function() -> Callable[..., Any] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:  # not there, or built for another torch
        return None
    return flash_attn_varlen_func


def _sides(window: int | None) -> tuple[int, int]:
    """Tokens seen before and after a token itself; −1 is no bound."""
    return (-1, 0) if window is None else (window - 1, 0)
