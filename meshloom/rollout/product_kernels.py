"""Triton kernels of the matrix products of a decode step, for the few rows that it has.

Owns: the arithmetic on the device. Refuses to know: models, which product is done by which kernel. Always holds: sums are in
float32; what was a matrix product's output before is rounded where it was.

A tile of the gated product is of any even number of columns that two powers of two add up to, so that the tiles are as many as
the processors of a device. Its columns alternate between gate and up, so that a thread has both of a pair.

Legend: M rows, N columns of the output, K inner width, F width of the feed-forward layer, S pieces of K.
"""

import triton
import triton.language as tl


@triton.jit
def activated(x, GELU: tl.constexpr):
    """SiLU, or GELU in its tanh form, of float32."""
    if GELU:
        # tanh(y) = 2 sigmoid(2 y) − 1
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        act = x * tl.sigmoid(2.0 * inner)
    else:
        act = x * tl.sigmoid(x)
    return act


@triton.jit
def _gated_rows(w_ptr, first, F, K, COLUMNS: tl.constexpr):
    """Where COLUMNS / 2 rows of the gates and as many of the ups begin, in turn."""
    col = tl.arange(0, COLUMNS)
    row = tl.minimum(first + col // 2, F - 1) + (col % 2) * F
    return w_ptr + row.to(tl.int64) * K


@triton.jit
def _store_gated(acc, out_ptr, row, first, M, F, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    kind: tl.constexpr = out_ptr.dtype.element_ty
    gate, up = tl.split(tl.reshape(acc, [ROWS, COLUMNS // 2, 2]))
    out = activated(gate.to(kind).to(tl.float32), GELU) * up.to(kind).to(tl.float32)
    col = first + tl.arange(0, COLUMNS // 2)
    to = out_ptr + row.to(tl.int64)[:, None] * F + col[None, :]
    tl.store(to, out.to(kind), mask=(row < M)[:, None] & (col < F)[None, :])


@triton.jit(do_not_specialize=["M"])  # one compilation for all numbers of rows
def gated_product_kernel(
    x_ptr, w_ptr, out_ptr, M, F, K,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXTRA: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of act(x gateᵀ) × (x upᵀ), of ``w`` [2F, K], gates first. COLUMNS and EXTRA count those of gates and ups.

    K is a multiple of BLOCK_K. Tiles of the same columns are neighbours, so their weights are read once.
    """
    num_rows = tl.cdiv(M, ROWS)
    row = (tl.program_id(0) % num_rows) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) // num_rows) * ((COLUMNS + EXTRA) // 2)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(row, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    w_at = _gated_rows(w_ptr, first, F, K, COLUMNS)[None, :] + k[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if EXTRA > 0:
        more_at = _gated_rows(w_ptr, first + COLUMNS // 2, F, K, EXTRA)[None, :] + k[:, None]
        more = tl.zeros([ROWS, EXTRA], tl.float32)
    for _ in range(0, K, BLOCK_K):
        x = tl.load(x_at)
        acc = tl.dot(x, tl.load(w_at), acc, input_precision=PRECISION)
        if EXTRA > 0:
            more = tl.dot(x, tl.load(more_at), more, input_precision=PRECISION)
            more_at += BLOCK_K
        x_at += BLOCK_K
        w_at += BLOCK_K
    _store_gated(acc, out_ptr, row, first, M, F, GELU, ROWS, COLUMNS)
    if EXTRA > 0:
        _store_gated(more, out_ptr, row, first + COLUMNS // 2, M, F, GELU, ROWS, EXTRA)


@triton.jit(do_not_specialize=["M", "steps"])
def pieces_kernel(
    x_ptr, w_ptr, out_ptr, M, N, K, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of one piece of x wᵀ, of ``w`` [N, K]: the sum over ``steps`` blocks of K. Output [S, M, N] in float32."""
    num_rows = tl.cdiv(M, ROWS)
    piece = tl.program_id(1)
    row = (tl.program_id(0) % num_rows) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) // num_rows) * COLUMNS + tl.arange(0, COLUMNS)
    k = piece * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(row, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    w_at = w_ptr + tl.minimum(col, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(tl.minimum(steps, K // BLOCK_K - piece * steps)):
        acc = tl.dot(tl.load(x_at), tl.load(w_at), acc, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K
    to = out_ptr + (piece * M + row).to(tl.int64)[:, None] * N + col[None, :]
    tl.store(to, acc, mask=(row < M)[:, None] & (col < N)[None, :])


@triton.jit
def sum_of_pieces(ptr, at, mask, stride, PIECES: tl.constexpr):
    """The sum of PIECES values in float32, each ``stride`` behind the one before."""
    total = tl.load(ptr + at, mask=mask, other=0.0)
    for piece in tl.static_range(1, PIECES):
        total += tl.load(ptr + piece * stride + at, mask=mask, other=0.0)
    return total
