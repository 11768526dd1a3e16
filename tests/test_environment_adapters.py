"""Environments of the form of Gymnasium, behind the protocol, in the process that they run in."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.environments.adapters import GymEnvironment
from meshloom.environments.pool import EnvironmentPool
from meshloom.environments.protocol import Answer, Fault, FaultReason, Observation, Task, Turn
from meshloom.environments.worker import as_answer

TURN = Turn(text="go", ids=(1,), finish="stop")
TASK = Task(seed=1, prompt="", answer=None, data_source="", extra={})


class Base:
    """What closes for those that are made of it."""

    closed = 0

    def reset(self) -> str:
        return "begin"

    def close(self) -> None:
        self.closed += 1


class Fixed(Base):
    """Gives the same at each step."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def step(self, text: str) -> tuple[Any, ...]:
        return self.given


def test_a_method_close_that_is_inherited_is_called() -> None:
    """It was not: files and servers of each episode stayed open."""
    environment = Fixed()
    asyncio.run(GymEnvironment(environment).close())
    assert environment.closed == 1
    asyncio.run(GymEnvironment(object()).close())


@pytest.mark.parametrize("given", [("on", 1.0), ("on", 1.0, True), ("on", 1.0, True, False, {}, 6)])
def test_a_step_of_another_size_is_refused(given: tuple[Any, ...]) -> None:
    """Of three values the last, the end, was taken for an info: the episode went on."""
    with pytest.raises(ValueError, match=f"step gave {len(given)} values"):
        asyncio.run(GymEnvironment(Fixed(*given)).step(TURN))


@pytest.mark.parametrize("ends", [(True,), (True, False), (False, True)])
def test_steps_of_four_and_five_values_end_an_episode(ends: tuple[bool, ...]) -> None:
    found = asyncio.run(GymEnvironment(Fixed("on", 2.0, *ends, {"score": 3})).step(TURN))
    assert (found.reward, found.done, found.numbers) == (2.0, True, {"score": 3})


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, pytest.param(10**400, id="huge")])
def test_a_number_of_an_info_that_is_not_finite_is_left_out(lost: float) -> None:
    """It made the episode invalid."""
    info = {"lost": lost, "score": 3, "name": "x"}
    found = asyncio.run(GymEnvironment(Fixed("on", 2.0, False, info)).step(TURN))
    assert as_answer(found, first=False).numbers == {"score": 3.0}
    with pytest.raises(ValueError, match="reward is nan"):
        as_answer(Observation(messages="on", reward=math.nan), first=False)


def test_a_step_of_three_values_is_a_fault_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text("""
class Game:
    def reset(self):
        return "begin"
    def step(self, text):
        return "on", 1.0, True
""")
    with EnvironmentPool(EnvironmentSettings(gym=f"{tmp_path}/game.py:Game", workers=1)) as pool:
        episode = pool.open()
        assert isinstance(pool.reset(episode, TASK).result(timeout=60), Answer)
        fault = pool.step(episode, TURN).result(timeout=60)
        pool.end(episode)
    assert isinstance(fault, Fault) and fault.reason is FaultReason.RAISED
    assert "step gave 3 values" in fault.detail
