"""Attention over packed samples as one operator, which a compiled layer calls like any other of torch's.

Owns: the operator ``meshloom::attend``, its gradient, and what it computes on CUDA: torch's flash attention. Refuses to know:
layouts. Always holds: samples come as tensors, so nothing about them is part of a compiled layer's code; keys and values
that several samples share are repeated inside, and saved for the backward pass once.

Without it each layer would be cut in pieces around attention, and the processor needs longer to launch the pieces of a small
model than a GPU to compute them.

Legend: C computed tokens, A tokens that attention sees, H query heads, K key-value heads, D width of a head, S samples.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshloom.train.attention_kernels import Bounds
from meshloom.train.gather import RowIndex


class Operands(NamedTuple):
    """What the operator needs to know of the samples of a pass, as tensors.

    Args:
        queries_S1, keys_S1: where each sample's queries and keys begin and the last one's end, int32 on the device.
        longest_2: tokens of the longest of each, int64, on the processor.
        source_A, copies_A, start_C1: the parts of the ``RowIndex`` that repeats keys and values; none: they are whole.
    """

    queries_S1: Tensor
    keys_S1: Tensor
    longest_2: Tensor
    source_A: Tensor | None = None
    copies_A: Tensor | None = None
    start_C1: Tensor | None = None

    @classmethod
    def of(cls, queries: Bounds, keys: Bounds, seen: RowIndex | None, device: torch.device) -> "Operands":
        """From bounds of samples, and which of the given keys and values each sample's are; none: they are whole."""
        repeat = () if seen is None else (seen.source_A, seen.copies_A, seen.start_C1)
        return cls(queries.on(device), keys.on(device), torch.tensor([queries.longest, keys.longest]), *repeat)


_ALL_BEFORE = -1
_WIDEST_HEAD = 256
_OPERANDS = """Tensor queries, Tensor keys, Tensor longest, Tensor? source, Tensor? copies, Tensor? start,
    float scale, int window"""
_library = torch.library.Library("meshloom", "FRAGMENT")
_library.define(f"attend(Tensor query, Tensor key, Tensor value, {_OPERANDS}) -> (Tensor, Tensor)")
_library.define(
    "attend_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_OPERANDS}) -> (Tensor, Tensor, Tensor)"
)


def attend(
    query_CHD: Tensor, key_CKD: Tensor, value_CKD: Tensor, given: Operands, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention of each sample's queries, its last tokens, over its keys. On CUDA in bfloat16 or float16.

    Args:
        query_CHD, key_CKD, value_CKD: of the computed tokens, end to end.
        given: which of them belong together.
        scale: of the scores.
        window: a token sees itself and window − 1 before it; none: all before it.

    Returns:
        The output, [C, H, D].
    """
    to = _ALL_BEFORE if window is None else window
    return torch.ops.meshloom.attend(query_CHD, key_CKD, value_CKD, *given, scale, to)[0]


def attend_packed(
    query_CHD: Tensor,
    key_CKD: Tensor,
    value_CKD: Tensor,
    queries: Bounds,
    keys: Bounds,
    seen: RowIndex | None,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """The same as a ``meshloom.train.attention_kernels.Kernel``."""
    given = Operands.of(queries, keys, seen, query_CHD.device)
    return attend(query_CHD, key_CKD, value_CKD, given, scale=scale, window=window)


def takes_head(width: int) -> bool:
    """Whether the operator computes heads of such a width."""
    return width % 8 == 0 and width <= _WIDEST_HEAD


def _forward(query, key, value, queries, keys, longest, source, copies, start, scale, window):
    key, value = _repeated(key, source), _repeated(value, source)
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(), key, value, queries, keys, *longest.tolist(), 0.0, window == _ALL_BEFORE, False,
        scale=scale, **_sides(window),
    )  # fmt: skip
    return out, logsumexp


def _backward(
    grad, query, key, value, out, logsumexp, queries, keys, longest, source, copies, start, scale, window
):  # fmt: skip
    # State of the random numbers of a dropout that is 0: read by the kernel, whatever it is, and not used.
    state, unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)
    key, value = _repeated(key, source), _repeated(value, source)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query.contiguous(), key, value, out, logsumexp, queries, keys, *longest.tolist(), 0.0,
        window == _ALL_BEFORE, state, unused, scale=scale, **_sides(window),
    )  # fmt: skip
    return grad_query, _added_up(grad_key, copies, start), _added_up(grad_value, copies, start)


def _sides(window: int) -> dict[str, int]:
    """Tokens seen before and after a token itself; −1 is no bound."""
    return {"window_size_left": -1 if window == _ALL_BEFORE else window - 1, "window_size_right": 0}


def _repeated(x_CKD: Tensor, source_A: Tensor | None) -> Tensor:
    if source_A is None:
        return x_CKD.contiguous()
    return x_CKD.flatten(1).index_select(0, source_A).unflatten(1, x_CKD.shape[1:])


def _added_up(grad_AKD: Tensor, copies_A: Tensor | None, start_C1: Tensor | None) -> Tensor:
    if copies_A is None or start_C1 is None:
        return grad_AKD
    from meshloom.train.gather_kernels import sum_copies

    return sum_copies(grad_AKD.flatten(1), copies_A, start_C1).unflatten(1, grad_AKD.shape[1:])


def _shapes(query, key, value, *_):
    tokens, heads, _ = query.shape
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        (heads, tokens), dtype=torch.float32
    )


def _gradient_shapes(grad, query, key, value, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.scale, ctx.window = scale, window
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, grad_logsumexp: None) -> tuple[Tensor | None, ...]:
    found = torch.ops.meshloom.attend_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*found, *(None for _ in Operands._fields), None, None)


_library.impl("attend", _forward, "CompositeExplicitAutograd")
_library.impl("attend_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("meshloom::attend", _shapes, lib=_library)
torch.library.register_fake("meshloom::attend_backward", _gradient_shapes, lib=_library)
torch.library.register_autograd("meshloom::attend", _differentiate, setup_context=_keep, lib=_library)
