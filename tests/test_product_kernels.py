"""Matrix products of a decode step by kernels of our own: what plain torch computes, and what a step makes of it.

Without a GPU they run in Triton's interpreter, which ``conftest`` turns on. Its products of bfloat16 are of the bits, so here
float16 is what is rounded.
"""

import pytest
import torch
from torch.nn.functional import linear

from meshloom.rollout.decode_stack import DecodeStack
from meshloom.rollout.paged_ops import HeadNorms, HeadShape, NormKind, Pool, Rope, TorchOps
from meshloom.rollout.products import Choices, Kind, Tile, choices_for, gated_product, product_in_pieces
from meshloom.rollout.triton_ops import TritonOps
from tests.models import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE = Tile(rows=16, columns=32, extra=16, depth=32, pieces=3, warps=4, stages=2)


def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(DEVICE, dtype)


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("extra", [0, 16])
def test_a_gated_product(is_gelu, extra):
    """Neither the rows nor the columns fill the last tile."""
    x, weight = normal(19, 96), normal(2 * 50, 96)
    tile = Tile(rows=16, columns=32, extra=extra, depth=32, warps=4, stages=2)
    ours = gated_product(x, weight, tile, is_gelu=is_gelu)
    torch.testing.assert_close(ours, TorchOps().gated_product(x, weight, is_gelu), rtol=1e-4, atol=1e-4)


def test_a_gated_product_rounds_gates_and_ups_where_two_kernels_do():
    x, weight = normal(16, 64, dtype=torch.float16), normal(2 * 32, 64, dtype=torch.float16)
    ours = gated_product(x, weight, TILE, is_gelu=False)
    two = TritonOps(DEVICE).gated(linear(x.float(), weight.float()).half(), False)
    assert (ours == two).float().mean() > 0.99


@pytest.mark.parametrize("pieces", [1, 3, 5])
def test_a_product_in_pieces(pieces):
    """Seven blocks of the inner width: in five pieces of at most two blocks each, a fifth would be empty."""
    x, weight = normal(19, 224), normal(50, 224)
    tile = Tile(rows=16, columns=32, depth=32, pieces=pieces, warps=4, stages=2)
    ours = product_in_pieces(x, weight, tile)
    assert len(ours) == {1: 1, 3: 3, 5: 4}[pieces]
    torch.testing.assert_close(ours.sum(0), linear(x, weight), rtol=1e-4, atol=1e-4)


def test_norms_add_up_pieces_and_round_their_sum():
    x, y = normal(3, 5, 100), normal(2, 5, 100)
    residual, weight, kind = (
        normal(5, 100, dtype=torch.float16),
        normal(100, dtype=torch.float16),
        NormKind(1e-5, False),
    )
    x_whole, y_whole = (term.sum(0).half() for term in (x, y))
    ops, results = TritonOps(DEVICE), []
    for a, b in ((x, y), (x_whole, y_whole)):
        kept = residual.clone()
        normed, seen = ops.norm_of_sum(residual, a, weight, kind)
        results.append([normed, seen, ops.norm_of_kept_sum(kept, seen, b, weight, kind), kept])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    assert torch.equal(results[0][1], x_whole)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rotation_of_pieces(has_norms, has_bias):
    shape, tokens = HeadShape(7, 1, 64, 16), 3
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    pieces, bias = normal(3, tokens, width), normal(width) if has_bias else None
    rope = Rope(normal(9, 32), normal(8, 32)[:8])
    norms = HeadNorms(normal(64), normal(1, 64)[0], NormKind(1e-6, False)) if has_norms else None
    positions, places = torch.tensor([3, 7, 0], device=DEVICE), torch.tensor([17, -1, 0], device=DEVICE)
    whole = pieces.sum(0) if bias is None else pieces.sum(0) + bias
    results = []
    for qkv, its_bias in ((pieces, bias), (whole, None)):
        cells = [torch.zeros(2, 2, 1, 16, 64, device=DEVICE)]
        pool = Pool(cells, torch.tensor([cells[0].data_ptr()], device=DEVICE))
        out = TritonOps(DEVICE).rope_store(qkv, shape, rope, positions, places, pool, 0, norms, False, its_bias)
        results.append([out[:, : shape.num_heads * 64], cells[0]])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_was_not_measured_is_done_by_the_library():
    weight = normal(64, 96, dtype=torch.float16)
    choices = Choices(tiles={(Kind.PIECES, 64, 96): ((4, TILE), (32, TILE))})
    counts = (2, 3, 4, 16, 17, 32, 33)
    found = [choices.tile(Kind.PIECES, normal(count, 96, dtype=torch.float16), weight) for count in counts]
    assert found == [None, TILE, TILE, None, TILE, TILE, None]
    assert choices.tile(Kind.GATED, normal(3, 96, dtype=torch.float16), weight) is None
    assert choices.tile(Kind.PIECES, normal(3, 96), weight.float()) is None
    assert choices_for(torch.device("cpu")) == Choices()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_a_step_through_the_layers_is_the_same(family, monkeypatch):
    """All products by kernels of our own, where the family allows, against the library's."""
    model = tiny_model(family, torch.float16).to(DEVICE)
    sizes = {Kind.GATED: [(192, 64)], Kind.PIECES: [(128, 64), (64, 64), (64, 96)]}
    tiles = {(kind, *size): ((4, TILE),) for kind, some in sizes.items() for size in some}
    used: list[tuple[int, int]] = []
    tile = Choices.tile
    monkeypatch.setattr(Choices, "tile", lambda self, kind, x, w: used.append(tuple(w.shape)) or tile(self, kind, x, w))
    ids, places = torch.tensor([5, 9, 2], device=DEVICE), torch.tensor([0, 17, 35], device=DEVICE)
    results = []
    for choices in (Choices(tiles=tiles), Choices()):
        stack = DecodeStack(model, TritonOps(DEVICE, choices), 16)
        stack.bind(16)
        cells = [torch.zeros(3, 2, 2, 16, 16, dtype=torch.float16, device=DEVICE) for _ in range(3)]
        pool = Pool(cells, torch.tensor([cell.data_ptr() for cell in cells], device=DEVICE))
        with torch.no_grad():
            hidden = stack.hidden(
                ids, places % 16, places, pool, lambda layer, qkv: qkv[:, :64].clone(), keep_key=False
            )
        results.append([hidden, *cells])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()
    assert set(used) == {size for some in sizes.values() for size in some}
