"""The reference policy: what the actor's divergence is measured from.

Owns: a frozen model, or the base under the actor's adapters; taking the actor's weights when it is told to. Always holds: it
never trains; between two refreshes it does not change.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.samples import Samples
from meshloom.train.model import TrainedModel


@dataclass(frozen=True)
class Reference:
    """A model that is only asked.

    Args:
        model: a frozen copy; or the actor itself, whose adapters are then left out.
        adapters: false leaves the adapters out.
    """

    model: TrainedModel
    adapters: bool

    def logprobs(self, samples: Samples, *, temperature: float) -> Tensor:
        """Log-probabilities [T] on the CPU, 0 where ``mask`` is false."""
        return self.model.forward(samples, temperature=temperature, adapters=self.adapters)[0]

    @torch.no_grad()
    def refresh(self, actor: TrainedModel, version: int) -> None:
        """Take the weights of the actor, which are of ``version``; both are on the device."""
        mine = dict(self.model.module.named_parameters())
        for name, parameter in actor.module.named_parameters():
            mine[name].copy_(parameter)
