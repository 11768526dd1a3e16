"""The order of prompts: nothing skipped, nothing repeated, resumable anywhere."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.config.errors import UserError
from meshloom.data.order import PromptOrder

sizes = st.integers(1, 40)
takes = st.lists(st.integers(0, 50), max_size=12)
seeds = st.integers(-(2**70), 2**70)


@given(sizes, seeds, st.booleans(), takes)
def test_each_epoch_is_a_permutation_however_it_is_taken(size, seed, shuffle, counts):
    order = PromptOrder(size, seed, shuffle)
    taken = [i for n in counts for i in order.take(n)]
    assert len(taken) == sum(counts)
    assert (order.epoch, order.position) == divmod(len(taken), size)
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))
    assert taken == PromptOrder(size, seed, shuffle).take(len(taken))


@given(sizes, seeds, st.booleans(), st.integers(0, 120), st.integers(0, 60))
def test_a_loaded_state_continues_exactly(size, seed, shuffle, before, after):
    order = PromptOrder(size, seed, shuffle)
    order.take(before)
    resumed = PromptOrder(size, seed, shuffle)
    resumed.take(7)
    resumed.load(json.loads(json.dumps(order.state())))
    assert resumed.take(after) == order.take(after)
    assert resumed.state() == order.state()


@settings(max_examples=20)
@given(seeds)
def test_epochs_and_seeds_have_orders_of_their_own(seed):
    order = PromptOrder(50, seed, True)
    first, second = order.take(50), order.take(50)
    assert first != second
    assert first != PromptOrder(50, seed + 1, True).take(50)


def test_the_order_of_a_seed_never_changes():
    """Resuming a run under another numpy must not reorder its prompts."""
    assert PromptOrder(8, 7, True).take(16) == [6, 3, 4, 0, 2, 7, 5, 1, 1, 3, 2, 7, 4, 5, 0, 6]


def test_without_shuffling_rows_come_as_they_stand():
    assert PromptOrder(3, 0, False).take(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("other", "named"), [((4, 0, True), "num_prompts"), ((3, 1, True), "seed"), ((3, 0, False), "shuffle")]
)
def test_a_state_of_another_run_is_refused_with_both_values(other, named):
    with pytest.raises(UserError, match="order of prompts") as caught:
        PromptOrder(3, 0, True).load(PromptOrder(*other).state())
    assert named in caught.value.where
    assert "saved with" in caught.value.why


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, 0, True)
