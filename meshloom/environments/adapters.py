"""Environments of other kinds behind the one protocol.

Owns: the translation. Refuses to know: processes, templates. Always holds: an adapter leaves a reward as it is. For worker
processes only.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from meshloom.environments.protocol import Observation, Task, Turn
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.verifiers import reasoning_gym


class GymEnvironment:
    """A text environment in the form of Gymnasium or OpenEnv.

    ``reset`` gives an observation, or it with an info; ``step`` gives (observation, reward, terminated, truncated, info), or
    (observation, reward, done, info), or one object with ``observation``, ``reward`` and ``done``. An observation is a text, a
    chat, or what ``str`` makes of it. ``reset`` is given ``seed`` and ``options`` (the row: prompt, answer, extra) as far as it
    takes them. Finite numbers of an info are logged. All methods may be ``async``; ``close`` may be missing.

    Args:
        env: the environment.
    """

    def __init__(self, env: Any) -> None:
        self._env = env

    async def reset(self, task: Task) -> Observation:
        row = {"prompt": task.prompt, "answer": task.answer, "data_source": task.data_source, "extra": dict(task.extra)}
        result = await _awaited(self._env.reset(**_taken(self._env.reset, {"seed": task.seed % 2**32, "options": row})))
        if isinstance(result, tuple):
            shown, info = result
            return Observation(messages=_messages(shown), numbers=_numbers(info))
        return Observation(messages=_messages(_part(result, "observation", result)))

    async def step(self, turn: Turn) -> Observation:
        result = await _awaited(self._env.step(turn.text))
        if not isinstance(result, tuple):
            result = (_part(result, "observation", ""), _part(result, "reward", None), _part(result, "done", False), {})
        elif len(result) not in (4, 5):
            raise ValueError(
                f"step gave {len(result)} values; it gives (observation, reward, terminated, truncated, info) or "
                "(observation, reward, done, info)"
            )
        shown, reward, *ends, info = result
        return Observation(messages=_messages(shown), reward=reward, done=any(ends), numbers=_numbers(info))

    async def close(self) -> None:
        if hasattr(self._env, "close"):
            await _awaited(self._env.close())


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in offered.items() if takes_any or name in parameters}


def _part(result: Any, name: str, default: Any) -> Any:
    """A field of a result object; the default where it has none."""
    if isinstance(result, Mapping):
        return result.get(name, default)
    return getattr(result, name) if hasattr(result, name) else default


def _messages(shown: Any) -> tuple[dict[str, Any], ...] | str:
    if isinstance(shown, list | tuple) and shown and all(isinstance(one, Mapping) and "role" in one for one in shown):
        return tuple(dict(one) for one in shown)
    return shown if isinstance(shown, str) else str(shown)


def _numbers(info: Any) -> dict[str, float]:
    if not isinstance(info, Mapping):
        return {}
    return {str(name): value for name, value in info.items() if isinstance(value, int | float)}


class ReasoningGym:
    """A problem of reasoning-gym: the row's prompt, one turn, the task's own verifier."""

    def __init__(self) -> None:
        self._judge = reasoning_gym()

    async def reset(self, task: Task) -> Observation:
        self._task = task
        prompt = task.prompt
        return Observation(messages=prompt if isinstance(prompt, str) else tuple(prompt))

    async def step(self, turn: Turn) -> Observation:
        task = self._task
        request = RewardRequest(
            response=turn.text,
            answer=task.answer,
            data_source=task.data_source,
            extra=task.extra,
            prompt="",
            finish=turn.finish,
        )
        return Observation(reward=float(self._judge(request)), done=True)

    async def close(self) -> None:
        return None
