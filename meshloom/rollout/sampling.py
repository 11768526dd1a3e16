"""Drawing tokens: filters, the draw itself, log-probabilities, and the random numbers behind it.

Owns: the sampling distribution of ``SamplingParams``. Refuses to know: models, caches, requests. Always holds: a draw
depends on the row's logits, its seed and its position, never on the other rows or on a global random state; the
vocabulary is sorted only for rows that ask for it; the caller's logits are used up (worked on in place).

Legend: N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshloom.rollout.protocol import SamplingParams

_CHUNK = 512
_LEAST_CHUNK = 64
_FIRST_CANDIDATES = 1024


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_STEP = np.uint64(0x9E3779B97F4A7C15)


def seed_keys(seeds: Sequence[int]) -> np.ndarray:
    """One uint64 key a seed, [N]; any Python integer is a seed, taken modulo 2⁶⁴."""
    return _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _STEP)


def uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits, a function of key and position alone, float64 [N]."""
    bits = _mix(_mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP) ^ keys)
    return (bits >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Rows:
    """Sampling parameters of N rows as columns [N, 1]; a column that changes no row is none.

    ``candidates`` is how many of the most likely tokens the rank filters look at first, ``sure`` whether those are
    certain to be enough.
    """

    keys: np.ndarray
    greedy: Tensor | None
    all_greedy: bool
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    candidates: int
    sure: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> "Rows":
        greedy = [p.temperature == 0 for p in params]

        def column(values: list, neutral: float) -> Tensor | None:
            changed = [neutral if g else v for v, g in zip(values, greedy, strict=True)]
            if all(value == neutral for value in changed):
                return None
            dtype = torch.int64 if isinstance(neutral, int) else torch.float64
            return torch.tensor(changed, dtype=dtype, device=device)[:, None]

        nucleus_of_all = any(p.top_p < 1 and p.top_k == 0 and p.temperature > 0 for p in params)
        return cls(
            keys=seed_keys(seeds),
            greedy=torch.tensor(greedy, device=device) if any(greedy) and not all(greedy) else None,
            all_greedy=all(greedy),
            temperature=column([p.temperature for p in params], 1.0),
            top_k=column([p.top_k for p in params], 0),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            candidates=max(_FIRST_CANDIDATES if nucleus_of_all else 1, *(p.top_k for p in params)),
            sure=not nucleus_of_all,
        )


def draw(logits_NV: Tensor, rows: Rows, positions: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits_NV: the model's logits; used up.
        rows: how to sample each row.
        positions: place of the token in its response, from 0, int [N].

    Returns:
        Tokens (int64) and their log-probabilities under the filtered distribution (float64), each [N]. A greedy row is
        a distribution of one token: log-probability 0. Logits that are not finite give log-probability NaN.
    """
    if rows.all_greedy:
        best, token = logits_NV.max(1)
        return token, best.double() * 0
    greedy = logits_NV.max(1) if rows.greedy is not None else None
    if rows.temperature is not None:
        logits_NV.div_(rows.temperature.to(logits_NV.dtype))
    filter_logits(logits_NV, rows)
    chance = torch.from_numpy(uniform(rows.keys, positions)).to(logits_NV.device)
    token, logprob = _invert(logits_NV, chance)
    if greedy is not None:
        token = torch.where(rows.greedy, greedy.indices, token)
        logprob = torch.where(rows.greedy, greedy.values.double() * 0, logprob)
    return token, logprob


def filter_logits(logits_NV: Tensor, rows: Rows) -> None:
    """Set what top-k, top-p and min-p drop to minus infinity, in place.

    Each filter is a threshold on the logits, so a token as likely as the last one kept is kept too.
    """
    threshold = None
    if rows.top_k is not None or rows.top_p is not None:
        threshold = _rank_threshold(logits_NV, rows)
    if rows.min_p is not None:
        least = logits_NV.amax(1, keepdim=True) + rows.min_p.to(logits_NV.dtype).log()
        threshold = least if threshold is None else torch.maximum(threshold, least)
    if threshold is not None:
        logits_NV.masked_fill_(logits_NV < threshold, -torch.inf)


def _rank_threshold(logits_NV: Tensor, rows: Rows) -> Tensor:
    """Smallest logit that top-k and then top-p keep, [N, 1]; all tokens are sorted only where few do not tell it."""
    num_rows, vocabulary = logits_NV.shape
    keep = torch.full((num_rows, 1), vocabulary, device=logits_NV.device)
    if rows.top_k is not None:
        keep = torch.where(rows.top_k > 0, rows.top_k.clamp(max=vocabulary), keep)
    share = torch.ones_like(keep, dtype=torch.float64) if rows.top_p is None else rows.top_p
    threshold, certain = _threshold_among(logits_NV, min(rows.candidates, vocabulary), keep, share)
    if not rows.sure and not bool(certain.all()):
        threshold, _ = _threshold_among(logits_NV, vocabulary, keep, share)
    return threshold


def _threshold_among(logits_NV: Tensor, candidates: int, keep: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold as the most likely ``candidates`` tell it, and for which rows that is certain, each [N, 1]."""
    best = logits_NV.topk(candidates, dim=1).values
    highest = best[:, :1]
    everything = keep == logits_NV.shape[1]
    lowest = torch.where(everything, -torch.inf, best.gather(1, keep.clamp(max=candidates) - 1))
    weight = torch.where(best >= lowest, (best - highest).double().exp(), 0.0)
    total = weight.sum(1, keepdim=True)
    if candidates < logits_NV.shape[1]:
        # Those beyond the candidates that are as likely as the last one kept count too.
        kept = torch.where(logits_NV >= lowest, (logits_NV - highest).exp(), 0.0)
        total = kept.sum(1, keepdim=True, dtype=torch.float64)
    reached = weight.cumsum(1) >= share * total
    cut = reached.any(1, keepdim=True) & (share < 1)
    last = torch.where(cut, reached.int().argmax(1, keepdim=True), keep.clamp(max=candidates) - 1)
    threshold = torch.where(everything & ~cut, -torch.inf, best.gather(1, last))
    return threshold, torch.where(everything, cut | (share >= 1), keep <= candidates)


def _invert(logits_NV: Tensor, chance_N: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution in two levels: sums of chunks, then within the chunk, both in float64.

    Exact to the rounding of the weights: a token of weight zero is never drawn.
    """
    num_rows, vocabulary = logits_NV.shape
    weight = logits_NV.sub_(logits_NV.amax(1, keepdim=True)).exp_()
    size = max(_LEAST_CHUNK, math.gcd(vocabulary, _CHUNK))
    if vocabulary % size:
        weight = torch.nn.functional.pad(weight, (0, size - vocabulary % size))
    chunks = weight.view(num_rows, -1, size)
    until = chunks.sum(2, dtype=torch.float64).cumsum(1)
    total = until[:, -1:]
    target = chance_N[:, None] * total
    chunk = _first_above(until, target)
    before = torch.where(chunk > 0, until.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, size))[:, 0]
    place = _first_above(inside.cumsum(1, dtype=torch.float64), target - before)
    token = (chunk * size + place)[:, 0]
    logprob = (inside.gather(1, place).double().log() - total.log())[:, 0]
    return token, logprob


def _first_above(until: Tensor, target: Tensor) -> Tensor:
    """First place whose cumulative sum exceeds the target; the last one of non-zero weight if rounding leaves none."""
    below_end = torch.nextafter(until[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(until, torch.minimum(target, below_end), right=True).clamp(max=until.shape[1] - 1)
