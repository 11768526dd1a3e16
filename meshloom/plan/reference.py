"""Whether a run has a reference of its own, and whether that changes.

Owns: these two rules. Refuses to know: devices, bytes.
"""

from meshloom.config.settings import KlPlace, TrainSettings


def has_own_reference(settings: TrainSettings) -> bool:
    """Whether there is a second model: a divergence is asked for, and not measured from the base under adapters."""
    own = settings.model.lora is None or settings.reference.model is not None
    return settings.algorithm.kl is not KlPlace.NONE and own


def refreshes(settings: TrainSettings) -> bool:
    """Whether the reference takes the actor's weights now and then."""
    return has_own_reference(settings) and settings.reference.refresh_every_steps > 0
