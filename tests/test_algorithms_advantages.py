"""Algebra of advantages and rewards: worked examples, groups with invalid members, interleaved masks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshloom.algorithms import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageOutputs,
    has_spread,
    overlong_penalty,
    place_rewards,
    subtract_kl,
)
from meshloom.algorithms.segments import discounted_suffix_sums
from meshloom.config.errors import UserError

NAMES = tuple(ADVANTAGES)
GROUP_RELATIVE = ("grpo", "rloo", "opo", "gpg", "grpo_passk")


def _inputs(rewards_T: Tensor, mask_T: Tensor, lengths_S: Tensor, group_S: Tensor, **more) -> AdvantageInputs:
    return AdvantageInputs(token_rewards_T=rewards_T, mask_T=mask_T, lengths_S=lengths_S, group_S=group_S, **more)


def _one_token_each(
    name: str, rewards: list[float], group: list[int], valid: list[bool] | None = None, **more
) -> AdvantageOutputs:
    """An estimator on samples of one token, the reward on it."""
    count = len(rewards)
    return ADVANTAGES[name](
        AdvantageInputs(
            token_rewards_T=torch.tensor(rewards, dtype=torch.float64),
            mask_T=torch.ones(count, dtype=torch.bool),
            lengths_S=torch.ones(count, dtype=torch.int64),
            group_S=torch.tensor(group),
            valid_S=None if valid is None else torch.tensor(valid),
            values_T=torch.zeros(count, dtype=torch.float64),
            greedy_reward_S=torch.zeros(count, dtype=torch.float64),
            **more,
        )
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [(x - 2) / (math.sqrt(14 / 3) + 1e-6) for x in (0, 1, 2, 5)]),
        ("rloo", [0 - 8 / 3, 1 - 7 / 3, 2 - 6 / 3, 5 - 3 / 3]),
        ("opo", [-2.0, -1.0, 0.0, 3.0]),
        ("gpg", [-8 / 3, -4 / 3, 0.0, 4.0]),
        ("grpo_passk", [0.0, 0.0, 0.0, 3 / (math.sqrt(14 / 3) + 1e-6)]),
        ("remax", [0.0, 1.0, 2.0, 5.0]),
    ],
)
def test_a_group_worked_by_hand(name: str, expected: list[float]) -> None:
    outputs = _one_token_each(name, [0.0, 1.0, 2.0, 5.0], [7, 7, 7, 7])
    assert outputs.advantages_T.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"), [("grpo", 0.3), ("rloo", 0.3), ("opo", 0.3), ("gpg", 0.3), ("grpo_passk", 0.0)]
)
def test_a_group_of_one_has_no_baseline_and_is_counted(name: str, expected: float) -> None:
    outputs = _one_token_each(name, [0.3, 0.5, 0.5], [4, 1, 1])
    assert outputs.advantages_T.tolist() == pytest.approx([expected, 0.0, 0.0], abs=1e-12)
    assert (outputs.num_single, outputs.num_invalid) == (1, 0)


def test_a_group_reduced_to_one_by_invalid_rewards_is_a_group_of_one() -> None:
    outputs = _one_token_each("grpo", [0.3, math.nan, 1.0, 0.0], [4, 4, 1, 1], valid=[True, False, True, True])
    assert outputs.advantages_T.tolist() == pytest.approx([0.3, 0.0, 2**-0.5, -(2**-0.5)], abs=1e-5)
    assert (outputs.num_single, outputs.num_invalid) == (1, 1)


def test_length_weighted_baseline_counts_the_models_own_tokens() -> None:
    """Two samples of 3 and 1 own tokens with rewards 1 and 0: the baseline is 3/4, whatever the tool's answer adds."""
    mask_T = torch.tensor([True, False, False, True, True, True])
    rewards_T = torch.tensor([0.0, 0, 0, 0, 1, 0]).double()
    outputs = ADVANTAGES["opo"](_inputs(rewards_T, mask_T, torch.tensor([5, 1]), torch.tensor([0, 0])))
    assert outputs.advantages_T.tolist() == [0.25, 0.0, 0.0, 0.25, 0.25, -0.75]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
