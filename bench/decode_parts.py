"""The parts of a decode step's layer, and the ways to cut their products up that are worth a measurement.

Owns: shapes, inputs, which tiles are tried. Refuses to know: clocks, processes. Always holds: a part is what the engine's
``DecodeStack`` does at that place, down to the kernel behind the product; inputs are random.

Legend: T tokens (rows of a step), E hidden, N columns and K inner width of a product, H query heads, D their width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import linear

from meshloom.rollout.paged_ops import HeadShape, NormKind, Ops, Pool, Rope, Slots
from meshloom.rollout.products import Choices, Kind, Tile

PAGE = 64
PROCESSORS = 132
_COLD_BYTES = 256 * 2**20
_NORM = NormKind(1e-6, False)


class Part(StrEnum):
    QKV = "qkv + rotation"
    OUT = "output + norm"
    GATE_UP = "gate, up + act"
    DOWN = "down + norm"

    @property
    def kind(self) -> Kind:
        return Kind.GATED if self is Part.GATE_UP else Kind.PIECES


@dataclass(frozen=True)
class Size:
    """A model's shape."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def product(self, part: Part) -> tuple[int, int]:
        """N and K."""
        heads = self.heads * self.head_dim
        return {
            Part.QKV: (heads + 2 * self.kv_heads * self.head_dim, self.hidden),
            Part.OUT: (self.hidden, heads),
            Part.GATE_UP: (2 * self.inner, self.hidden),
            Part.DOWN: (self.hidden, self.inner),
        }[part]


SIZES = {
    "0.5b": Size(896, 4864, 24, 14, 2, 64, 151936),
    "1.5b": Size(1536, 8960, 28, 12, 2, 128, 151936),
    "7b": Size(3584, 18944, 28, 28, 4, 128, 152064),
    "tiny": Size(64, 128, 2, 4, 2, 16, 512),
}


