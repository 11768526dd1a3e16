"""Weights between ranks: what arrives is what whole tensors would give, in bounded memory, or the tensor is named."""

import torch

from tests import movement_checks
from tests.movement_checks import Case, values
from tests.ranks import Ranks

PAIR, ALL = (0, 1), (0, 1, 2, 3)
ACTORS = [
    ((("fsdp", 2),), PAIR),
    ((("tp", 2),), PAIR),
    ((("fsdp", 4),), ALL),
    ((("replicate", 2), ("fsdp", 2)), ALL),
    ((("fsdp", 2), ("tp", 2)), ALL),
]
SHARED = [
    *(Case(axes, ranks, rollout, ranks) for axes, ranks in ACTORS[:2] for rollout in ((("dp", 2),), (("tp", 2),))),
    *(
        Case(axes, ranks, rollout, ranks)
        for axes, ranks in ACTORS[2:]
        for rollout in ((("dp", 4),), (("tp", 4),), (("dp", 2), ("tp", 2)))
    ),
]
SPLIT = [
    Case((("fsdp", 1),), (0,), (("dp", 1),), (1,)),
    Case((("fsdp", 2),), (0, 1), (("dp", 2),), (2, 3)),
    Case((("fsdp", 2),), (1, 3), (("tp", 2),), (0, 2)),
    Case((("tp", 2),), (0, 1), (("dp", 2),), (2, 3)),
    Case((("fsdp", 3),), (0, 1, 2), (("dp", 1),), (3,)),
    Case((("fsdp", 2),), (0, 1), (("dp", 3),), (1, 2, 3), together=False),
    Case((("fsdp", 2),), (0, 1), (("dp", 2),), (2, 3), dtype=torch.bfloat16),
    Case((("fsdp", 2), ("tp", 2)), ALL, (("dp", 2), ("tp", 2)), ALL, dtype=torch.bfloat16, bucket_bytes=10**6),
]


def check(ranks: Ranks, cases: list[Case]) -> None:
    found = ranks.run(movement_checks.move_all, cases)
    for number, case in enumerate(cases):
        here = [outcome[number] for outcome in found if outcome[number] is not None]
        assert len(here) == len({*case.giving, *case.taking})
        assert all(outcome.wrong == [] for outcome in here), str(case)
        assert {outcome.moved.num_tensors for outcome in here} == {len(values())}
        assert len({outcome.moved.checksum for outcome in here}) == 1
        assert sum(o.moved.sent_bytes for o in here) == sum(o.moved.received_bytes for o in here)
        for outcome in here:
            assert outcome.moved.received_bytes + outcome.moved.local_bytes == outcome.held_bytes
            # Two buckets that are sent and two that are received, each message aligned.
            assert outcome.buffer_bytes <= 4 * (case.bucket_bytes + 8 * 16), str(case)
            if case.bucket_bytes < 1000:
                # What the processor makes for a checksum: some integers for each value of a bucket; the model has 19 kB.
                assert outcome.peak_bytes <= 16 * case.bucket_bytes, str(case)


def test_on_shared_devices_every_layout_becomes_every_other(four_ranks: Ranks) -> None:
    """Tensors cut by torch's own FSDP and tensor parallelism, uneven rows among them."""
    check(four_ranks, SHARED)


def test_on_devices_apart_too(four_ranks: Ranks) -> None:
    check(four_ranks, SPLIT)


def test_sides_that_do_not_fit_are_told_on_every_rank_with_the_tensor(four_ranks: Ranks) -> None:
    told = four_ranks.run(movement_checks.disagreements)
    assert told[0] == told[1] == told[2]
    shape, dtype, unknown, unused, version = told[0]
    assert "do not agree on layers.1.q.weight" in shape and "rank 2: [5, 2]" in shape
    assert "do not agree on layers.0.down.bias" in dtype and "torch.float64" in dtype
    assert "do not agree on layers.7.q.weight" in unknown and "the trainer has none" in unknown
    assert "do not agree on scale" in unused and "no engine needs it" in unused
    assert "different versions of the weights: 4 and 5" in version


def test_a_bit_that_changes_is_found_everywhere_and_the_tensor_is_named(four_ranks: Ranks) -> None:
    """On the link or in the place where it arrived; a movement after that is whole again."""
    for where in ("link", "place"):
        for together in (True, False):
            told = four_ranks.run(movement_checks.flipped_bit, where, together)
            assert len(set(told)) == 1
            fault, again = told[0].split(" / ")
            assert "did not reach the engine: layers.1.down.weight" in fault
            assert again == "none"


def test_places_of_an_engine_that_were_traced_are_filled(four_ranks: Ranks) -> None:
    assert four_ranks.run(movement_checks.through_places)[3] == [f"{len(values()) - 4} others"]