def test_a_reward_on_a_tools_token_reaches_the_models_tokens_before_it(name: str) -> None:
    """Rewards at tokens that are not the model's used to be lost in estimators that walk over the model's tokens only."""
    mask_T = torch.tensor([False, True, False, False, True, False, True, True])
    lengths_S, group_S = torch.tensor([6, 2]), torch.tensor([0, 0])

    def returns(rewards: list[float]) -> list[float]:
        return ADVANTAGES[name](
            AdvantageInputs(
                token_rewards_T=torch.tensor(rewards, dtype=torch.float64),
                mask_T=mask_T,
                lengths_S=lengths_S,
                group_S=group_S,
                values_T=torch.zeros(8, dtype=torch.float64),
                greedy_reward_S=torch.zeros(2, dtype=torch.float64),
                gamma=1.0 if name == "remax" else 0.5,
            )
        ).returns_T.tolist()

    at_the_tool = returns([9.0, 0, 0, 2, 0, 4, 0, 1])
    at_the_model = returns([0.0, 2, 0, 0, 4, 0, 0, 1])
    assert at_the_tool == pytest.approx(at_the_model, abs=1e-12)
    assert at_the_tool == ([0, 6, 0, 0, 4, 0, 1, 1] if name == "remax" else [0, 4, 0, 0, 4, 0, 0.5, 1])


def test_whitening_of_few_tokens_is_that_of_the_recorded_cases() -> None:
    """Their means divide by n + 1e-8, which a few tokens show; the numbers are those of their implementation."""
    found = _one_token_each("reinforce_plus_plus", [1.0, 1.0, 3.0], [0, 1, 2]).advantages_T.tolist()
    assert found == pytest.approx([-0.5773502631755605, -0.5773502631755605, 1.1547005407848776], abs=1e-12)
    assert _one_token_each("reinforce_plus_plus", [5.0], [0]).advantages_T.tolist() == [0.0]