class Layers:
    """Inputs of a step's parts.

    Args:
        size: of the model.
        rows: of the step.
        device: where.
        dtype: of weights and activations.
        copies: most weights of each product that differ; fewer where they fill no cache either.
    """

    def __init__(self, size: Size, rows: int, device: torch.device, dtype: torch.dtype, copies: int) -> None:
        self.size, self.rows = size, rows
        self.shape = HeadShape(size.heads, size.kv_heads, size.head_dim, PAGE)
        random = torch.Generator(device).manual_seed(0)

        def normal(*wanted: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*wanted, generator=random, device=device, dtype=dtype).mul_(scale)

        self.weights: dict[Part, list[Tensor]] = {}
        for part in Part:
            columns, inner = size.product(part)
            count = max(1, min(copies, -(-_COLD_BYTES // (columns * inner * dtype.itemsize))))
            self.weights[part] = [normal(columns, inner, scale=inner**-0.5) for _ in range(count)]
        self.bias = normal(size.product(Part.QKV)[0])
        self.norm = 1 + normal(size.hidden, scale=0.1)
        self.x_TE, self.residual_TE, self.seen_TE = (normal(rows, size.hidden) for _ in range(3))
        self.heads, self.gated = normal(rows, size.heads * size.head_dim), normal(rows, size.inner)
        half = size.head_dim // 2
        self.rope = Rope(normal(4 * PAGE, half), normal(4 * PAGE, half))
        self.positions = torch.randint(4 * PAGE, (rows,), generator=random, device=device)
        self.places = torch.arange(rows, device=device)
        cells = torch.zeros(-(-rows // PAGE), 2, size.kv_heads, PAGE, size.head_dim, device=device, dtype=dtype)
        self.pool = Pool([cells], torch.tensor([cells.data_ptr()], device=device))

    def run(self, ops: Ops, part: Part, number: int) -> Tensor:
        """A part with its own inputs; what it gives."""
        weight = self.weights[part][number % len(self.weights[part])]
        if part is Part.QKV:
            return self._qkv(ops, self.x_TE, weight)
        if part is Part.OUT:
            return ops.norm_of_sum(self.residual_TE, _term(ops, self.heads, weight), self.norm, _NORM)[0]
        if part is Part.GATE_UP:
            return ops.gated_product(self.x_TE, weight, False)
        return ops.norm_of_kept_sum(self.residual_TE, self.seen_TE, _term(ops, self.gated, weight), self.norm, _NORM)

    def run_all(self, ops: Ops, layers: int) -> Tensor:
        """All parts of so many layers, one on the other but for the attention, whose output is always the same."""
        residual, x = self.residual_TE.clone(), self.x_TE
        for number in range(layers):
            qkv, out, gate_up, down = (some[number % len(some)] for some in self.weights.values())
            self._qkv(ops, x, qkv)
            x, seen = ops.norm_of_sum(residual, _term(ops, self.heads, out), self.norm, _NORM)
            x = _term(ops, ops.gated_product(x, gate_up, False), down)
            x = ops.norm_of_kept_sum(residual, seen, x, self.norm, _NORM)
        return x

    def _qkv(self, ops: Ops, x_TE: Tensor, weight: Tensor) -> Tensor:
        found = ops.pieces(x_TE, weight)
        qkv, bias = (linear(x_TE, weight, self.bias), None) if found is None else (found, self.bias)
        qkv = ops.rope_store(qkv, self.shape, self.rope, self.positions, self.places, self.pool, 0, None, False, bias)
        return qkv[:, : self.size.heads * self.size.head_dim]

    def in_float32(self) -> "Layers":
        """The same numbers of one layer, for a reference."""
        wide = object.__new__(Layers)
        for name, value in vars(self).items():
            setattr(wide, name, value.float() if isinstance(value, Tensor) and value.is_floating_point() else value)
        wide.weights = {part: [some[0].float()] for part, some in self.weights.items()}
        wide.rope = Rope(self.rope.cos.float(), self.rope.sin.float())
        cells = self.pool.layers[0].float()
        wide.pool = Pool([cells], torch.tensor([cells.data_ptr()], device=cells.device))
        return wide


def _term(ops: Ops, x: Tensor, weight: Tensor) -> Tensor:
    found = ops.pieces(x, weight)
    return linear(x, weight) if found is None else found


class PastTokens:
    """Inputs of attention: sequences of equal length over pages of a few layers.

    Args:
        size: of the model.
        rows: sequences.
        seen: tokens of each.
        layers: whose pages differ.
        device: where.
    """

    def __init__(self, size: Size, rows: int, seen: int, layers: int, device: torch.device) -> None:
        self.shape = HeadShape(size.heads, size.kv_heads, size.head_dim, PAGE)
        pages = -(-seen // PAGE)
        wide = (rows * pages, 2, size.kv_heads, PAGE, size.head_dim)
        cells = [torch.randn(wide, device=device, dtype=torch.bfloat16) for _ in range(layers)]
        self._pool = Pool(cells, torch.tensor([cell.data_ptr() for cell in cells], device=device))
        self._qkv = torch.randn(rows, size.product(Part.QKV)[0], device=device, dtype=torch.bfloat16)
        none = torch.zeros(1, device=device)
        self._slots = Slots(
            state=none,
            numbers=none,
            table=torch.randperm(rows * pages, device=device).view(rows, pages).int(),
            seen=torch.full((rows,), seen, device=device),
            places=none,
            stops=none,
            ids=none,
            logprobs=none,
        )

    def run(self, ops: Ops, layer: int) -> Tensor:
        scale, number = self.shape.head_dim**-0.5, layer % len(self._pool.layers)
        return ops.attend(self._qkv, self.shape, self._slots, self._pool, number, scale, None)


_GATED = {
    16: [
        (Tile(rows=16, columns=64, depth=128, warps=4, stages=4), 3),
        (Tile(rows=16, columns=128, depth=128, warps=4, stages=4), 2),
        (Tile(rows=16, columns=128, extra=16, depth=64, warps=4, stages=6), 2),
        (Tile(rows=16, columns=32, depth=256, warps=4, stages=4), 3),
    ],
    32: [
        (Tile(rows=32, columns=64, depth=128, warps=4, stages=4), 2),
        (Tile(rows=32, columns=128, depth=128, warps=4, stages=4), 1),
        (Tile(rows=32, columns=128, extra=16, depth=64, warps=4, stages=6), 2),
        (Tile(rows=32, columns=64, extra=16, depth=64, warps=4, stages=6), 3),
    ],
    64: [
        (Tile(rows=64, columns=128, extra=16, warps=4, stages=7), 1),
        (Tile(rows=64, columns=64, extra=16, warps=4, stages=5), 2),
        (Tile(rows=64, columns=128, extra=0, warps=4, stages=4), 2),
    ],
    128: [
        (Tile(rows=128, columns=128, extra=16, warps=8, stages=6), 1),
        (Tile(rows=128, columns=256, extra=32, warps=8, stages=4), 1),
        (Tile(rows=128, columns=64, extra=16, warps=4, stages=4), 2),
        (Tile(rows=128, columns=128, extra=32, warps=8, stages=5), 1),
    ],
    256: [
        (Tile(rows=128, columns=256, extra=32, warps=8, stages=4), 1),
        (Tile(rows=256, columns=128, extra=16, warps=8, stages=4), 1),
        (Tile(rows=128, columns=128, extra=16, warps=4, stages=3), 2),
        (Tile(rows=128, columns=128, extra=32, warps=8, stages=5), 1),
        (Tile(rows=256, columns=64, extra=16, warps=8, stages=4), 1),
        (Tile(rows=256, columns=128, extra=32, warps=8, stages=4), 1),
    ],
}
_PIECES = {
    16: [
        (Tile(rows=16, columns=64, depth=128, warps=4, stages=4), 3),
        (Tile(rows=16, columns=32, depth=128, warps=4, stages=5), 4),
        (Tile(rows=16, columns=64, depth=64, warps=4, stages=6), 3),
        (Tile(rows=16, columns=128, depth=64, warps=4, stages=5), 2),
    ],
    32: [
        (Tile(rows=32, columns=64, depth=128, warps=4, stages=4), 2),
        (Tile(rows=32, columns=64, depth=64, warps=4, stages=6), 3),
        (Tile(rows=32, columns=32, depth=128, warps=4, stages=5), 3),
        (Tile(rows=32, columns=128, depth=64, warps=4, stages=5), 2),
    ],
    64: [
        (Tile(rows=64, columns=128, warps=4, stages=4), 2),
        (Tile(rows=64, columns=256, warps=8, stages=5), 1),
        (Tile(rows=64, columns=64, warps=4, stages=6), 2),
    ],
    128: [
        (Tile(rows=128, columns=128, warps=8, stages=6), 1),
        (Tile(rows=128, columns=128, warps=4, stages=3), 2),
        (Tile(rows=128, columns=64, warps=4, stages=4), 2),
        (Tile(rows=64, columns=128, warps=4, stages=4), 2),
    ],
    256: [
        (Tile(rows=128, columns=128, warps=8, stages=6), 1),
        (Tile(rows=256, columns=128, warps=8, stages=4), 1),
        (Tile(rows=128, columns=128, warps=4, stages=3), 2),
        (Tile(rows=128, columns=256, warps=8, stages=4), 1),
        (Tile(rows=64, columns=128, warps=4, stages=4), 2),
    ],
}
"""Tiles for up to so many rows, each with how many of its programs run at once on a processor."""

TINY_TILES = {
    Kind.GATED: [Tile(rows=16, columns=32, extra=16, depth=32, warps=4, stages=2)],
    Kind.PIECES: [Tile(rows=16, columns=32, depth=32, pieces=2, warps=4, stages=2)],
}


_PIECE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 11, 16)
_BYTES_PER_CLOCK, _OWN_BYTES_PER_CLOCK = 4000.0, 40.0
_OPERATIONS_PER_CLOCK, _CLOCKS_TO_START = 3000.0, 2500.0


def tiles_for(size: Size, part: Part, rows: int, most: int = 5) -> list[Tile]:
    """What is worth trying: what a rough model says is fastest, at most two counts of pieces for each tile."""
    columns, inner = size.product(part)
    table = _GATED if part.kind is Kind.GATED else _PIECES
    found: list[tuple[float, Tile]] = []
    for tile, at_once in table[min(max(16, 1 << (rows - 1).bit_length()), 256)]:
        if inner % tile.depth:
            continue
        counts = (1,) if part.kind is Kind.GATED else _PIECE_COUNTS
        some = [replace(tile, pieces=pieces) for pieces in counts if pieces <= inner // tile.depth // 2]
        clocks = [(_clocks(one, at_once, rows, columns, inner), one) for one in some]
        found += sorted(clocks, key=lambda pair: pair[0])[:2]
    return [tile for _, tile in sorted(found, key=lambda pair: pair[0])[:most]]


def _clocks(tile: Tile, at_once: int, rows: int, columns: int, inner: int) -> float:
    """Clocks of a Hopper: the busiest processor, or all reads from the second cache; then the way of the pieces."""
    width = tile.columns + tile.extra
    steps = -(-(inner // tile.depth) // tile.pieces)
    programs = -(-rows // tile.rows) * -(-columns // width) * tile.pieces
    step_bytes = (tile.rows + width) * tile.depth * 2
    step = max(step_bytes / _OWN_BYTES_PER_CLOCK, 2 * tile.rows * width * tile.depth / _OPERATIONS_PER_CLOCK)
    turns = -(-programs // PROCESSORS)
    busiest = turns * steps * step + -(-turns // at_once) * _CLOCKS_TO_START
    pieces_bytes = 8 * tile.pieces * rows * columns if tile.extra == 0 else 0
    return max(busiest, programs * steps * step_bytes / _BYTES_PER_CLOCK) + pieces_bytes / _BYTES_PER_CLOCK


def choices_of(size: Size, rows: int, tiles: Mapping[Part, Tile]) -> Choices:
    """Products of some parts done with tiles."""
    return Choices(tiles={(part.kind, *size.product(part)): ((rows, tile),) for part, tile in tiles.items()})
