"""Algebra of divergences and of the correction between sampler and trainer."""

import math

import pytest
import torch

from meshloom.algorithms import (
    KL_ESTIMATORS,
    AdaptiveKl,
    Level,
    banded_weights,
    check_reduction,
    kept_tokens,
    sampler_gap,
    truncated_weights,
)
from meshloom.algorithms.segments import on_tokens, sample_counts, sample_maxima, sample_sums
from meshloom.config.errors import UserError
from tests.algorithm_batches import random_tokens

LENGTHS_S = torch.tensor([3, 2])
MASK_T = torch.tensor([True, False, True, True, True])
SAMPLER_T = torch.tensor([-1.0, math.nan, -1.0, -2.0, -2.0], dtype=torch.float64)
TRAINER_T = SAMPLER_T + torch.tensor([2.0, math.nan, 0.5, 3.0, 1.5], dtype=torch.float64).log()


def test_aliases_are_the_same_estimators() -> None:
    tokens = random_tokens(seed=0)
    columns = (tokens.logprob_T, tokens.reference_logprob_T, tokens.mask_T)
    for alias, name in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+"), ("kl+", "k1+")):
        assert torch.equal(KL_ESTIMATORS[alias](*columns), KL_ESTIMATORS[name](*columns))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_estimators_agree_with_the_divergence_in_expectation(name: str) -> None:
    """Over the whole vocabulary: k1 and k3 are unbiased; k2's gradient is the divergence's gradient at any distance."""
    logits_V = torch.tensor([0.1, 1.0, -0.5, 0.3], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.4, 0.2, -0.1, 0.0], dtype=torch.float64).log_softmax(0)
    logprob_V = logits_V.log_softmax(0)
    divergence = (logprob_V.exp() * (logprob_V - reference_V)).sum()
    estimate_V = KL_ESTIMATORS[name](logprob_V, reference_V, torch.ones(4, dtype=torch.bool))
    expected = (logprob_V.exp().detach() * estimate_V).sum()
    if name in ("k1", "k3"):
        assert float(expected.detach()) == pytest.approx(float(divergence.detach()), abs=1e-12)
    if name == "k2":
        (ours,) = torch.autograd.grad(expected, logits_V, retain_graph=True)
        (exact,) = torch.autograd.grad(divergence, logits_V)
        torch.testing.assert_close(ours, exact)


def test_far_away_policies_keep_the_divergence_finite() -> None:
    ones_T = torch.ones(2, dtype=torch.bool)
    kl_T = KL_ESTIMATORS["k3"](torch.tensor([-200.0, -1e-3]), torch.tensor([-1e-3, -200.0]), ones_T)
    assert kl_T.tolist() == [10.0, 10.0]


def test_adaptive_weight_moves_towards_the_target_by_at_most_a_fifth() -> None:
    weight = AdaptiveKl(coefficient=0.1, target=0.02, horizon=1000)
    assert weight.updated(0.02, 100).coefficient == 0.1
    assert weight.updated(5.0, 100).coefficient == pytest.approx(0.1 * 1.02)
    assert weight.updated(0.0, 100).coefficient == pytest.approx(0.1 * 0.98)
    assert weight.updated(0.022, 100).coefficient == pytest.approx(0.1 * 1.01)


def test_gap_is_measured_over_the_mask() -> None:
    summary = sampler_gap(TRAINER_T, SAMPLER_T, MASK_T).summary()
    ratios = [2.0, 0.5, 3.0, 1.5]
    assert summary["mean_abs"] == pytest.approx(sum(abs(math.log(w)) for w in ratios) / 4)
    assert summary["max_abs"] == pytest.approx(math.log(3))
    assert summary["k3"] == pytest.approx(sum(w - math.log(w) - 1 for w in ratios) / 4)
    assert summary["effective_share"] == pytest.approx(7.0**2 / (4 * 15.5))


def test_gap_without_a_difference_is_zero_and_without_tokens_says_nothing() -> None:
    clean_T = torch.nan_to_num(SAMPLER_T)
    same = sampler_gap(clean_T, clean_T, MASK_T).summary()
    assert same == {"mean_abs": 0.0, "max_abs": 0.0, "k3": 0.0, "effective_share": 1.0}
    assert sampler_gap(clean_T[:0], clean_T[:0], MASK_T[:0]).summary() == {}


