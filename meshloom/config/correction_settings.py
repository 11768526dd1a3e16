"""Settings of the correction for what sampler and trainer disagree on.

Owns: their defaults, ranges and meaning. Refuses to know: how a weight or a rejection is computed (``algorithms.correction``).
"""

from typing import Literal

from meshloom.config.base import NotNegative, Positive, Settings


class CorrectionSettings(Settings):
    """Importance weights w = π_trainer/π_sampler, and rejection. Both are off unless asked for; the gap is always measured."""

    weights: Literal["none", "truncated", "banded"] = "none"
    """``truncated``: each token's policy loss times min(w, threshold); ``banded``: times w where low ≤ w ≤ threshold, 0 where
    not."""
    level: Literal["token", "sequence"] = "token"
    """w of each token, or the product over its sample's tokens."""
    threshold: Positive = 2.0
    """Largest weight."""
    low: NotNegative = 0.5
    """Smallest weight of ``banded``."""
    reject: Literal["none", "k1", "k2", "k3"] = "none"
    """Leave tokens out of the update, and of its denominators, by this measure: ``k1`` |log w|, ``k2`` ½ log² w,
    ``k3`` w − log w − 1."""
    reject_level: Literal["token", "sequence-mean", "sequence-max"] = "token"
    """What is left out as one: each token, or a sample by the mean (with k1: the magnitude of the mean of log w) or the largest
    of its tokens."""
    reject_threshold: Positive | None = None
    """What measures more is left out; needed where ``reject`` is not none."""
