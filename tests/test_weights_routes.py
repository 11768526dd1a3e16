"""Boxes and schedules: every value reaches everyone who needs it once, in bounded buckets, from senders that take turns."""

import random
from itertools import pairwise

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshloom.config.errors import RunFault
from meshloom.weights.layouts import Axis, Box, Grid, box_at, boxes, cuts_of
from meshloom.weights.routes import Schedule, TensorLayout, make_schedule

SHAPES = [(7, 5), (16, 6), (1, 9), (3,), (50, 4), (), (5, 2, 3)]


def random_box(generator: random.Random, shape: tuple[int, ...]) -> Box:
    edges = [sorted(generator.randint(0, size) for _ in range(2)) for size in shape]
    return Box(tuple(low for low, _ in edges), tuple(high for _, high in edges))


def filled(shape: tuple[int, ...], parts: list[Box]) -> torch.Tensor:
    """How often each value is in the parts."""
    whole = torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        part.of(whole, Box.whole(shape)).add_(1)
    return whole


def test_what_is_left_of_a_box_and_what_is_common_make_it_up() -> None:
    generator = random.Random(0)
    for _ in range(300):
        shape = generator.choice(SHAPES[:5] + SHAPES[6:])
        one, other = random_box(generator, shape), random_box(generator, shape)
        common = one.meet(other)
        parts = [*one.minus(other), *([] if common is None else [common])]
        assert torch.equal(filled(shape, parts), filled(shape, [one] if one.numel else []))
        assert all(part.meet(other) is None for part in one.minus(other))


def test_a_part_is_a_view_of_what_holds_it() -> None:
    whole = torch.arange(7 * 5).view(7, 5)
    held = Box((2, 1), (6, 5))
    holder = held.of(whole, Box.whole((7, 5)))
    part = Box((3, 1), (5, 3))
    assert torch.equal(part.of(holder, held), whole[3:5, 1:3])
    assert part.of(holder, held).data_ptr() == whole[3:, 1:].data_ptr()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_chunks_are_those_of_torch(rows: int, count: int) -> None:
    found = [chunk.shape[0] for chunk in Box.whole((rows, 2)).chunks(count)]
    theirs = [len(chunk) for chunk in torch.empty(rows, 2).chunk(count)]
    assert found == theirs + [0] * (count - len(theirs))


def test_a_cut_covers_the_tensor_and_copies_are_equal() -> None:
    grid = Grid((2, 3, 2), tuple(range(10, 22)))
    for cuts in ([Axis(1, 0)], [Axis(2, 1)], [Axis(2, 0), Axis(1, 0)], [Axis(2, 1), Axis(1, 0)], []):
        for shape in ((7, 5), (2, 4), (13, 2)):
            found = boxes(shape, grid, cuts)
            copies = 12
            for cut in cuts:
                copies //= grid.sizes[cut.axis]
            assert torch.equal(filled(shape, list(found.values())), torch.full(shape, copies))
    with pytest.raises(ValueError, match="no 3 ranks"):
        Grid((2, 2), (0, 1, 2))


def random_layouts(generator: random.Random) -> list[TensorLayout]:
    """Tensors that are cut at random on the sources' side, and needed at random on the other; some ranks are on both."""
    sizes = generator.choice([(2, 2), (4,), (2, 1, 2), (3,), (1,)])
    sources = Grid(sizes, tuple(generator.sample(range(6), int(torch.tensor(sizes).prod()))))
    targets = generator.sample(range(8), generator.randint(1, 4))
    found = []
    for number in range(generator.randint(1, 6)):
        shape = generator.choice(SHAPES)
        axes = generator.sample(range(len(sizes)), generator.randint(0, len(sizes)))
        cuts = [Axis(axis, generator.randrange(len(shape))) for axis in axes if shape]
        needed = {rank: tuple(random_box(generator, shape) for _ in range(generator.randint(0, 2))) for rank in targets}
        found.append(
            TensorLayout(
                name=f"tensor {number}",
                shape=shape,
                itemsize=generator.choice([1, 2, 4]),
                sources=boxes(shape, sources, cuts),
                targets=needed,
            )
        )
    return found


def check(schedule: Schedule, bucket_bytes: int) -> None:
    """Each target gets each value that it needs exactly once, from a rank that has it, and itself first."""
    got: dict[tuple[int, int], list[Box]] = {}
    for bucket in schedule.buckets:
        for message in bucket.messages:
            assert message.source not in message.targets
            widths = [piece.itemsize for piece in message.pieces]
            assert all(wide >= narrow for wide, narrow in pairwise(widths))
            for piece in message.pieces:
                held = schedule.tensors[piece.tensor].sources[message.source]
                assert piece.box.meet(held) == piece.box
                for target in message.targets:
                    got.setdefault((piece.tensor, target), []).append(piece.box)
                    own = schedule.tensors[piece.tensor].sources.get(target)
                    assert own is None or piece.box.meet(own) is None
        for rank, pieces in bucket.local.items():
            for piece in pieces:
                got.setdefault((piece.tensor, rank), []).append(piece.box)
    for number, tensor in enumerate(schedule.tensors):
        for rank, needed in tensor.targets.items():
            wanted = filled(tensor.shape, list(needed)).clamp(max=1)
            assert torch.equal(filled(tensor.shape, got.get((number, rank), [])), wanted)
    row = max((t.itemsize * (torch.Size(t.shape[1:]).numel()) for t in schedule.tensors), default=0)
    # A row of each shard goes at least, however small the bucket.
    bound = max(bucket_bytes, 4 * row) + 16 * 8
    for rank in range(8):
        assert max(schedule.buffer_bytes(rank)) <= bound


