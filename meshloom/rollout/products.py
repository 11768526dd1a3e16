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
        ahead: blocks of K whose weights are called for while the kernel before still runs, where kernels overlap.
    """

    rows: int
    columns: int
    extra: int = 0
    depth: int = 64
    pieces: int = 1
    warps: int = 8
    stages: int = 4
    ahead: int = 0


Shape = tuple[Kind, int, int]
"""Kind, N and K of a product."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """How attention over pages is launched.

    Args:
        warps: of a program.
        tokens: of a page that are read at once, a power of two of at least 16; a whole page if it has no more.
        stages: of Triton's pipeline, if shared memory holds so many blocks. Where a block is depends on the table of pages,
            so that of s stages (s − 1) / 2 blocks are on their way.
        fills: programs for each processor of the device that are wanted at least.
        skips: whether what is not there of a last block is left unread.
    """

    warps: int = 4
    tokens: int = 1024
    stages: int = 3
    fills: int = 3
    skips: bool = False


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is done by kernels of our own on a device.

    Args:
        tiles: of a product, each for so many rows down to just above half of them; for other numbers it is the library's.
        overlaps: whether a kernel is launched while the one before still runs, and waits on the device.
        attention: how it is launched.
    """

    tiles: Mapping[Shape, tuple[tuple[int, Tile], ...]] = field(default_factory=dict)
    overlaps: bool = False
    attention: Attention = Attention()

    def tile(self, kind: Kind, x_TK: Tensor, weight_NK: Tensor) -> Tile | None:
        """How to cut a product up; none: the library does it."""
        columns, inner = weight_NK.shape
        for most, tile in self.tiles.get((kind, columns, inner), ()):
            if most // 2 < len(x_TK) <= most:
                lies_close = x_TK.is_contiguous() and weight_NK.is_contiguous()
                return tile if lies_close and x_TK.dtype.itemsize == 2 and inner % tile.depth == 0 else None
        return None


MEASURED: Mapping[tuple[int, int], Choices] = {}
"""By compute capability: where ``bench/gpu_decode_parts.py`` has found our own to be faster."""


def choices_for(device: torch.device) -> Choices:
    """What was measured on such a device; nothing, where nothing was."""
    if device.type != "cuda":
        return Choices()
    return MEASURED.get(torch.cuda.get_device_capability(device), Choices())


def launch_options(overlaps: bool) -> dict[str, bool]:
    """Options of the launch of a kernel that begins with ``after_previous``."""
    return {"launch_pdl": True} if overlaps else {}


def gated_product(x_TK: Tensor, weight_NK: Tensor, tile: Tile, *, is_gelu: bool, overlaps: bool) -> Tensor:
    """act(gate) × up, [T, F], of a weight [2F, K] with the gates first."""
    tokens, (columns, inner) = len(x_TK), weight_NK.shape
    out = torch.empty(tokens, columns // 2, dtype=x_TK.dtype, device=x_TK.device)
    programs = cdiv(tokens, tile.rows) * cdiv(columns, tile.columns + tile.extra)
    product_kernels.gated_product_kernel[(programs,)](
        x_TK, weight_NK, out, tokens, columns // 2, inner,
        GELU=is_gelu, ROWS=tile.rows, COLUMNS=tile.columns, EXTRA=tile.extra, BLOCK_K=tile.depth,
        AHEAD=min(tile.ahead, inner // tile.depth),
        PRECISION=_precision(x_TK), OVERLAP=overlaps, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(overlaps),
    )  # fmt: skip
    return out


def product_in_pieces(x_TK: Tensor, weight_NK: Tensor, tile: Tile, *, overlaps: bool) -> Tensor:
    """Pieces [S, T, N] in float32 whose sum is x weightᵀ; none is empty."""
    tokens, (columns, inner) = len(x_TK), weight_NK.shape
    blocks = inner // tile.depth
    steps = cdiv(blocks, tile.pieces)
    out = torch.empty(cdiv(blocks, steps), tokens, columns, dtype=torch.float32, device=x_TK.device)
    product_kernels.pieces_kernel[(cdiv(tokens, tile.rows) * cdiv(columns, tile.columns), len(out))](
        x_TK, weight_NK, out, tokens, columns, inner, steps,
        ROWS=tile.rows, COLUMNS=tile.columns, BLOCK_K=tile.depth,
        AHEAD=min(tile.ahead, blocks - steps * (len(out) - 1)),
        PRECISION=_precision(x_TK), OVERLAP=overlaps, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(overlaps),
    )  # fmt: skip
    return out


def _precision(like: Tensor) -> str:
    return "ieee" if like.dtype == torch.float32 else "tf32"
