"""The weight of the divergence in the reward, over the steps of a run.

Owns: the weight where the settings say that it adapts, and what is shown of it. Refuses to know: the rule
(``algorithms.kl.AdaptiveKl``). Always holds: a batch is judged with the weight that was there before it.
"""

from dataclasses import dataclass

from torch import Tensor

from meshloom.algorithms.kl import AdaptiveKl
from meshloom.config.settings import AlgorithmSettings
from meshloom.loop.objective import mean_divergence
from meshloom.samples import Samples


@dataclass
class KlWeight:
    """The weight now.

    Args:
        coefficient: β.
        settings: of the algorithm.
    """

    coefficient: float
    settings: AlgorithmSettings
    _shown: dict[str, float] | None = None

    @classmethod
    def of(cls, settings: AlgorithmSettings) -> "KlWeight":
        """The weight a run begins with."""
        return cls(settings.kl_coefficient, settings)

    def adapt(self, kl_T: Tensor, batch: Samples, *, follows: bool = True) -> None:
        """Take note of a step's divergence, and let the weight follow it where it adapts, and the actor learns."""
        kl, count = mean_divergence(kl_T, batch)
        self._shown = {"kl_reward": kl, "kl_coefficient": self.coefficient}
        if follows and self.settings.kl_control == "adaptive":
            rule = AdaptiveKl(
                coefficient=self.coefficient, target=self.settings.kl_target, horizon=self.settings.kl_horizon
            )
            self.coefficient = rule.updated(kl, count).coefficient

    def metrics(self) -> dict[str, float]:
        """The step's divergence and the weight it was judged with, where there is one in the reward."""
        return dict(self._shown or {})
