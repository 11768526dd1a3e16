"""The rewards of a run, put together from its settings.

Owns: which scorers a run has, their share of the processors, and their names in errors. Refuses to know: how anything is
scored. Always holds: one function alone is scored as it is, by its pool; whatever has been started is ended with the context.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from meshloom.algorithms.shaping import overlong_penalty
from meshloom.config.errors import UserError
from meshloom.config.reward_settings import FUNCTION, OVERLONG, ComponentSettings, OverlongSettings
from meshloom.config.settings import EvalSettings, RewardSettings, TrainSettings
from meshloom.rewards.combined import Combination, Component, Computed, Scorer
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.pool import RewardPool


@contextmanager
def open_rewards(settings: TrainSettings | EvalSettings, data_sources: Iterable[str]) -> Iterator[Scorer]:
    """What scores the samples of a run.

    Args:
        settings: of the run.
        data_sources: ``data_source`` of all rows, for the default function.

    Raises:
        UserError: if a component cannot be made.
    """
    reward = settings.reward
    with ExitStack() as resources:
        if not reward.components and reward.overlong is None:
            yield resources.enter_context(RewardPool(reward, data_sources))
            return
        given = reward.components or {FUNCTION: ComponentSettings(function=reward.function, kwargs=reward.kwargs)}
        workers = _workers_of_each(reward, given.values())
        components = [
            Component(
                name=name,
                scorer=_scorer(name, component, settings, data_sources, workers, resources),
                weight=component.weight,
                fallback=component.fallback,
            )
            for name, component in given.items()
        ]
        if reward.overlong is not None:
            longest = settings.rollout.max_response_tokens
            components.append(Component(name=OVERLONG, scorer=Computed(overlong_formula(reward.overlong, longest))))
        yield Combination(tuple(components))


def _workers_of_each(reward: RewardSettings, components: Iterable[ComponentSettings]) -> int:
    """Processes of each function: all of them together are as many as one alone would have."""
    functions = sum(component.model is None and component.judge is None for component in components)
    return max((reward.workers or len(os.sched_getaffinity(0))) // max(functions, 1), 1)


def _scorer(
    name: str,
    component: ComponentSettings,
    settings: TrainSettings | EvalSettings,
    data_sources: Iterable[str],
    workers: int,
    resources: ExitStack,
) -> Scorer:
    reward = settings.reward
    alone = RewardSettings(
        function=component.function,
        kwargs=component.kwargs,
        workers=workers,
        deadline_s=component.deadline_s or reward.deadline_s,
    )
    with _named(name, reward):
        return resources.enter_context(RewardPool(alone, data_sources))


@contextmanager
def _named(name: str, reward: RewardSettings) -> Iterator[None]:
    """Errors about one function's settings are about this component's."""
    try:
        yield
    except UserError as error:
        if not reward.components:
            raise
        where = error.where.replace("reward.", f"reward.components.{name}.", 1)
        raise UserError(error.what, where=where, why=error.why, fix=error.fix) from error


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
