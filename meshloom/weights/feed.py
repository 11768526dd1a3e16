"""What an engine with weights of its own is given: the trainer's weights when it asks, and the proof that they arrived.

Owns: one trainer–engine pair. Refuses to know: schedules, the engine but for the two functions it hands over.
"""

import torch

from meshloom.train.model import TrainedModel
from meshloom.weights.movement import Moved, Movement, Receiver
from meshloom.weights.probe import TokenLogprobs, probe, probe_ids, trainer_logprobs
from meshloom.weights.source import WeightsSource

DEFAULT_GAPS = {torch.float32: 0.02}
"""Most that fixed tokens may differ in mean absolute log-probability; other dtypes round more."""
_ROUNDED_GAP = 0.25


def gap_allowed(dtype: torch.dtype) -> float:
    """Most that fixed tokens may differ where both sides compute in a dtype."""
    return DEFAULT_GAPS.get(dtype, _ROUNDED_GAP)


class TrainerFeed:
    """The feed from a trained model.

    Args:
        model: the trainer's.
        max_gap: tolerance of the probe; none: by the model's dtype.

    ``movement.last`` is the newest movement; ``gap`` what the newest probe found.
    """

    def __init__(self, model: TrainedModel, max_gap: float | None = None) -> None:
        self.movement = Movement(WeightsSource(model))
        self.gap: float | None = None
        self._model = model
        self._max_gap = max_gap or gap_allowed(model.head.weight.dtype)
        self._ids = probe_ids(len(model.head.weight))

    def move(self, receiver: Receiver) -> Moved:
        """Make the engine's weights those of the trainer.

        Raises:
            RunFault: that names a tensor that did not arrive.
        """
        return self.movement.move(receiver)

    def prove(self, engine: TokenLogprobs) -> None:
        """Compare the log-probabilities of fixed tokens.

        Raises:
            RunFault: if engine and trainer disagree.
        """
        self.gap = probe(engine, trainer_logprobs(self._model), self._ids, tolerance=self._max_gap)
