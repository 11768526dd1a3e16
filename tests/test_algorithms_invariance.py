"""Invariance: an update's loss and gradient do not depend on how it is cut, ordered or interleaved."""

import pytest
import torch
from torch import Tensor

from meshloom.algorithms import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REDUCTIONS,
    Denominators,
    denominators,
    entropy_term,
    kl_term,
    reduce,
    value_loss,
)
from meshloom.algorithms.segments import on_tokens, sample_counts, sample_sums
from tests.algorithm_batches import SETTINGS, Tokens, random_tokens

SPLITS = [
    [[i] for i in range(12)],
    [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9, 10, 11]],
    [[11, 3, 7, 0], [10, 2, 6], [1, 9, 5, 4, 8]],
    [[0], [8, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11], []],
]
CHOICES = [
    (name, mode)
    for name, loss in POLICY_LOSSES.items()
    for mode in ((loss.reduction,) if loss.reduction else REDUCTIONS)
]


def _update(tokens: Tokens, logprob_T: Tensor, name: str, mode: str, divisors: Denominators) -> Tensor:
    """A microbatch's share of a loss with a divergence and an entropy term."""
    layout = (tokens.mask_T, tokens.lengths_S, mode, divisors)
    total = reduce(POLICY_LOSSES[name](tokens.inputs(logprob_T), SETTINGS).per_token_T, *layout)
    kl_T = KL_ESTIMATORS["k3"](logprob_T, tokens.reference_logprob_T, tokens.mask_T)
    return total + kl_term(kl_T, *layout, coefficient=0.1) + entropy_term(-logprob_T, *layout, coefficient=0.01)


def _whole(tokens: Tokens, name: str, mode: str) -> tuple[Tensor, Tensor]:
    divisors = denominators(tokens.mask_T, tokens.lengths_S, constant=7.0)
    logprob_T = tokens.logprob_T.clone().requires_grad_()
    total = _update(tokens, logprob_T, name, mode, divisors)
    total.backward()
    return total.detach(), logprob_T.grad


@pytest.mark.parametrize(("name", "mode"), CHOICES)
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(name: str, mode: str) -> None:
    tokens = random_tokens(seed=3)
    total, gradient_T = _whole(tokens, name, mode)
    assert gradient_T.abs().sum() > 0
    for split in SPLITS:
        parts = [tokens.select(samples) for samples in split]
        divisors = sum(
            (denominators(part.mask_T, part.lengths_S, constant=7.0) for part, _ in parts[1:]),
            denominators(parts[0][0].mask_T, parts[0][0].lengths_S, constant=7.0),
        )
        logprob_T = tokens.logprob_T.clone().requires_grad_()
        shares = [_update(part, logprob_T[place_T], name, mode, divisors) for part, place_T in parts]
        sum(shares).backward()
        assert float(sum(shares).detach()) == pytest.approx(float(total), abs=1e-12)
        torch.testing.assert_close(logprob_T.grad, gradient_T, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "mode"), CHOICES)
def test_tokens_outside_the_mask_have_no_influence_whatever_stands_there(name: str, mode: str) -> None:
    tokens = random_tokens(seed=4)
    total, gradient_T = _whole(tokens, name, mode)
    assert (gradient_T[~tokens.mask_T] == 0).all()
    for garbage in (float("nan"), float("inf"), -1e30):
        columns = {
            column: torch.where(tokens.mask_T, value, garbage)
            for column, value in tokens.__dict__.items()
            if column.endswith("_T") and column != "mask_T"
        }
        spoiled = Tokens(lengths_S=tokens.lengths_S, mask_T=tokens.mask_T, **columns)
        spoiled_total, spoiled_gradient_T = _whole(spoiled, name, mode)
        assert spoiled_total == total
        torch.testing.assert_close(spoiled_gradient_T, gradient_T, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "mode"), CHOICES)
