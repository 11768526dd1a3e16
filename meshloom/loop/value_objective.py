"""What the critic learns, and what is told of it.

Owns: the wiring between batches and the value loss, and the numbers that say how good values are. Refuses to know: models,
devices. Always holds: the loss is reduced by the one reducer, with the denominators of the update and the actor's reduction; an
invalid sample is in no number.

Legend: T tokens end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshloom.algorithms.reduce import Denominators, denominators, reduce
from meshloom.algorithms.value import value_loss
from meshloom.config.errors import RunFault
from meshloom.config.settings import TrainSettings
from meshloom.loop.model_verbs import Model
from meshloom.samples import Samples
from meshloom.train.model import LossParts
from meshloom.train.optimizer import StepStats


@dataclass(frozen=True)
class ValueObjective:
    """The value loss of an update.

    Args:
        clip: how far a value may move from the old one.
        reduction: how token losses become one number.
        totals: denominators of the update.
    """

    clip: float
    reduction: str
    totals: Denominators

    @classmethod
    def of(cls, update: Samples, settings: TrainSettings) -> "ValueObjective":
        algorithm, clip = settings.algorithm, settings.critic.value_clip
        totals = denominators(update["mask"], update.lengths, constant=algorithm.reduction_constant)
        return cls(float("inf") if clip is None else clip, algorithm.reduction, totals)

    def read(self, update: Samples) -> Samples:
        """The update with what the critic and this loss read of it, and no other column of tokens."""
        names = ("ids", "mask", "values", "returns")
        return replace(update, tokens={name: update.tokens[name] for name in names}, meta={})

    def __call__(self, microbatch: Samples, value_T: Tensor) -> LossParts:
        """This microbatch's share of the loss, and what the step's metrics need."""
        mask_T, old_T = microbatch["mask"], microbatch["values"].to(value_T.dtype)
        returns_T = microbatch["returns"].to(value_T.dtype)
        losses_T = value_loss(value_T, old_T, returns_T, mask_T, clip=self.clip)
        total = reduce(losses_T, mask_T, microbatch.lengths, self.reduction, self.totals)
        moved_T = ((value_T.detach() - old_T).abs() > self.clip) & mask_T
        return LossParts(total, {"value_clipped": moved_T.sum(), "value_tokens": mask_T.sum()})


@dataclass(frozen=True)
class ValueLesson:
    """What a step's updates of the critic reported, and what their optimizer steps did."""

    updates: Sequence[dict[str, Any]]
    steps: Sequence[StepStats]

    def metrics(self) -> dict[str, float]:
        """Means over updates; of shares, over tokens."""
        if not self.steps:
            return {}
        tokens = max(sum(float(update["value_tokens"]) for update in self.updates), 1.0)
        return {
            "value_loss": sum(float(update["loss"]) for update in self.updates) / len(self.updates),
            "value_clip_share": sum(float(update["value_clipped"]) for update in self.updates) / tokens,
            "critic_grad_norm": sum(step.grad_norm for step in self.steps) / len(self.steps),
            "critic_learning_rate": self.steps[-1].learning_rate,
        }


def learn_values(critic: Model, updates: Sequence[Samples], settings: TrainSettings, total_updates: int) -> ValueLesson:
    """The critic's updates of a step.

    Args:
        critic: that learns.
        updates: samples of each.
        settings: of the run.
        total_updates: of the whole run, for the schedule.
    """
    reports, steps = [], []
    for update in updates:
        loss = ValueObjective.of(update, settings)
        reports.append(critic.forward_backward(loss.read(update), loss))
        steps.append(critic.optim_step(total_updates))
    return ValueLesson(reports, steps)


def check_read(batch: Samples, rows: int | None) -> None:
    """Refuse to ask a critic about tokens that it does not have: rows of the actor's tables that no tokenizer gives, sampled.

    Args:
        batch: with ``ids``.
        rows: tokens of the critic; none if that is not known.

    Raises:
        RunFault: if there are such.
    """
    if rows is not None and len(batch["ids"]) and (highest := int(batch["ids"].max())) >= rows:
        raise RunFault(
            f"the actor wrote token {highest}, the critic has {rows} tokens, counted from 0",
            where="critic.model",
            why="it is a token of the actor's table that its tokenizer does not have",
            fix="a critic whose table is as large as the actor's, or leave it out; the run goes on with --resume",
        )


def value_metrics(batch: Samples) -> dict[str, float]:
    """How good a batch's values were before its updates, over the model's tokens of valid samples.

    The explained variance is 1 − Var(returns − values) ÷ Var(returns): 1 for values that foretell returns, 0 for values that
    say no more than their mean, below 0 for worse. Where all returns are the same it is not defined, and left out.
    """
    if "values" not in batch.tokens:
        return {}
    valid_T = batch["valid"].repeat_interleave(batch.lengths) & batch["mask"]
    value_M, return_M = batch["values"][valid_T].double(), batch["returns"][valid_T].double()
    count = len(value_M)
    if not count:
        return {}
    found = {"value_mean": float(value_M.mean()), "return_mean": float(return_M.mean())}
    spread = float((return_M - return_M.mean()).square().sum())
    error_M = return_M - value_M
    left = float((error_M - error_M.mean()).square().sum())
    if spread > _LEAST_SPREAD * count * max(1.0, float(return_M.abs().max()) ** 2):
        found["explained_variance"] = 1.0 - left / spread
    return found


_LEAST_SPREAD = 1e-12
"""Mean square below which a spread, as a share of the largest, is rounding."""
