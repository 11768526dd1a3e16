"""Settings of dynamic sampling: which groups of a step are trained on, and how many are generated for it.

Owns: their defaults, ranges and meaning. Refuses to know: how groups are made.
"""

from meshloom.config.base import Count, CountOrZero, Settings


class FilterGroupsSettings(Settings):
    """Dynamic sampling (DAPO): groups whose rewards have no spread are replaced by new ones."""

    enabled: bool = False
    """Generate in rounds until ``batch.prompts_per_step`` groups have some spread of rewards. Groups beyond these wait for the
    next step."""
    metric: str = "reward"
    """What must differ within a group: ``reward``, or the name of a further number that the reward function returns, such as
    ``acc``."""
    max_rounds: Count = 10
    """Rounds of generation a step may take; then it trains on what there is, and says so."""
    prompts_per_round: Count | None = None
    """Prompts of a round. Default: ``batch.prompts_per_step``."""
    surplus_steps: CountOrZero = 1
    """Steps that a group may be older than ``algorithm.max_lag_versions`` allows because it was generated beyond what a step
    needed. 0: it is dropped and counted as soon as it is too old, with a lag of 0 at once."""
