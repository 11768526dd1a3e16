"""Random ragged batches for the tests of the algorithms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.algorithms import PolicyInputs, PolicySettings

SETTINGS = PolicySettings(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


@dataclass(frozen=True)
class Tokens:
    """Per-token columns [T] and lengths [S]; one sample has no token in the mask, one has a span outside it at its end."""

    lengths_S: Tensor
    mask_T: Tensor
    logprob_T: Tensor
    old_logprob_T: Tensor
    reference_logprob_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor

    def inputs(self, logprob_T: Tensor, *, weighted: bool = True) -> PolicyInputs:
        return PolicyInputs(
            logprob_T=logprob_T,
            old_logprob_T=self.old_logprob_T,
            advantages_T=self.advantages_T,
            mask_T=self.mask_T,
            lengths_S=self.lengths_S,
            correction_weights_T=self.weights_T if weighted else None,
        )

    def select(self, samples: list[int]) -> tuple["Tokens", Tensor]:
        """The samples in that order, and where their tokens were, int64."""
        starts = self.lengths_S.cumsum(0) - self.lengths_S
        places = [torch.arange(int(starts[i]), int(starts[i] + self.lengths_S[i])) for i in samples]
        place_T = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
        columns = ("mask_T", "logprob_T", "old_logprob_T", "reference_logprob_T", "advantages_T", "weights_T")
        return Tokens(self.lengths_S[samples], *(self.__dict__[c][place_T] for c in columns)), place_T


def random_tokens(seed: int, num_samples: int = 12) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    lengths_S = torch.randint(1, 15, (num_samples,), generator=generator)
    lengths_S[:2] = torch.tensor([5, 7])
    total = int(lengths_S.sum())
    mask_T = torch.rand(total, generator=generator) < 0.7
    mask_T[:5] = False
    mask_T[5:9], mask_T[9:12] = True, False
    old_T = -normal(total).abs() - 0.01
    logprob_T = (old_T + 0.5 * normal(total)).clamp(max=-1e-3)
    reference_T = (old_T + 0.5 * normal(total)).clamp(max=-1e-3)
    return Tokens(lengths_S, mask_T, logprob_T, old_T, reference_T, normal(total), normal(total).exp())
