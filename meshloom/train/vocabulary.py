"""A vocabulary that is cut over ranks: embedding, log-probabilities and entropy without gathering logits.

Owns: what ranks tell each other about a row: three numbers. Refuses to know: how a rank computes its logits. Always holds: what
``meshloom.train.logprobs`` says, of the whole vocabulary; a target that is not of a rank's part is −1 there.

With l the logsumexp of a rank's part and H the entropy within it, the whole has L = log Σ e^l, and its entropy is
Σ e^(l − L) (H + L − l).

Legend: N rows, V vocabulary of a rank, P ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.train.exchange import add_up_own


@dataclass(frozen=True)
class VocabularyPart:
    """The part of this rank.

    Args:
        first: token of the part.
        size: tokens of the part.
        group: the ranks, in the order of their parts.
    """

    first: int
    size: int
    group: dist.ProcessGroup

    def own(self, ids: Tensor) -> Tensor:
        """Places of tokens in this part; −1 for those of other parts."""
        places = ids - self.first
        return torch.where((places >= 0) & (places < self.size), places, -1)

    def combine(self, logprob_N: Tensor, entropy_N: Tensor, lse_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the whole vocabulary, from those of this part, where a target that is not here has z = 0."""
        told = torch.stack([logprob_N + lse_N, entropy_N, lse_N])
        all_told = [torch.empty_like(told) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(all_told, told, group=self.group)
        chosen_PN, entropy_PN, lse_PN = torch.stack(all_told, 1)
        whole_N = torch.logsumexp(lse_PN, 0)
        share_PN = (lse_PN - whole_N).exp()
        return chosen_PN.sum(0) - whole_N, (share_PN * (entropy_PN + whole_N - lse_PN)).sum(0), whole_N

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' gradients."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def embed(self, ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """This rank's piece of the rows of a table cut so.

        Args:
            ids: tokens, [1, C]; C divides by the ranks.
            look_up: gives rows of this part for places in it.
        """
        places = self.own(ids)
        rows = look_up(places.clamp(min=0))
        return add_up_own(torch.where((places >= 0)[..., None], rows, 0), self.group, 1)