def test_spans_outside_the_mask_can_be_cut_out(name: str, mode: str) -> None:
    tokens = random_tokens(seed=5)
    total, gradient_T = _whole(tokens, name, mode)
    kept = tokens.mask_T
    counts_S = torch.stack([part.sum() for part in kept.split(tokens.lengths_S.tolist())])
    columns = {column: value[kept] for column, value in tokens.__dict__.items() if column.endswith("_T")}
    cut_total, cut_gradient_T = _whole(Tokens(lengths_S=counts_S, **columns), name, mode)
    assert float(cut_total) == pytest.approx(float(total), abs=1e-12)
    torch.testing.assert_close(cut_gradient_T, gradient_T[kept], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_statistics_of_microbatches_add_up(name: str) -> None:
    tokens = random_tokens(seed=6)
    whole = POLICY_LOSSES[name](tokens.inputs(tokens.logprob_T), SETTINGS).stats
    assert int(whole.num_tokens) == int(tokens.mask_T.sum())
    for split in SPLITS:
        parts = [tokens.select(samples)[0] for samples in split]
        stats = [POLICY_LOSSES[name](part.inputs(part.logprob_T), SETTINGS).stats for part in parts]
        merged = sum(stats[1:], stats[0])
        assert merged.summary() == pytest.approx(whole.summary(), abs=1e-12)


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_value_loss_of_microbatches_adds_up(mode: str) -> None:
    tokens = random_tokens(seed=7)
    divisors = denominators(tokens.mask_T, tokens.lengths_S, constant=7.0)

    def loss(part: Tokens) -> Tensor:
        loss_T = value_loss(part.logprob_T, part.old_logprob_T, part.advantages_T, part.mask_T, clip=0.2)
        return reduce(loss_T, part.mask_T, part.lengths_S, mode, divisors)

    for split in SPLITS:
        assert float(sum(loss(tokens.select(s)[0]) for s in split)) == pytest.approx(float(loss(tokens)), abs=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_first_update_has_the_plain_policy_gradient(name: str) -> None:
    """At ρ = 1 nothing is clipped and every loss has the gradient −A·weight of its tokens, up to its own constant."""
    tokens = random_tokens(seed=8)
    logprob_T = tokens.old_logprob_T.clone().requires_grad_()
    outputs = POLICY_LOSSES[name](tokens.inputs(logprob_T, weighted=False), SETTINGS)
    outputs.per_token_T.sum().backward()
    expected_T = torch.where(tokens.mask_T, -tokens.advantages_T, 0.0)
    if name == "gmpo":
        mean_S = sample_sums(-expected_T, tokens.lengths_S) / sample_counts(tokens.mask_T, tokens.lengths_S).clamp(
            min=1
        )
        expected_T = torch.where(tokens.mask_T, -on_tokens(mean_S, tokens.lengths_S), 0.0)
    torch.testing.assert_close(logprob_T.grad, expected_T, rtol=1e-7, atol=1e-12)
    assert int(outputs.stats.num_clipped) == 0
    assert outputs.stats.summary()["ratio_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_an_update_without_tokens_has_loss_zero(mode: str) -> None:
    tokens = random_tokens(seed=9)
    nothing_T = torch.zeros_like(tokens.mask_T)
    divisors = denominators(nothing_T, tokens.lengths_S, constant=7.0)
    assert (divisors.num_tokens, divisors.num_sequences) == (0, 0)
    logprob_T = tokens.logprob_T.clone().requires_grad_()
    total = reduce(logprob_T, nothing_T, tokens.lengths_S, mode, divisors)
    total.backward()
    assert total == 0
    assert (logprob_T.grad == 0).all()


def test_samples_without_a_token_in_the_mask_are_not_counted() -> None:
    divisors = denominators(torch.tensor([False, False, True, False, True, True]), torch.tensor([2, 2, 2]))
    assert (divisors.num_tokens, divisors.num_sequences) == (3, 2)
