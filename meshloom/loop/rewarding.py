"""The rewards of a run, put together from its settings.

Owns: which scorers a run has, their share of the processors, and their names in errors. Refuses to know: how anything is
scored. Always holds: one function alone is scored as it is, by its pool; whatever has been started is ended with the context.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from meshloom.algorithms.shaping import overlong_penalty
from meshloom.config.reward_settings import (
    OVERLONG,
    ComponentSettings,
    JudgeSettings,
    OverlongSettings,
    RewardModelSettings,
    reward_models,
)
from meshloom.config.settings import EvalSettings, RewardSettings, TrainSettings
from meshloom.data.rows import RowNames
from meshloom.loop.reward_models import Models, ModelScorer
from meshloom.rewards.combined import Combination, Component, Computed, Scorer
from meshloom.rewards.functions import alone, errors_of, parts_of, require_columns
from meshloom.rewards.judge import DEADLINE_S, Judge
from meshloom.rewards.model import RewardModels, open_reader
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.pool import RewardPool


@contextmanager
def open_rewards(
    settings: TrainSettings | EvalSettings,
    names: RowNames,
    tokenizer: PreTrainedTokenizerBase,
    models: Models | None,
) -> Iterator[Scorer]:
    """What scores the samples of a run.

    Args:
        settings: of the run.
        names: of the rows: where they are from, for the default function, and their columns.
        tokenizer: of the model that samples.
        models: where reward models are asked; none where there are none.

    Raises:
        UserError: if a component cannot be made.
    """
    reward = settings.reward
    with ExitStack() as resources:
        if not reward.components and reward.overlong is None:
            pool = resources.enter_context(RewardPool(reward, names.sources))
            require_columns(pool.spec, pool.columns, names.columns)
            yield pool
            return
        given = parts_of(reward)
        makes = _Makes(settings, names, tokenizer, models, _workers_of_each(reward, given.values()), resources)
        components = [
            Component(
                name=name,
                scorer=makes.scorer(name, component),
                weight=component.weight,
                fallback=component.fallback,
            )
            for name, component in given.items()
        ]
        if reward.overlong is not None:
            longest = settings.rollout.max_response_tokens
            penalty = Computed(overlong_formula(reward.overlong, longest))
            components.append(Component(name=OVERLONG, scorer=penalty, judges=False))
        yield Combination(tuple(components))


def load_reward_models(settings: TrainSettings | EvalSettings, device: torch.device) -> RewardModels | None:
    """The reward's models on a device; none if it has none.

    Raises:
        UserError: if one cannot be loaded.
    """
    wanted = reward_models(settings.reward)
    return RewardModels(wanted, device) if wanted else None


def _workers_of_each(reward: RewardSettings, components: Iterable[ComponentSettings]) -> int:
    """Processes of each function: all of them together are as many as one alone would have."""
    functions = sum(component.model is None and component.judge is None for component in components)
    return max((reward.workers or len(os.sched_getaffinity(0))) // max(functions, 1), 1)


@dataclass(frozen=True)
class _Makes:
    """Makes the scorers of components."""

    settings: TrainSettings | EvalSettings
    names: RowNames
    tokenizer: PreTrainedTokenizerBase
    models: Models | None
    workers: int
    resources: ExitStack

    def scorer(self, name: str, component: ComponentSettings) -> Scorer:
        if component.judge is not None:
            return self._judge(name, component, component.judge)
        if component.model is not None:
            return self._model(name, component.model)
        return self._function(name, component)

    def _judge(self, name: str, component: ComponentSettings, judge: JudgeSettings) -> Scorer:
        kept = Path(judge.cache) if judge.cache else Path(self.settings.run_dir) / f"judge-{name}.sqlite"
        deadline_s = component.deadline_s or DEADLINE_S
        return self.resources.enter_context(
            Judge(name, judge, deadline_s=deadline_s, kept=kept if judge.use_cache else None)
        )

    def _model(self, name: str, model: RewardModelSettings) -> Scorer:
        if self.models is None:
            raise RuntimeError(f"the reward model {name} was not loaded")
        return ModelScorer(name, open_reader(name, model, self.tokenizer), self.models.ask, self.models.background)

    def _function(self, name: str, component: ComponentSettings) -> Scorer:
        reward = self.settings.reward
        with errors_of(name, reward):
            function = alone(reward, component, self.workers)
            pool = self.resources.enter_context(RewardPool(function, self.names.sources))
            require_columns(pool.spec, pool.columns, self.names.columns)
            return pool


def overlong_formula(settings: OverlongSettings, longest: int) -> Callable[[RewardRequest], float]:
    """DAPO's penalty of a response.

    Args:
        settings: of the penalty.
        longest: tokens of the longest response.
    """

    def penalty(request: RewardRequest) -> float:
        tokens = torch.tensor([len(request.response_ids)])
        found = overlong_penalty(
            tokens,
            max_tokens=settings.max_tokens or longest,
            buffer_tokens=settings.buffer_tokens,
            factor=settings.factor,
        )
        return float(found) + 0.0

    return penalty
