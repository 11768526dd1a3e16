"""What workers tell the controller of their devices and models. Plain records, which travel."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A device before anything is on it.

    Args:
        free_bytes: of a GPU; none for the processors.
        described: its type, and the name that a GPU's driver gives.
    """

    free_bytes: int | None
    described: dict[str, str | None]


def least_free_bytes(devices: Sequence[DeviceFacts]) -> int | None:
    """What every GPU of a run has free; none for the processors."""
    return min((facts.free_bytes for facts in devices if facts.free_bytes is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the controller must know of a model that is trained, as far as one rank knows it.

    Args:
        vocabulary: tokens of the model; 0 where its head is on other ranks.
        checkpoint_bytes: about what the files of a checkpoint will take; 0 but on the first rank of a stage.
    """

    vocabulary: int
    checkpoint_bytes: int
