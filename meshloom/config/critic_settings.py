"""Settings of the critic: the value model of PPO, its optimizer, its loss and its warm-up.

Owns: their defaults, ranges and meaning, and whether a run has a critic. Refuses to know: devices, tensors, files' contents.
"""

from meshloom.config.base import Count, CountOrZero, Place, Positive, Settings
from meshloom.config.model_settings import OptimizerSettings


class CriticSettings(Settings):
    """The value model, which only ``algorithm.advantage: gae`` asks. It learns from the same samples as the actor, in as many
    updates a step."""

    model: Place | None = None
    """Hugging Face folder: any causal language model, whose output head is replaced by one of a single output that begins at 0;
    or a folder that has such a head, as a checkpoint's ``critic`` or a reward model has. Default: ``model.path``."""
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    """Its optimizer."""
    warmup_steps: CountOrZero = 0
    """First steps of the run in which the critic learns alone, and the actor is not updated."""
    value_clip: Positive | None = 0.5
    """How far a value may move from what it was before the step's updates until that gains nothing; none: no bound."""
    tokens_per_microbatch: Count | None = None
    """Tokens one device holds at once in the critic's passes. Default: ``batch.tokens_per_microbatch``."""
