"""Who does what in a reinforcement-learning run, and what a step taught them.

Owns: the two records that the loop's programs hand around. Refuses to know: where roles are, how they work.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from meshloom.loop.collect import Collector
from meshloom.loop.model_verbs import Model, ReferencePolicy
from meshloom.loop.objective import update_metrics
from meshloom.loop.validate import Validator
from meshloom.loop.value_objective import ValueLesson
from meshloom.rollout.protocol import Engine
from meshloom.train.optimizer import StepStats

ModelT = TypeVar("ModelT", bound=Model, covariant=True)
ReferenceT = TypeVar("ReferenceT", bound=ReferencePolicy, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Roles(Generic[ModelT, ReferenceT]):
    """Who does what. The reference, the critic and the validator are there where the settings ask for them."""

    actor: ModelT
    reference: ReferenceT | None
    critic: ModelT | None = None
    engine: Engine
    collector: Collector
    validator: Validator | None

    def check(self) -> None:
        """Refuse prompts that the engine could never answer."""
        self.collector.check()
        if self.validator is not None:
            self.validator.collector.check()


@dataclass(frozen=True)
class Lesson:
    """What the updates of a step reported, and what their optimizer steps did; and the same of the critic."""

    updates: list[dict[str, Any]]
    steps: list[StepStats]
    critic: ValueLesson = ValueLesson((), ())

    @property
    def num_updates(self) -> int:
        return len(self.steps)

    def metrics(self) -> dict[str, float]:
        """Numbers of the actor's updates; none where it had none."""
        if not self.steps:
            return {}
        return {
            **update_metrics(self.updates),
            "grad_norm": sum(step.grad_norm for step in self.steps) / len(self.steps),
            "learning_rate": self.steps[-1].learning_rate,
        }
