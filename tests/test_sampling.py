"""The sampling distribution: filters and draws against a plain reference, and the random numbers behind them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.rollout.protocol import SamplingParams
from meshloom.rollout.sampling import Rows, draw, filter_logits, seed_keys, uniform

CPU = torch.device("cpu")


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of one row, the slow and plain way: top-k, then top-p of what is left, then min-p."""
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    share = np.exp(scaled[kept] - scaled.max())
    share /= share.sum()
    if params.top_p < 1:
        kept = kept[: int(np.searchsorted(np.cumsum(share), params.top_p)) + 1]
    kept = [token for token in kept if scaled[token] >= scaled.max() + np.log(max(params.min_p, 1e-300))]
    probability = np.zeros_like(scaled)
    probability[kept] = np.exp(scaled[kept] - scaled.max())
    return probability / probability.sum()


def rows_of(params: list[SamplingParams], seeds: list[int] | None = None) -> Rows:
    return Rows.of(params, seeds or list(range(len(params))), CPU)


def logits_of(seed: int, rows: int, vocabulary: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


parameters = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 40, 1500, 100_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(parameters, min_size=1, max_size=6),
    vocabulary=st.sampled_from([2, 97, 512, 1024, 3000]),
    scale=st.sampled_from([0.1, 3.0]),
    seed=st.integers(0, 1000),
)
def test_draws_are_the_inverse_of_the_filtered_distribution(rows, vocabulary, scale, seed):
    logits = logits_of(seed, len(rows), vocabulary, scale)
    position = np.full(len(rows), seed)
    tokens, logprobs = draw(logits.clone(), rows_of(rows), position)
    chance = uniform(seed_keys(range(len(rows))), position)
    for row, params in enumerate(rows):
        probability = reference(logits[row].numpy(), params)
        token = int(tokens[row])
        until = np.cumsum(probability)
        assert until[token] - probability[token] - 1e-5 <= chance[row] <= until[token] + 1e-5
        assert float(logprobs[row]) == pytest.approx(np.log(probability[token]), abs=2e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0.5, top_k=7),
        SamplingParams(max_tokens=1, top_p=0.8),
        SamplingParams(max_tokens=1, top_k=30, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_follow_the_distribution(params):
    draws = 40_000
    logits = logits_of(1, 1, 50, 1.5)
    tokens, _ = draw(logits.expand(draws, -1).clone(), rows_of([params] * draws), np.zeros(draws, dtype=int))
    seen = np.bincount(tokens.numpy(), minlength=50)
    expected = reference(logits[0].numpy(), params) * draws
    assert (seen[expected == 0] == 0).all()
    some = expected > 0
    chi2, freedom = ((seen - expected)[some] ** 2 / expected[some]).sum(), some.sum() - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


def test_a_row_does_not_depend_on_the_others():
    params = [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0),
        SamplingParams(max_tokens=1, temperature=0.7, top_k=5),
        SamplingParams(max_tokens=1, top_p=0.6, min_p=0.1),
    ]
    logits, seeds, positions = logits_of(0, 4, 2000), [3, -1, 2**70, 5], np.array([0, 9, 4, 100])
    tokens, logprobs = draw(logits.clone(), rows_of(params, seeds), positions)
    for row in range(4):
        alone = draw(logits[row : row + 1].clone(), rows_of([params[row]], [seeds[row]]), positions[row : row + 1])
        assert (int(tokens[row]), float(logprobs[row])) == (int(alone[0]), float(alone[1]))


def test_greedy_rows_take_the_best_token_with_log_probability_zero():
    logits = logits_of(2, 3, 97)
    best = logits.argmax(1).tolist()
    greedy, sampled = SamplingParams(max_tokens=1, temperature=0), SamplingParams(max_tokens=1)
    tokens, logprobs = draw(logits.clone(), rows_of([greedy, sampled, greedy]), np.zeros(3, dtype=int))
    assert [tokens[0], tokens[2], logprobs[0], logprobs[2]] == [best[0], best[2], 0, 0]
    tokens, logprobs = draw(logits.clone(), rows_of([greedy] * 3), np.zeros(3, dtype=int))
    assert tokens.tolist() == best and logprobs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("vocabulary", [5, 600, 50257])
def test_tokens_of_probability_zero_are_never_drawn(vocabulary):
    """The last and the first tokens have weight zero, where rounding at the ends of the distribution would land."""
    logits = torch.full((20_000 if vocabulary < 1000 else 200, vocabulary), -torch.inf)
    logits[:, 1:3] = torch.tensor([0.3, 0.1])
    tokens, _ = draw(logits, rows_of([SamplingParams(max_tokens=1)] * len(logits)), np.zeros(len(logits), dtype=int))
    assert set(tokens.tolist()) == {1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_do_not_pass_for_a_draw(temperature, broken):
    logits = logits_of(0, 1, 10)
    logits[0, 4] = broken
    _, logprob = draw(logits, rows_of([SamplingParams(max_tokens=1, temperature=temperature)]), np.zeros(1, dtype=int))
    assert torch.isnan(logprob).all()


def test_random_numbers_are_uniform_and_unrelated_across_seeds_and_positions():
    numbers = np.stack([uniform(seed_keys(range(300)), np.full(300, position)) for position in range(300)])
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert ((counts - 900) ** 2 / 900).sum() < 100 + 5 * np.sqrt(200)
    for shifted in (np.roll(numbers, 1, 0), np.roll(numbers, 1, 1), numbers.T):
        assert abs(np.corrcoef(numbers.ravel(), shifted.ravel())[0, 1]) < 5 / 300
    assert len(np.unique(numbers)) == numbers.size


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"stop_strings": ("",)},
    ],
)
def test_parameters_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("s").replace("_string", "")):
        SamplingParams(**{"max_tokens": 1, **wrong})


def test_a_tie_at_the_border_of_top_k_counts_for_top_p() -> None:
    """Top-p took its share of exactly k tokens, although those as likely as the k-th were kept: it then kept fewer."""
    for vocabulary in (6, 3000):
        logits = torch.full((1, vocabulary), -50.0)
        logits[0, :5] = torch.tensor([3.0, 2.0, 2.0, 2.0, 2.0])
        params = SamplingParams(max_tokens=1, top_k=2, top_p=0.6)
        filter_logits(logits, Rows.of([params], [0], logits.device))
        assert torch.isfinite(logits)[0].nonzero().squeeze(-1).tolist() == [0, 1, 2, 3, 4]