def test_random_layouts_are_served_whole_and_within_the_bucket() -> None:
    generator = random.Random(1)
    for _ in range(200):
        layouts, bucket_bytes = random_layouts(generator), generator.choice([16, 64, 500, 10_000])
        together = generator.random() < 0.5
        check(make_schedule(layouts, bucket_bytes=bucket_bytes, together=together), bucket_bytes)


def test_on_shared_devices_only_what_is_missing_moves() -> None:
    """fsdp 4 to tp 4 of a tensor that both cut by rows moves nothing; one that tp cuts by columns, three quarters."""
    sharded = boxes((8, 8), Grid((4,), (0, 1, 2, 3)), [Axis(0, 0)])
    for dim, moved in ((0, 0), (1, 3 * 2 * 2 * 4)):
        tensor_parallel = boxes((8, 8), Grid((4,), (0, 1, 2, 3)), [Axis(0, dim)])
        needed = {rank: (box,) for rank, box in tensor_parallel.items()}
        layout = TensorLayout(name="x", shape=(8, 8), itemsize=4, sources=sharded, targets=needed)
        schedule = make_schedule([layout], bucket_bytes=10_000)
        assert {schedule.moved_bytes(rank)[1] for rank in range(4)} == {moved}


def test_copies_take_turns_and_the_same_machine_goes_first() -> None:
    """Two copies of the actor (replicate 2) serve four engines evenly; engines get them from their own machine."""
    grid, whole = Grid((2, 2), (0, 1, 2, 3)), Box.whole((8, 4))
    layouts = [
        TensorLayout(
            name=str(number),
            shape=(8, 4),
            itemsize=2,
            sources=boxes((8, 4), grid, [Axis(1, 0)]),
            targets=dict.fromkeys((4, 5, 6, 7), (whole,)),
        )
        for number in range(6)
    ]
    for together in (True, False):
        schedule = make_schedule(layouts, bucket_bytes=10_000, together=together)
        assert {schedule.moved_bytes(rank)[0] for rank in range(4)} == {6 * 4 * 64 // 4}
    near = make_schedule(layouts, bucket_bytes=10_000, node_of=lambda rank: rank in (0, 1, 4, 5))
    pairs = {(m.source, t) for bucket in near.buckets for m in bucket.messages for t in m.targets}
    assert {target for source, target in pairs if source in (0, 1)} == {4, 5}


def test_every_shard_of_a_large_tensor_is_sent_at_the_same_time() -> None:
    layout = TensorLayout(
        name="x",
        shape=(64, 4),
        itemsize=4,
        sources=boxes((64, 4), Grid((4,), (0, 1, 2, 3)), [Axis(0, 0)]),
        targets=dict.fromkeys(range(4), (Box.whole((64, 4)),)),
    )
    schedule = make_schedule([layout], bucket_bytes=256)
    assert len(schedule.buckets) == 4
    assert all({m.source for m in bucket.messages} == {0, 1, 2, 3} for bucket in schedule.buckets)


def test_what_nobody_has_is_named() -> None:
    layout = TensorLayout(
        name="model.norm.weight",
        shape=(8,),
        itemsize=4,
        sources={0: Box((0,), (3,)), 1: Box((4,), (8,))},
        targets={2: (Box((0,), (8,)),)},
    )
    with pytest.raises(RunFault, match=r"(?s)no rank has \[3:4\] of model\.norm\.weight.*rank 2 needs it"):
        make_schedule([layout], bucket_bytes=100)


def test_placements_say_in_which_order_a_tensor_is_cut() -> None:
    """Tensor parallelism first where FSDP cuts what it left, though its axis is the last; unfinished sums are refused."""
    sizes = (2, 3, 2)
    assert cuts_of([Replicate(), Shard(0), Shard(1)], sizes) == (Axis(1, 0), Axis(2, 1))
    assert cuts_of([Shard(0), Shard(0), Replicate()], sizes) == (Axis(0, 0), Axis(1, 0))
    assert cuts_of([Replicate(), _StridedShard(0, split_factor=2), Shard(0)], sizes) == (Axis(2, 0), Axis(1, 0))
    inner = [_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)]
    assert cuts_of(inner, sizes) == (Axis(2, 0), Axis(1, 0), Axis(0, 0))
    with pytest.raises(ValueError, match="strided by 3 after 2 parts"):
        cuts_of([Replicate(), _StridedShard(0, split_factor=3), Shard(0)], sizes)
    with pytest.raises(ValueError, match="no part of a tensor"):
        cuts_of([Partial(), Replicate(), Replicate()], sizes)
    assert box_at((10, 4), sizes, (1, 1, 1), (Axis(2, 0), Axis(1, 0))) == Box((7, 0), (9, 4))
