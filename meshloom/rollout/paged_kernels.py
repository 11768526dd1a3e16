"""Triton kernels of a decode step: norms, rotary embedding with the write to the cache, attention over pages, activation.

Owns: the arithmetic on the device. Refuses to know: models, scheduling. Always holds: no kernel waits for the host or
reads a size from it, so all can be captured in a graph; sums are in float32.

The cache of one layer is [pages, 2, K, P, D], keys before values; kernels get its address from a table on the device, so
a captured graph survives a cache that moved.

Legend: T tokens, H query heads, K key-value heads, G queries per key-value head, P tokens of a page, D width of a
head, E hidden width, F width of the feed-forward layer.
"""

import triton
import triton.language as tl

from meshloom.rollout.product_kernels import activated, sum_of_pieces

_LOG2E = 1.4426950408889634


@triton.jit
def _layer_of(pool_ptr, layer, kind: tl.constexpr):
    """Address of a layer's pages. Without the hint, loads from an address that was itself loaded are of one value each."""
    return tl.multiple_of(tl.load(pool_ptr + layer).to(tl.pointer_type(kind)), 16)


@triton.jit
def _normed(wide, weight_ptr, col, inside, eps, E, GEMMA: tl.constexpr):
    """The root-mean-square norm of a row in float32, not rounded."""
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if GEMMA:
        weight += 1.0
    return wide * tl.rsqrt(tl.sum(wide * wide, 0) / E + eps) * weight


@triton.jit
def sum_rms_norm_kernel(
    x_ptr, y_ptr, residual_ptr, weight_ptr, x_norm_ptr, y_norm_ptr, out_ptr, rounded_ptr, eps, E, stride,
    NUM: tl.constexpr, X_NORM: tl.constexpr, Y_NORM: tl.constexpr, KEEP: tl.constexpr, GEMMA: tl.constexpr,
    BLOCK: tl.constexpr, X_PIECES: tl.constexpr, Y_PIECES: tl.constexpr,
):  # fmt: skip
    """A row: the root-mean-square norm of ``residual``, plus ``x`` (NUM 1), plus ``y`` (NUM 2).

    With X_NORM and Y_NORM the norms of ``x`` and ``y`` are added instead, before they are rounded. With KEEP the sum is
    rounded, becomes ``residual``, and its norm is taken; without, the norm is that of the sum before rounding. So it is in a
    compiled layer of the trainer, where only what leaves the layer is rounded.

    X_PIECES and Y_PIECES: how many pieces in float32, each ``stride`` numbers, ``x`` and ``y`` are the rounded sums of; 0 if
    they are tensors like the residual. The rounded sum of the pieces of ``x`` goes to ``rounded``.
    """
    start = tl.program_id(0).to(tl.int64) * E
    col = tl.arange(0, BLOCK)
    inside = col < E
    residual = tl.load(residual_ptr + start + col, mask=inside, other=0.0)
    wide = residual.to(tl.float32)
    if X_PIECES > 0:
        x = sum_of_pieces(x_ptr, start + col, inside, stride, X_PIECES).to(residual.dtype)
        tl.store(rounded_ptr + start + col, x, mask=inside)
    elif NUM > 0:
        x = tl.load(x_ptr + start + col, mask=inside, other=0.0)
    if X_NORM:
        wide += _normed(x.to(tl.float32), x_norm_ptr, col, inside, eps, E, GEMMA)
    elif NUM > 0:
        wide += x.to(tl.float32)
    if Y_PIECES > 0:
        y = sum_of_pieces(y_ptr, start + col, inside, stride, Y_PIECES).to(residual.dtype)
    elif NUM > 1:
        y = tl.load(y_ptr + start + col, mask=inside, other=0.0)
    if Y_NORM:
        wide += _normed(y.to(tl.float32), y_norm_ptr, col, inside, eps, E, GEMMA)
    elif NUM > 1:
        wide += y.to(tl.float32)
    if KEEP:
        kept = wide.to(residual.dtype)
        tl.store(residual_ptr + start + col, kept, mask=inside)
        wide = kept.to(tl.float32)
    normed = _normed(wide, weight_ptr, col, inside, eps, E, GEMMA)
    tl.store(out_ptr + start + col, normed.to(residual.dtype), mask=inside)


