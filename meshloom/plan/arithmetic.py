"""Arithmetic of passes: what a token costs, and what was computed.

Owns: the formula that plan, trainer and benchmarks share. Refuses to know: seconds, devices. Always holds: what is counted
was computed for the model's output or gradient; recompute, padding and shared prompts computed again would not count, and
attention is counted apart.

A token costs 2 operations a parameter forward, 2 backward for the gradient of its input, and 2 for that of the parameter if
it is trained: 6, or 4 for a frozen one. N of the layers are all their parameters that a token meets; N of the head is its
matrix; the embedding is looked up and costs nothing. Attention costs 12 · layers · query width a pair of tokens of which one
sees the other (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, where both halves of the causal square count).
"""

from dataclasses import dataclass

from meshloom.plan.decoder_numbers import DecoderNumbers


@dataclass(frozen=True)
class Cost:
    """Operations of a pass.

    Args:
        per_token: of a token that the layers compute.
        per_prediction: of a token that the head predicts.
        per_pair: of two tokens that see each other in attention.
    """

    per_token: float
    per_prediction: float
    per_pair: float


@dataclass(frozen=True)
class Work:
    """What was computed.

    Args:
        tokens: that the layers computed; a shared prompt counts once.
        predictions: rows that met the head.
        pairs: tokens that see each other in attention, over samples.
        packed: tokens that count for the bound of microbatches, shared prompts in each sample; 0 where that is not known: as
            many as are computed.
    """

    tokens: int = 0
    predictions: int = 0
    pairs: int = 0
    packed: int = 0
    samples: int = 0
    alike: bool = False

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens + other.tokens,
            self.predictions + other.predictions,
            self.pairs + other.pairs,
            self.packed + other.packed,
            self.samples + other.samples,
            self.alike and other.alike,
        )

    def flops(self, cost: Cost) -> float:
        """Operations, attention left out."""
        return self.tokens * cost.per_token + self.predictions * cost.per_prediction

    def attention_flops(self, cost: Cost) -> float:
        """Operations of attention's scores and sums."""
        return self.pairs * cost.per_pair


def pass_cost(model: DecoderNumbers, *, backward: bool) -> Cost:
    """What a pass costs.

    Args:
        model: in numbers.
        backward: whether gradients of all parameters are computed too.
    """
    passes = 3 if backward else 1
    return Cost(
        per_token=2.0 * passes * model.computed,
        per_prediction=2.0 * passes * model.head_matrix,
        per_pair=2.0 * passes * len(model.layers) * (model.query_width + model.value_width),
    )
