"""The log-probability probe: do engine and trainer give the same tokens the same probability?

Owns: the tokens that are asked about and the comparison. Refuses to know: engines and models but for one function of each.
Always holds: the tokens are the same each time, so that two probes differ by the weights alone.
"""

from collections.abc import Callable, Sequence

import torch

from meshloom.config.errors import RunFault
from meshloom.samples import Samples
from meshloom.train.model import TrainedModel

_SEQUENCES, _TOKENS = 4, 16
_SEED = 20_011

TokenLogprobs = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""From sequences of ids to the log-probability of each id but the first, at temperature 1."""


def probe_ids(vocabulary: int) -> list[list[int]]:
    """The tokens of the probe: fixed ones, spread over the vocabulary."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(vocabulary, (_SEQUENCES, _TOKENS), generator=generator).tolist()


def trainer_logprobs(model: TrainedModel) -> TokenLogprobs:
    """What a trained model gives."""

    def logprobs(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        samples = Samples(lengths, {"ids": ids, "mask": torch.ones_like(ids, dtype=torch.bool)})
        samples["mask"][samples.offsets[:-1]] = False
        values = model.forward(samples, temperature=1.0)[0]
        return [part[1:].tolist() for part in values.split(lengths.tolist())]

    return logprobs


def probe(engine: TokenLogprobs, trainer: TokenLogprobs, ids: Sequence[Sequence[int]], *, tolerance: float) -> float:
    """Compare both sides.

    Args:
        engine, trainer: give log-probabilities.
        ids: the tokens asked about.
        tolerance: of the mean absolute difference.

    Returns:
        The mean absolute difference.

    Raises:
        RunFault: if it is larger than the tolerance.
    """
    sides = [torch.tensor(side(ids), dtype=torch.float64) for side in (engine, trainer)]
    gap = float((sides[0] - sides[1]).abs().mean())
    if not gap <= tolerance:
        raise RunFault(
            f"engine and trainer disagree about fixed tokens: mean |Δ log-prob| is {gap:.3g}",
            where="rollout.vllm.max_probe_gap",
            why=f"more than {tolerance:g}, right after the weights were moved",
            fix="use the same dtype for both, rollout.engine=torch, or raise the bound if the model is only noisy",
        )
    return gap
