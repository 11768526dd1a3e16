"""What the algorithm may ask of a model, wherever the model is.

Owns: the verbs. Refuses to know: devices, ranks, which model answers.

Legend: T tokens of all samples end to end.
"""

from typing import Any, Protocol

from torch import Tensor

from meshloom.samples import Samples
from meshloom.train.model import Loss
from meshloom.train.optimizer import StepStats


class Model(Protocol):
    """A policy or a critic: on one device (``train.model.TrainedModel``), or over ranks (``loop.model_role.RemoteModel``)."""

    def forward(self, samples: Samples, *, temperature: float = 1.0, adapters: bool = True) -> tuple[Tensor, ...]:
        """Log-probs first, or a critic's values, [T]; without gradients."""
        ...

    def forward_backward(self, samples: Samples, loss: Loss, *, temperature: float = 1.0) -> dict[str, Any]:
        """Add the gradient of one update's loss; what the loss reported."""
        ...

    def optim_step(self, total_updates: int) -> StepStats:
        """One optimizer update from the gradients added so far."""
        ...

    def take_utilization(self, seconds: float) -> dict[str, float]:
        """Share of the device's peak that passes have reached since the last call."""
        ...


class ReferencePolicy(Protocol):
    """What the divergence is measured from."""

    def logprobs(self, samples: Samples, *, temperature: float) -> Tensor:
        """Log-probs [T]."""
        ...

    def refresh(self, actor: Any, version: int) -> None:
        """Take the weights of the actor, which is where this is, and of ``version``."""
        ...
