"""The process that environments and tools run in.

Owns: the objects of episodes, calling them, and turning what they return or raise into one line of JSON. Refuses to know:
deadlines, sockets (``killable.serving``). Always holds: one line for each call, in order.

The setup is a ``WorkerSetup``; a message is a call (pickled ``(verb, episode, argument)``), answered by one line:
``{"fault": text}`` or the fields of an ``Answer``; ``schemas`` is answered by a list.
"""

import asyncio
import inspect
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.config.errors import UserError
from meshloom.environments.adapters import GymEnvironment, ReasoningGym
from meshloom.environments.protocol import Answer, Message, Observation, Task, Turn
from meshloom.environments.tools import ToolBox
from meshloom.environments.user_code import UserCode, load_code, require_call
from meshloom.killable import serving

DETAIL_CHARACTERS = 2000
MAX_LINE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What a worker loads.

    Args:
        settings: of the environment.
        codes: the user's functions or class; empty for environments that come with this package.
    """

    settings: EnvironmentSettings
    codes: tuple[UserCode, ...]


class Host:
    """Environments of many episodes, or the tools, which need no object of an episode.

    Args:
        setup: what to load.

    Raises:
        UserError: if it cannot be loaded.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        settings = setup.settings
        self._tools = ToolBox(settings, setup.codes) if settings.tools else None
        self._make = None if settings.tools else _maker(setup)
        self._open: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()

    def about(self) -> dict[str, Any]:
        """Nothing: an environment is known by its settings."""
        return {}

    def results(self, message: bytes) -> Iterator[Any]:
        """What a call comes to."""
        yield self._carry_out(*pickle.loads(message))

    def line(self, result: Any) -> bytes:
        """The same as it travels; what is no JSON, or too long, is a fault of its episode."""
        try:
            line = json.dumps(result, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            line = json.dumps({"fault": f"the observation is no JSON: {error}"}).encode()
        if len(line) > MAX_LINE_BYTES - 1:
            text = f"the observation has {len(line):,} bytes, more than {MAX_LINE_BYTES:,}"
            line = json.dumps({"fault": text}).encode()
        return line

    def _carry_out(self, verb: str, episode: int, argument: Task | Turn | tuple[str, int] | None) -> Any:
        try:
            return self.schemas() if verb == "schemas" else asdict(self.call(verb, episode, argument))
        except UserError as error:
            return serving.fields_of(error)
        except BaseException as error:  # whatever user code raises, SystemExit too, costs its own episode only
            return {"fault": _bounded(serving.error_text(error))}

    def schemas(self) -> list[dict[str, Any]]:
        return [] if self._tools is None else self._tools.schemas()

    def call(self, verb: str, episode: int, argument: Any) -> Answer:
        """Carry out a call. Whatever user code raises comes out."""
        if verb == "tools":
            text, calls_before = argument
            return self._toolbox.answer(text, calls_before)
        if verb == "reset":
            self._open[episode] = self._maker()
            return as_answer(self._run(self._open[episode].reset(argument)), first=True)
        if verb == "step":
            return as_answer(self._run(self._open[episode].step(argument)), first=False)
        environment = self._open.pop(episode, None)
        if environment is not None:
            self._run(environment.close())
        return Answer(done=True)

    @property
    def _toolbox(self) -> ToolBox:
        if self._tools is None:
            raise RuntimeError("there are no tools")
        return self._tools

    @property
    def _maker(self) -> Callable[[], Any]:
        if self._make is None:
            raise RuntimeError("tools need no object of an episode")
        return self._make

    def _run(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.iscoroutine(value) else value


def _maker(setup: WorkerSetup) -> Callable[[], Any]:
    settings = setup.settings
    if settings.reasoning_gym:
        return ReasoningGym
    (code,) = setup.codes
    made, arguments = load_code(code, {}), dict(settings.arguments)
    require_call(made, code, arguments)
    if settings.gym:
        return lambda: GymEnvironment(made(**arguments))
    if lacking := [name for name in ("reset", "step", "close") if not callable(getattr(made, name, None))]:
        raise UserError(
            f"the environment has no method {lacking[0]!r}",
            where=f"environment.custom: {code}",
            fix="write a class with reset(task), step(turn) and close(): see meshloom.environments.Environment",
        )
    return lambda: made(**arguments)


def as_answer(result: Any, *, first: bool) -> Answer:
    """What an environment returned, as it travels.

    Raises:
        ValueError: if it is no observation.
    """
    if isinstance(result, str | list):
        result = Observation(messages=result if isinstance(result, str) else tuple(result))
    if isinstance(result, tuple) and len(result) == 3:
        shown, reward, done = result
        result = Observation(messages=shown if isinstance(shown, str) else tuple(shown), reward=reward, done=bool(done))
    if not isinstance(result, Observation):
        raise ValueError(f"an Observation was expected, not {type(result).__name__}: {result!r:.200}")
    answer = Answer(
        messages=_as_messages(result.messages),
        reward=None if result.reward is None else _finite("reward", result.reward),
        done=bool(result.done),
        numbers=dict(islice(_finite_numbers(result.numbers), 64)),
    )
    if (first or not answer.done) and not answer.messages:
        raise ValueError("an observation without messages, though the episode is not done")
    if first and (answer.done or answer.reward is not None):
        raise ValueError("a reset gives neither a reward nor the end")
    return answer


def _as_messages(messages: Sequence[Any] | str) -> tuple[Message, ...]:
    if isinstance(messages, str):
        return ({"role": "user", "content": messages},) if messages else ()
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"a message needs a role and a content: {message!r:.200}")
        if message["role"] == "assistant":
            raise ValueError("an observation cannot have a message of the assistant: the model speaks for itself")
    return tuple(dict(message) for message in messages)


def _finite_numbers(numbers: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    """What of the numbers can be logged: one that is not finite costs no episode."""
    for name, value in numbers.items():
        try:
            number = float(value)
        except OverflowError:
            continue
        if math.isfinite(number):
            yield str(name)[:100], number


def _finite(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number


def serve(descriptor: int) -> None:
    """Answer the setup and all calls on a socket until its other end closes."""
    serving.serve(descriptor, Host)


def _bounded(text: str) -> str:
    """Text that any file can hold: no lone surrogates, and not too long."""
    return text.encode("utf-8", "backslashreplace").decode()[:DETAIL_CHARACTERS]
