"""The functions of a reward, each as a reward of its own, and trying them before a run.

Owns: what a component's function inherits of the reward, the names of its settings in errors. Refuses to know: samples, how
rewards add up. Always holds: a function is tried as a run loads it, in a process that can be killed, and is called with
nothing.
"""

import re
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager

from meshloom.config.errors import UserError
from meshloom.config.names import Verifier
from meshloom.config.near import nearest_first
from meshloom.config.reward_settings import FUNCTION, ComponentSettings
from meshloom.config.settings import RewardSettings
from meshloom.killable.pool import START_DEADLINE_S, try_loading
from meshloom.rewards.function import FunctionSpec, choose_function, load_function
from meshloom.rewards.keeper import RewardWorker

_SETTING = re.compile(r"\breward\.(function|form|kwargs|deadline_s)\b")
"""Settings that a component has too."""


def alone(reward: RewardSettings, component: ComponentSettings, workers: int) -> RewardSettings:
    """A component's function as the only one.

    Args:
        reward: that it is part of.
        component: that has the function.
        workers: processes that it gets.
    """
    return RewardSettings(
        function=component.function,
        form=component.form,
        kwargs=component.kwargs,
        workers=workers,
        deadline_s=component.deadline_s or reward.deadline_s,
        code=reward.code,
    )


def parts_of(reward: RewardSettings) -> dict[str, ComponentSettings]:
    """The reward's components by name; one function alone is one of them."""
    return reward.components or {
        FUNCTION: ComponentSettings(function=reward.function, form=reward.form, kwargs=reward.kwargs)
    }


@contextmanager
def errors_of(name: str, reward: RewardSettings) -> Iterator[None]:
    """Errors about one function's settings are about this component's, where the reward has components."""
    try:
        yield
    except UserError as error:
        if not reward.components:
            raise
        where, fix = (_SETTING.sub(rf"reward.components.{name}.\1", text) for text in (error.where, error.fix))
        raise UserError(error.what, where=where, why=error.why, fix=fix) from error


def require_columns(spec: FunctionSpec, needed: Sequence[str], there: Collection[str]) -> None:
    """Refuse a function that takes columns which not all rows have.

    Args:
        spec: of the function.
        needed: columns that it cannot be called without.
        there: columns that all rows have.

    Raises:
        UserError: with the columns there are.
    """
    missing = [name for name in needed if name not in there]
    if missing:
        raise UserError(
            f"the reward function {spec.name!r} takes {missing[0]!r}, and not all rows have such a column",
            where=f"reward.function: {spec}",
            why=f"the columns of all rows are: {', '.join(nearest_first(missing[0], sorted(there))) or 'none'}",
            fix="give the parameter the name of its column, or the column that of the parameter, or give it a default",
        )


def refusals(
    reward: RewardSettings,
    columns: Callable[[], Collection[str] | None] = lambda: None,
    *,
    known: Container[str] = (),
    start_deadline_s: float = START_DEADLINE_S,
) -> Iterator[UserError]:
    """Why a run would refuse functions before its first sample. A file of the user's is imported, in a process of its own; the
    verifier ``code`` is left out, as it tries what this machine can isolate.

    Args:
        reward: whose functions are tried.
        columns: that all rows have, which is asked for a function that takes some; none: they are not known.
        known: settings of functions that are not tried.
        start_deadline_s: seconds that a file may take to be imported.
    """
    given = parts_of(reward)
    for name, component in given.items():
        path = f"reward.components.{name}.function" if reward.components else "reward.function"
        if component.function is None or component.function == Verifier.CODE or path in known:
            continue
        try:
            with errors_of(name, reward):
                _try(alone(reward, component, workers=1), columns, start_deadline_s)
        except UserError as error:
            yield error


def _try(function: RewardSettings, columns: Callable[[], Collection[str] | None], start_deadline_s: float) -> None:
    spec = choose_function(function)
    if spec.path is None:
        load_function(spec)
        return
    needed = try_loading(RewardWorker, spec, start_deadline_s)["columns"]
    there = columns() if needed else None
    if there is not None:
        require_columns(spec, needed, there)
