"""Samples over data-parallel ranks: each once, near the best possible, the same on every run."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.samples import Samples, SampleTooLong
from meshloom.samples.balance import Costs, balance, share_out

PARTS = st.integers(1, 6)


@st.composite
def group_costs(draw: st.DrawFn) -> Costs:
    groups = draw(
        st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(1, 60), min_size=1, max_size=6)), max_size=7)
    )
    return Costs(
        own=[float(own) for _, members in groups for own in members],
        group=[number for number, (_, members) in enumerate(groups) for _ in members],
        shared=[float(shared) for shared, members in groups for _ in members],
    )


def heaviest(costs: Costs, parts: list[list[int]]) -> float:
    return max(map(costs.of_part, parts))


@given(group_costs(), PARTS)
@settings(deadline=None)
def test_every_sample_is_on_one_rank_and_the_same_one_every_time(costs: Costs, parts: int) -> None:
    found = balance(costs, parts)
    assert len(found) == parts
    assert sorted(itertools.chain(*found)) == list(range(len(costs.own)))
    assert all(part == sorted(part) for part in found)
    assert found == balance(costs, parts)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), PARTS)
@settings(deadline=None)
def test_single_samples_are_within_a_third_of_the_best(own: list[int], parts: int) -> None:
    """Against three bounds from below: the mean, the largest sample, and two of the first ``parts + 1`` that share a rank."""
    costs = Costs(list(map(float, own)), list(range(len(own))), [0.0] * len(own))
    largest = sorted(own, reverse=True)
    together = largest[parts - 1] + largest[parts] if len(own) > parts else 0
    bound = max(sum(own) / parts, largest[0], together)
    # Graham's bound is against the optimum, which these bounds may be below by a further third.
    assert heaviest(costs, balance(costs, parts)) <= (4 / 3) ** 2 * bound + 1e-6


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_small_batches_against_every_choice_there_is(own: list[int], parts: int) -> None:
    costs = Costs(list(map(float, own)), list(range(len(own))), [0.0] * len(own))
    choices = itertools.product(range(parts), repeat=len(own))
    best = min(
        max(sum(c for c, p in zip(own, choice, strict=True) if p == part) for part in range(parts))
        for choice in choices
    )
    assert heaviest(costs, balance(costs, parts)) <= best * (4 / 3 - 1 / (3 * parts)) + 1e-6


def test_groups_stay_whole_where_that_is_even_and_are_split_where_it_is_not() -> None:
    whole = Costs([10.0] * 16, [i // 4 for i in range(16)], [50.0] * 16)
    for part in balance(whole, 2):
        assert len({whole.group[i] for i in part}) == 2
    one_group = Costs([10.0] * 8, [0] * 8, [5.0] * 8)
    assert [len(part) for part in balance(one_group, 4)] == [2, 2, 2, 2]


def test_one_long_sample_against_many_short_ones() -> None:
    own = [1000.0] + [10.0] * 90
    costs = Costs(own, list(range(91)), [0.0] * 91)
    parts = sorted(balance(costs, 2), key=len)
    assert parts[0] == [0]
    assert len(parts[1]) == 90


def samples(lengths: list[tuple[int, int]], group: list[int] | None = None) -> Samples:
    """Samples of a prompt and a response each."""
    mask = [place >= prompt for prompt, response in lengths for place in range(prompt + response)]
    rows = {} if group is None else {"group": torch.tensor(group)}
    return Samples(torch.tensor([p + r for p, r in lengths]), {"mask": torch.tensor(mask)}, rows)


def test_costs_count_a_prompt_once_and_attention_by_pairs() -> None:
    costs = Costs.of(samples([(3, 2), (3, 4), (5, 0)], [7, 7, 8]), pair_cost=0.5)
    # A response of r tokens after p sees r·p + r·(r+1)/2 pairs; a prompt p·(p+1)/2. What has no response has no prompt.
    assert list(costs.own) == [2 + 0.5 * 9, 4 + 0.5 * 22, 5 + 0.5 * 15]
    assert list(costs.shared) == [3 + 0.5 * 6, 3 + 0.5 * 6, 0.0]
    assert costs.of_part([0, 1]) == 2 + 4.5 + 4 + 11 + 6


def test_zero_length_responses_and_fewer_samples_than_ranks() -> None:
    parts = share_out(samples([(4, 0), (4, 3)], [0, 0]), 4, tokens_per_microbatch=100)
    assert sorted(itertools.chain(*parts)) == [0, 1]
    assert sum(not part for part in parts) >= 2


def test_a_sample_beyond_the_bound_is_refused_by_its_number() -> None:
    with pytest.raises(SampleTooLong) as refused:
        share_out(samples([(2, 2), (3, 8)]), 2, tokens_per_microbatch=10)
    assert refused.value.index == 1
