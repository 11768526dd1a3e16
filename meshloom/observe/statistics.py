"""Interval and estimator formulas for evaluation.

Owns: the Wilson interval and the unbiased pass@k. Refuses to know: samples, rewards, files. Always holds: every result
is a probability between 0 and 1.
"""

from math import comb, sqrt
from statistics import NormalDist


def wilson_interval(successes: float, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of a share (Wilson 1927; it stays inside 0 and 1 and holds for few trials).

    Args:
        successes: how often it happened, 0 to ``trials``; a trial that happened in part counts as that part.
        trials: how often it could have happened; none at all gives the whole range, (0, 1).
        confidence: probability that the interval covers the true share, between 0 and 1.

    Raises:
        ValueError: if the numbers are out of range.
    """
    if not 0 <= successes <= trials or not 0 < confidence < 1:
        raise ValueError(f"no interval for {successes} of {trials} at confidence {confidence}")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At 0 and at all successes one bound is exact, which rounding would miss by an ulp.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that one of ``k`` samples solves the problem, estimated without bias from more samples.

    1 − C(samples − solved, k) / C(samples, k), equation 1 of Chen et al. 2021 (arXiv:2107.03374), in exact integers.

    Raises:
        ValueError: if there are fewer samples than ``k``, or more solved than samples.
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"no pass@{k} from {solved} solved of {samples} samples")
    return 1.0 - comb(samples - solved, k) / comb(samples, k)
