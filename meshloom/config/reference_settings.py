"""Settings of the reference policy, from which the divergence is measured.

Owns: their defaults, ranges and meaning. Refuses to know: models.
"""

from meshloom.config.base import CountOrZero, Place, Settings


class ReferenceSettings(Settings):
    """The policy that ``algorithm.kl`` measures the divergence from; used only where one is asked for."""

    model: Place | None = None
    """Folder of the reference, of the same architecture as ``model.path``. Default: ``model.path``, or with adapters the base
    under them, which needs no second model."""
    refresh_every_steps: CountOrZero = 0
    """Steps after which the reference takes the weights of the actor; 0: never. Needs a reference of its own."""