def test_gaps_of_microbatches_add_up() -> None:
    tokens = random_tokens(seed=1)
    whole = sampler_gap(tokens.logprob_T, tokens.old_logprob_T, tokens.mask_T)
    parts = [tokens.select(samples)[0] for samples in ([0, 1, 5], [2, 3], [4, *range(6, 12)], [])]
    gaps = [sampler_gap(part.logprob_T, part.old_logprob_T, part.mask_T) for part in parts]
    assert sum(gaps[1:], gaps[0]).summary() == pytest.approx(whole.summary(), abs=1e-12)


def test_truncated_weights_are_capped_per_token_or_per_sample() -> None:
    columns = (TRAINER_T, SAMPLER_T, MASK_T, LENGTHS_S)
    token_T = truncated_weights(*columns, level=Level.TOKEN, cap=1.8)
    assert token_T.tolist() == pytest.approx([1.8, 1.0, 0.5, 1.8, 1.5])
    sequence_T = truncated_weights(*columns, level=Level.SEQUENCE, cap=4.0)
    assert sequence_T.tolist() == pytest.approx([1.0, 1.0, 1.0, 4.0, 4.0])


def test_banded_weights_are_zero_outside_the_band() -> None:
    columns = (TRAINER_T, SAMPLER_T, MASK_T, LENGTHS_S)
    token_T = banded_weights(*columns, level=Level.TOKEN, low=0.6, high=2.5)
    assert token_T.tolist() == pytest.approx([2.0, 1.0, 0.0, 0.0, 1.5])
    sequence_T = banded_weights(*columns, level=Level.SEQUENCE, low=0.6, high=2.5)
    assert sequence_T.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("measure", "level", "bound", "kept"),
    [
        ("k1", Level.TOKEN, math.log(1.9), [False, False, False, False, True]),
        ("k1", Level.SEQUENCE_MEAN, math.log(1.9), [True, False, True, False, False]),
        ("k1", Level.SEQUENCE_MAX, math.log(1.9), [False, False, False, False, False]),
        ("k2", Level.SEQUENCE_MAX, 0.3, [True, False, True, False, False]),
        ("k3", Level.TOKEN, 0.31, [True, False, True, False, True]),
        ("k3", Level.SEQUENCE_MEAN, 0.3, [True, False, True, False, False]),
    ],
)
def test_rejection_takes_tokens_or_whole_samples_out_of_the_mask(
    measure: str, level: Level, bound: float, kept: list[bool]
) -> None:
    mask_T = kept_tokens(TRAINER_T, SAMPLER_T, MASK_T, LENGTHS_S, measure=measure, level=level, bound=bound)
    assert mask_T.tolist() == kept


def test_levels_and_measures_that_do_not_exist_are_refused() -> None:
    columns = (TRAINER_T, SAMPLER_T, MASK_T, LENGTHS_S)
    with pytest.raises(ValueError, match="weights have no level"):
        truncated_weights(*columns, level=Level.SEQUENCE_MAX, cap=2.0)
    with pytest.raises(ValueError, match="rejection has no level"):
        kept_tokens(*columns, measure="k1", level=Level.SEQUENCE, bound=1.0)
    with pytest.raises(ValueError, match="measure 'k4'"):
        kept_tokens(*columns, measure="k4", level=Level.TOKEN, bound=1.0)


def test_a_reduction_that_cannot_work_is_refused() -> None:
    with pytest.raises(UserError, match="no reduction"):
        check_reduction("mean", None)
    with pytest.raises(UserError, match="reduction_constant"):
        check_reduction("seq-mean-token-sum-norm", None)
    check_reduction("seq-mean-token-sum-norm", 512.0)


def test_segments_of_any_length_even_none() -> None:
    lengths_S = torch.tensor([0, 2, 0, 3, 0])
    values_T = torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0])
    assert sample_sums(values_T, lengths_S).tolist() == [0, 3, 0, 4, 0]
    assert sample_maxima(values_T, lengths_S).tolist() == [-math.inf, 2, -math.inf, 5, -math.inf]
    assert sample_counts(values_T > 2, lengths_S).tolist() == [0, 0, 0, 2, 0]
    assert on_tokens(torch.arange(5), lengths_S).tolist() == [1, 1, 3, 3, 3]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert sample_sums(values_T[:0], nothing).shape == (0,)