@triton.jit(do_not_specialize=["layer"])  # one compilation for all layers
def rope_store_kernel(
    qkv_ptr, pieces_ptr, bias_ptr, cos_ptr, sin_ptr, position_ptr, place_ptr, pool_ptr, q_norm_ptr, k_norm_ptr,
    eps, layer, stride,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    NORM: tl.constexpr, GEMMA: tl.constexpr, KEEP_KEY: tl.constexpr,
    PIECES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One token: norm (with NORM) and rotate its queries in place, write its keys and values into the cache.

    ``place`` is the token's page × P + its place there, negative for a token that is not kept. Rotated keys also go back
    to where they came from with KEEP_KEY. HEADS is H + 2K rounded up to a power of two. With PIECES, ``qkv`` is only written
    to: its values before are the rounded sums of so many pieces in float32, each ``stride`` numbers, and with BIAS a bias.
    """
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, half)[None, :]
    kind: tl.constexpr = qkv_ptr.dtype.element_ty
    place_in = token * ((H + 2 * K) * D) + head * D + lane
    at = qkv_ptr + place_in
    there = head < H + 2 * K
    if PIECES > 0:
        low = sum_of_pieces(pieces_ptr, place_in, there, stride, PIECES)
        high = sum_of_pieces(pieces_ptr, place_in + half, there, stride, PIECES)
        if BIAS:
            low += tl.load(bias_ptr + head * D + lane, mask=there, other=0.0).to(tl.float32)
            high += tl.load(bias_ptr + head * D + half + lane, mask=there, other=0.0).to(tl.float32)
        low, high = low.to(kind), high.to(kind)
    else:
        low = tl.load(at, mask=there, other=0.0)
        high = tl.load(at + half, mask=there, other=0.0)
    low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        square = tl.sum(low_wide * low_wide, 1) + tl.sum(high_wide * high_wide, 1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        low_weight = tl.where(head < H, tl.load(q_norm_ptr + lane), tl.load(k_norm_ptr + lane)).to(tl.float32)
        high_weight = tl.where(head < H, tl.load(q_norm_ptr + half + lane), tl.load(k_norm_ptr + half + lane))
        high_weight = high_weight.to(tl.float32)
        if GEMMA:
            low_weight += 1.0
            high_weight += 1.0
        low_wide = low_wide * scale * low_weight
        high_wide = high_wide * scale * high_weight
    position = tl.load(position_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + lane).to(tl.float32)
    sin = tl.load(sin_ptr + position * half + lane).to(tl.float32)
    turns = head < H + K
    low = tl.where(turns, (low_wide * cos - high_wide * sin).to(kind), low)
    high = tl.where(turns, (high_wide * cos + low_wide * sin).to(kind), high)
    back = turns if KEEP_KEY else head < H
    tl.store(at, low, mask=back)
    tl.store(at + half, high, mask=back)
    place = tl.load(place_ptr + token)
    if place >= 0:
        # Key heads come first, then value heads, in the projection as in a page.
        pool = _layer_of(pool_ptr, layer, qkv_ptr.dtype.element_ty)
        to = pool + ((place // P) * (2 * K) + (head - H)) * (P * D) + (place % P) * D + lane
        tl.store(to, low, mask=(head >= H) & there)
        tl.store(to + half, high, mask=(head >= H) & there)


@triton.jit
def _put_attention(
    out_ptr, partial_ptr, stat_ptr, head, split, g, d, highest, total, acc,
    G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The output of some heads, or what ``combine_kernel`` makes it from where there are several splits."""
    if SPLITS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        to = out_ptr + head[:, None] * D + d[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None])
    else:
        cell = head * SPLITS + split
        tl.store(partial_ptr + cell[:, None] * D + d[None, :], acc, mask=(g < G)[:, None])
        tl.store(stat_ptr + cell * 2, highest, mask=g < G)
        tl.store(stat_ptr + cell * 2 + 1, total, mask=g < G)


@triton.jit(do_not_specialize=["layer"])  # one compilation for all layers
def decode_attention_kernel(
    qkv_ptr, out_ptr, partial_ptr, stat_ptr, pool_ptr, table_ptr, seen_ptr,
    scale, layer, table_stride, window,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, one key-value head, one split of its pages: attention of the G queries of its newest token.

    ``seen`` is how many tokens the sequence has, the newest included; 0 for a row that is not in use, whose output is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seen = tl.load(seen_ptr + row).to(tl.int32)
    start = 0
    if WINDOW:
        start = tl.maximum(seen - window, 0)
    first = start // P
    last = (seen + P - 1) // P
    per_split = (last - first + SPLITS - 1) // SPLITS
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, last)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    tok = tl.arange(0, P)
    q_at = qkv_ptr + (row * (H + 2 * K) + kv_head * G) * D
    q = tl.load(q_at + g[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
    pool = _layer_of(pool_ptr, layer, qkv_ptr.dtype.element_ty)
    highest = tl.full([GP], -float("inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    for i in range(begin, end):
        page = tl.load(table_ptr + row * table_stride + i).to(tl.int64)
        cells = pool + (page * (2 * K) + kv_head) * (P * D)
        position = i * P + tok
        valid = position < seen
        key = tl.load(cells + tok[None, :] * D + d[:, None], mask=valid[None, :], other=0.0)
        if WINDOW:
            valid = valid & (position >= start)
        score = tl.dot(q, key, input_precision=PRECISION) * scale
        score = tl.where(valid[None, :], score, -float("inf"))
        top = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - top[:, None])
        shrink = tl.exp2(highest - top)
        # What the mask hides may be uninitialised, and zero times NaN is NaN.
        value = tl.load(cells + K * P * D + tok[:, None] * D + d[None, :], mask=(position < seen)[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, 1)
        highest = top
    _put_attention(
        out_ptr, partial_ptr, stat_ptr, row * H + kv_head * G + g, split, g, d, highest, total, acc, G, D, SPLITS
    )


@triton.jit
def combine_kernel(partial_ptr, stat_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr):
    """One query head: the attention output from that of its splits."""
    head = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    highest = tl.load(stat_ptr + (head * SPLITS + s) * 2)
    total = tl.load(stat_ptr + (head * SPLITS + s) * 2 + 1)
    top = tl.max(highest, 0)
    weight = tl.where(total > 0, tl.exp2(highest - tl.where(top == -float("inf"), 0.0, top)), 0.0)
    acc = tl.load(partial_ptr + (head * SPLITS + s)[:, None] * D + d[None, :])
    whole = tl.sum(weight * total, 0)
    out = tl.sum(acc * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out_ptr + head * D + d, out.to(out_ptr.dtype.element_ty))


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, F, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Part of a row: act(gate) × up."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    gate = tl.load(gate_up_ptr + row * (2 * F) + col, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * (2 * F) + F + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * F + col, (activated(gate.to(tl.float32), GELU) * up).to(gate.dtype), mask=inside)
