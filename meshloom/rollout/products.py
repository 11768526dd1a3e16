"""Which kernel does a matrix product of a decode step: the device's library, or our own where that was measured to be faster.

Owns: the table of what was measured, launches of our own products. Refuses to know: models, what is done with a product.
Always holds: what is not in the table is done by the library; the choice depends on the device and on shapes alone, and takes
no time.

Legend: T tokens, N columns of the output, K inner width, F width of the feed-forward layer, S pieces of K.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor
from triton import cdiv

from meshloom.rollout import product_kernels


class Kind(StrEnum):
    """What a product is followed by."""

    GATED = "gated"
    """The activation, in the same kernel. N is 2F."""
    PIECES = "pieces"
    """A kernel that adds up the pieces."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a kernel cuts a product up.

    Args:
        rows: of the output, a power of two.
        columns: of the output, a power of two; gates and ups are both counted.
        extra: columns beside those, a power of two or 0, for gated products.
        depth: of K at once, a power of two that divides K.
        pieces: of K, each summed up by a program of its own.
        warps: of a program.
        stages: blocks of K on their way at once.
    """

    rows: int
    columns: int
    extra: int = 0
    depth: int = 64
    pieces: int = 1
    warps: int = 8
    stages: int = 4


Shape = tuple[Kind, int, int]
"""Kind, N and K of a product."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is done by kernels of our own on a device.

    Args:
        tiles: of a product, each for so many rows down to just above half of them; for other numbers it is the library's.
    """

    tiles: Mapping[Shape, tuple[tuple[int, Tile], ...]] = field(default_factory=dict)

    def tile(self, kind: Kind, x_TK: Tensor, weight_NK: Tensor) -> Tile | None:
        """How to cut a product up; none: the library does it."""
        columns, inner = weight_NK.shape
        for most, tile in self.tiles.get((kind, columns, inner), ()):
            if most // 2 < len(x_TK) <= most:
                lies_close = x_TK.is_contiguous() and weight_NK.is_contiguous()
                return tile if lies_close and x_TK.dtype.itemsize == 2 and inner % tile.depth == 0 else None
        return None


MEASURED: Mapping[tuple[int, int], Choices] = {
    (9, 0): Choices(
        tiles={
            (Kind.PIECES, 1152, 896): (
                (64, Tile(rows=64, columns=64, pieces=5, warps=4, stages=6)),
                (128, Tile(rows=64, columns=128, pieces=5, warps=4)),
            ),
            (Kind.PIECES, 896, 896): (
                (64, Tile(rows=64, columns=64, pieces=5, warps=4, stages=6)),
                (128, Tile(rows=64, columns=128, pieces=5, warps=4)),
            ),
            (Kind.GATED, 9728, 896): (
                (64, Tile(rows=64, columns=64, extra=16, warps=4, stages=5)),
                (128, Tile(rows=128, columns=64, extra=16, warps=4)),
            ),
            (Kind.PIECES, 896, 4864): (
                (64, Tile(rows=64, columns=64, pieces=8, warps=4, stages=6)),
                (128, Tile(rows=128, columns=64, pieces=8, warps=4)),
            ),
            (Kind.PIECES, 2048, 1536): (
                (64, Tile(rows=64, columns=64, pieces=3, warps=4, stages=6)),
                (128, Tile(rows=128, columns=64, pieces=3, warps=4)),
            ),
            (Kind.PIECES, 1536, 1536): (
                (64, Tile(rows=64, columns=64, pieces=4, warps=4, stages=6)),
                (128, Tile(rows=64, columns=128, pieces=4, warps=4)),
            ),
            (Kind.GATED, 17920, 1536): (
                (64, Tile(rows=64, columns=128, extra=16, warps=4, stages=7)),
                (128, Tile(rows=128, columns=128, extra=16, stages=6)),
            ),
            (Kind.PIECES, 1536, 8960): ((64, Tile(rows=64, columns=64, pieces=5, warps=4, stages=6)),),
            (Kind.PIECES, 3584, 3584): ((64, Tile(rows=64, columns=64, pieces=2, warps=4, stages=6)),),
            (Kind.GATED, 37888, 3584): ((64, Tile(rows=64, columns=64, extra=16, warps=4, stages=5)),),
        }
    )
}
"""By compute capability: where ``bench/gpu_decode_parts.py`` has found our own to be faster."""


def choices_for(device: torch.device) -> Choices:
    """What was measured on such a device; nothing, where nothing was."""
    if device.type != "cuda":
        return Choices()
    return MEASURED.get(torch.cuda.get_device_capability(device), Choices())


def gated_product(x_TK: Tensor, weight_NK: Tensor, tile: Tile, *, is_gelu: bool) -> Tensor:
    """act(gate) × up, [T, F], of a weight [2F, K] with the gates first."""
    tokens, (columns, inner) = len(x_TK), weight_NK.shape
    out = torch.empty(tokens, columns // 2, dtype=x_TK.dtype, device=x_TK.device)
    programs = cdiv(tokens, tile.rows) * cdiv(columns, tile.columns + tile.extra)
    product_kernels.gated_product_kernel[(programs,)](
        x_TK, weight_NK, out, tokens, columns // 2, inner,
        GELU=is_gelu, ROWS=tile.rows, COLUMNS=tile.columns, EXTRA=tile.extra, BLOCK_K=tile.depth,
        PRECISION=_precision(x_TK), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def product_in_pieces(x_TK: Tensor, weight_NK: Tensor, tile: Tile) -> Tensor:
    """Pieces [S, T, N] in float32 whose sum is x weightᵀ; none is empty."""
    tokens, (columns, inner) = len(x_TK), weight_NK.shape
    blocks = inner // tile.depth
    steps = cdiv(blocks, tile.pieces)
    out = torch.empty(cdiv(blocks, steps), tokens, columns, dtype=torch.float32, device=x_TK.device)
    product_kernels.pieces_kernel[(cdiv(tokens, tile.rows) * cdiv(columns, tile.columns), len(out))](
        x_TK, weight_NK, out, tokens, columns, inner, steps,
        ROWS=tile.rows, COLUMNS=tile.columns, BLOCK_K=tile.depth, PRECISION=_precision(x_TK),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _precision(like: Tensor) -> str:
    return "ieee" if like.dtype == torch.float32 else "tf32"