def test_generalised_advantages_equal_the_recursion() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 1, 30]
    rewards_T, values_T = torch.randn(2, 40, dtype=torch.float64, generator=generator)
    mask_T = torch.rand(40, generator=generator) < 0.6
    inputs = _inputs(
        rewards_T * mask_T,
        mask_T,
        torch.tensor(lengths),
        torch.tensor([0, 1, 2]),
        values_T=values_T,
        gamma=0.9,
        lam=0.8,
    )
    outputs = ADVANTAGES["gae"](inputs)
    expected: list[float] = []
    for reward_t, value_t, mask_t in zip(*(x.split(lengths) for x in (rewards_T, values_T, mask_T)), strict=True):
        advantage, following, row = 0.0, 0.0, [0.0] * len(mask_t)
        for t in reversed(range(len(mask_t))):
            if mask_t[t]:
                advantage = float(reward_t[t] + 0.9 * following - value_t[t]) + 0.9 * 0.8 * advantage
                following = float(value_t[t])
                row[t] = advantage + following
        expected += row
    torch.testing.assert_close(
        outputs.returns_T * mask_T, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert float(outputs.advantages_T[mask_T].mean()) == pytest.approx(0.0, abs=1e-8)
    assert float(outputs.advantages_T[mask_T].std()) == pytest.approx(1.0, abs=1e-6)


@given(st.lists(st.integers(1, 40), max_size=8), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_suffix_sums_equal_the_recursion(lengths: list[int], discount: float) -> None:
    values_M = torch.linspace(-1, 2, sum(lengths), dtype=torch.float64)
    sample_M = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    expected: list[float] = []
    for part in values_M.split(lengths):
        row, running = [], 0.0
        for value in reversed(part.tolist()):
            running = value + discount * running
            row.append(running)
        expected += reversed(row)
    assert discounted_suffix_sums(values_M, sample_M, discount).tolist() == pytest.approx(expected, abs=1e-12)


@st.composite
def batches(draw: st.DrawFn) -> AdvantageInputs:
    """Groups of 1 to 16 samples in any order, some with equal rewards, some members invalid with NaN, any masks."""
    sizes = draw(st.lists(st.integers(1, 16), min_size=1, max_size=4))
    rewards = st.one_of(st.sampled_from([0.0, 1.0, 1 / 3]), st.floats(-10, 10, allow_subnormal=False))
    samples = []
    for group, size in enumerate(sizes):
        same = draw(st.none() | rewards)
        for _ in range(size):
            valid = draw(st.sampled_from([True, True, True, False]))
            samples.append((group * 5 - 7, draw(rewards) if same is None else same, valid))
    samples = draw(st.permutations(samples))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    lengths_S = torch.randint(1, 6, (len(samples),), generator=generator)
    mask_T = torch.rand(int(lengths_S.sum()), generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    reward_S = torch.tensor([reward if valid else math.nan for _, reward, valid in samples], dtype=torch.float64)
    return AdvantageInputs(
        token_rewards_T=place_rewards(reward_S, mask_T, lengths_S),
        mask_T=mask_T,
        lengths_S=lengths_S,
        group_S=torch.tensor([group for group, _, _ in samples]),
        valid_S=torch.tensor([valid for _, _, valid in samples]),
        values_T=torch.randn(len(mask_T), generator=generator, dtype=torch.float64),
        greedy_reward_S=torch.randn(len(samples), generator=generator, dtype=torch.float64),
        gamma=0.9,
        lam=0.8,
        normalize_by_std=draw(st.booleans()),
    )


def _per_sample(values_T: Tensor, inputs: AdvantageInputs) -> list[Tensor]:
    return list(values_T.split(inputs.lengths_S.tolist()))


@given(batches(), st.sampled_from(NAMES))
@settings(max_examples=250, deadline=None)
def test_nothing_leaks_from_invalid_samples_and_masked_tokens(inputs: AdvantageInputs, name: str) -> None:
    outputs = ADVANTAGES[name](inputs)
    assert bool(torch.isfinite(outputs.advantages_T).all())
    assert outputs.returns_T is None or bool(torch.isfinite(outputs.returns_T).all())
    assert (outputs.advantages_T[~inputs.mask_T] == 0).all()
    for valid, part in zip(inputs.valid_S.tolist(), _per_sample(outputs.advantages_T, inputs), strict=True):
        assert valid or (part == 0).all()
    assert outputs.num_invalid == int((~inputs.valid_S).sum())


@given(batches(), st.sampled_from(NAMES), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_order_of_samples_and_presence_of_invalid_ones_do_not_matter(
    inputs: AdvantageInputs, name: str, random
) -> None:
    whole = _per_sample(ADVANTAGES[name](inputs).advantages_T, inputs)
    order = [i for i, valid in enumerate(inputs.valid_S.tolist()) if valid]
    random.shuffle(order)
    if not order:
        return
    columns = {}
    for column in ("token_rewards_T", "mask_T", "values_T"):
        parts = _per_sample(getattr(inputs, column), inputs)
        columns[column] = torch.cat([parts[i] for i in order])
    part = AdvantageInputs(
        **columns,
        lengths_S=inputs.lengths_S[order],
        group_S=inputs.group_S[order],
        greedy_reward_S=inputs.greedy_reward_S[order],
        gamma=inputs.gamma,
        lam=inputs.lam,
        normalize_by_std=inputs.normalize_by_std,
    )
    for i, ours in zip(order, _per_sample(ADVANTAGES[name](part).advantages_T, part), strict=True):
        torch.testing.assert_close(ours, whole[i], rtol=1e-9, atol=1e-9)


@given(batches(), st.sampled_from(NAMES), st.integers(0, 2**20))
@settings(max_examples=100, deadline=None)
def test_spans_and_padding_that_are_not_the_models_change_nothing(
    inputs: AdvantageInputs, name: str, seed: int
) -> None:
    """Tokens outside the mask put in anywhere, and at the end of each sample as padding would be."""
    generator = torch.Generator().manual_seed(seed)
    total, count = len(inputs.mask_T), len(inputs.lengths_S)
    before_T = torch.randint(0, 3, (total,), generator=generator)
    behind_S = torch.randint(0, 4, (count,), generator=generator)
    sample_T = torch.repeat_interleave(torch.arange(count), inputs.lengths_S)
    place_T = (before_T + 1).cumsum(0) - 1 + (behind_S.cumsum(0) - behind_S)[sample_T]
    added_S = torch.zeros(count, dtype=torch.int64).index_add_(0, sample_T, before_T) + behind_S

    def spread(values_T: Tensor, fill: float) -> Tensor:
        wide_T = torch.full((total + int(added_S.sum()),), fill, dtype=values_T.dtype)
        wide_T[place_T] = values_T
        return wide_T

    wide = replace(
        inputs,
        token_rewards_T=spread(inputs.token_rewards_T, 0.0),
        mask_T=spread(inputs.mask_T, 0).bool(),
        lengths_S=inputs.lengths_S + added_S,
        values_T=spread(inputs.values_T, float("nan")),
    )
    before, after = (ADVANTAGES[name](given).advantages_T for given in (inputs, wide))
    torch.testing.assert_close(after[place_T], before, rtol=0, atol=1e-9)
    assert float(after.abs().sum()) == pytest.approx(float(before.abs().sum()), abs=1e-6)


@given(batches(), st.sampled_from(GROUP_RELATIVE))
@settings(max_examples=100, deadline=None)
def test_groups_without_spread_teach_nothing(inputs: AdvantageInputs, name: str) -> None:
    reward_S = torch.stack([part.sum() for part in _per_sample(inputs.token_rewards_T, inputs)])
    spread_S = has_spread(reward_S, inputs.group_S, inputs.valid_S)
    advantages = _per_sample(ADVANTAGES[name](inputs).advantages_T, inputs)
    for i in range(len(spread_S)):
        mates = (inputs.group_S == inputs.group_S[i]) & inputs.valid_S
        values = set(reward_S[mates].tolist())
        assert bool(spread_S[i]) == (len(values) > 1)
        if int(mates.sum()) > 1 and len(values) == 1:
            assert float(advantages[i].abs().max()) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_rewards_in_a_short_dtype_give_no_advantage(dtype: torch.dtype) -> None:
    """The mean of equal float32 rewards is off by one rounding, which the division by std + 1e-6 would blow up."""
    rewards_T = torch.full((7,), 0.1, dtype=dtype)
    ones = torch.ones(7, dtype=torch.int64)
    outputs = ADVANTAGES["grpo"](_inputs(rewards_T, ones.bool(), ones, ones))
    assert outputs.advantages_T.dtype == dtype
    assert float(outputs.advantages_T.abs().max()) < 1e-8


def test_an_empty_batch_is_fine() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.int64)
    for estimator in ADVANTAGES.values():
        inputs = _inputs(empty, none.bool(), none, none, values_T=empty, greedy_reward_S=empty)
        assert estimator(inputs).advantages_T.shape == (0,)


@pytest.mark.parametrize(("name", "missing"), [("gae", "values_T"), ("remax", "greedy_reward_S")])
def test_an_estimator_says_what_it_needs(name: str, missing: str) -> None:
    assert ADVANTAGES[name].needs_values == (name == "gae")
    assert ADVANTAGES[name].needs_greedy == (name == "remax")
    ones = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=missing):
        ADVANTAGES[name](_inputs(ones.double(), ones.bool(), ones, ones))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean grpo"):
        ADVANTAGES.find("grop")


def test_rewards_stand_on_the_last_own_token() -> None:
    mask_T = torch.tensor([False, True, True, False, False, False, True])
    rewards_T = place_rewards(torch.tensor([3.0, 5.0, 7.0]), mask_T, torch.tensor([4, 2, 1]))
    assert rewards_T.tolist() == [0, 0, 3, 0, 0, 5, 7]


def test_divergence_in_the_reward_is_taken_from_own_tokens_only() -> None:
    kl_T = torch.tensor([0.5, math.nan, 2.0])
    rewards_T = subtract_kl(torch.tensor([0.0, 0.0, 1.0]), kl_T, torch.tensor([True, False, True]), 0.1)
    assert rewards_T.tolist() == pytest.approx([-0.05, 0.0, 0.8])


def test_overlong_penalty_grows_over_the_buffer() -> None:
    penalty_S = overlong_penalty(torch.tensor([1, 80, 90, 100]), max_tokens=100, buffer_tokens=20, factor=2.0)
    assert penalty_S.tolist() == [0.0, 0.0, -1.0, -2.0]
