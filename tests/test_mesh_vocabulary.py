"""Log-probs and entropies of a vocabulary that is cut over ranks are those of the whole one, with their gradients."""

import pytest
import torch
import torch.distributed as dist

from meshloom.train.logprobs import logprobs_and_entropy
from meshloom.train.vocabulary import VocabularyPart
from tests.ranks import Ranks

N, D, V, RANKS = 11, 8, 48, 4


class Head:
    """What the log-probs need of an output head."""

    def __init__(self, weight: torch.Tensor, part: VocabularyPart | None) -> None:
        self.weight, self.bias, self.scale, self.softcap = weight, None, 1.0, 20.0
        self.gradient_total, self.part = None, part

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh((hidden @ self.weight.T).float() / self.softcap) * self.softcap


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(N, D, generator=generator), 3 * torch.randn(V, D, generator=generator)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def values(fused: bool, part: VocabularyPart | None, num_rows: int = N) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies, and gradients of hidden states and of the weight."""
    hidden, weight, targets = inputs()
    if part is not None:
        weight = weight[part.first : part.first + part.size].clone()
    hidden, weight = hidden[:num_rows].requires_grad_(), weight.requires_grad_()
    function = logprobs_and_entropy
    if fused:
        from meshloom.train.fused_logprobs import fused_logprobs_and_entropy as function
    logprob, entropy = function(Head(weight, part), hidden, targets[:num_rows], temperature=0.8, chunk_bytes=400)
    scale = torch.arange(num_rows)
    (logprob * scale + entropy * scale.sqrt()).sum().backward()
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("fused", [False, True], ids=["chunks", "kernels"])
@pytest.mark.parametrize("num_rows", [N, 0])
def test_a_cut_vocabulary_is_as_the_whole_one(four_ranks: Ranks, fused: bool, num_rows: int) -> None:
    if fused:
        pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
        if torch.cuda.is_available():
            pytest.skip("kernels on the processor need Triton's interpreter")
    logprob, entropy, grad_hidden, grad_weight = values(False, None, num_rows)
    for rank, found in enumerate(four_ranks.run(_part_of_rank, fused, num_rows)):
        own = grad_weight[rank * V // RANKS : (rank + 1) * V // RANKS]
        for mine, whole in zip(found, (logprob, entropy, grad_hidden, own), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)


def _part_of_rank(fused: bool, num_rows: int) -> tuple[torch.Tensor, ...]:
    size = V // RANKS
    part = VocabularyPart(dist.get_rank() * size, size, dist.group.WORLD)
    return values(fused, part, num_rows)
