"""Settings of environments that cannot work are refused before anything is loaded."""

from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.loop.train import run_training
from meshloom.plan.build import build_plan
from meshloom.plan.checks import check_settings
from tests.lesson_runs import train_settings, write_inputs


def settings(*overrides: str) -> TrainSettings:
    files = ["data.train.files=[]", "data.train.reasoning_gym=chain_sum"]
    return load_settings(TrainSettings, None, ["run_dir=runs/x", "model.path=m", *files, *overrides])


TOOLS = f"environment.tools=[{__file__}:settings]"


@pytest.mark.parametrize(
    ("code", "overrides", "said"),
    [
        ("I001", ["environment.max_turns=2"], "none is given"),
        ("I001", [TOOLS, "environment.reasoning_gym=true"], "both tools and reasoning_gym are given"),
        ("I002", ["data.train.reasoning_gym=null", "data.train.episodes=5", TOOLS], "no environment makes one"),
        ("I003", ["environment.gym=game"], "write it as file.py:name"),
        ("I004", ["environment.custom=nowhere/game.py:Game"], "there is no file nowhere/game.py"),
        ("I017", [f"environment.tools=[{__file__}:setings]"], f"did you mean {__file__}:settings?"),
        ("I005", [f"environment.tools=[{__file__}:settings,{__file__}:settings]"], "two tools are called settings"),
        ("I006", [TOOLS, "environment.tool_format=regex"], "needs environment.tool_pattern"),
        ("I008", [TOOLS, "data.chat_template=never"], "set data.chat_template=auto"),
        ("I009", [TOOLS, "rollout.ignore_eos=true"], "set rollout.ignore_eos=false"),
        (
            "I010",
            [TOOLS, "rollout.max_response_tokens=15"],
            "environment.max_turns=5, or rollout.max_response_tokens=22",
        ),
        ("I012", [TOOLS, "rollout.deadline_s=20"], "environment.step_deadline_s=10"),
        ("I014", ["environment.reasoning_gym=true", "reward.overlong.buffer_tokens=5"], "no reward to be added to"),
    ],
)
def test_what_cannot_work_is_refused(code: str, overrides: list[str], said: str) -> None:
    problems = check_settings(settings(*overrides), 1000).problems
    assert [problem.code for problem in problems] == [code]
    assert said in str(problems[0])


def test_values_that_are_suggested_work() -> None:
    given = [TOOLS, "rollout.max_response_tokens=15"]
    (problem,) = check_settings(settings(*given), 1000).problems
    for suggestion in problem.suggestions:
        assert check_settings(settings(*given, *suggestion), 1000).problems == []


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("I007", [TOOLS, "environment.tool_pattern=x"]),
        ("I011", [TOOLS, "environment.max_turn_tokens=1000"]),
        ("I013", ["environment.reasoning_gym=true", "environment.max_tool_calls=3"]),
        ("I013", ["environment.reasoning_gym=true", "environment.max_turns=3"]),
        ("I013", [TOOLS, "environment.arguments.size=3"]),
    ],
)
def test_what_is_likely_not_meant_is_warned_about(code: str, overrides: list[str]) -> None:
    found = check_settings(settings(*overrides), 1000)
    assert (found.problems, [warning.code for warning in found.warnings]) == ([], [code])


def test_the_plan_counts_what_is_kept_between_turns(tmp_path: Path) -> None:
    """On the processor a copy of each episode beside the slots; where an episode has one turn, nothing."""
    inputs = write_inputs(tmp_path)
    (inputs / "game.py").write_text("make = object\n")
    game = f"environment.gym={inputs}/game.py:make"
    held = {}
    for turns in (1, 3):
        given = train_settings(
            inputs, tmp_path / "run", game, f"environment.max_turns={turns}", "rollout.kv_cache_bytes=null"
        )
        plan = build_plan(given, 14)
        (line,) = (line for line in plan.lines if line.name == "key-value cache")
        assert ("tokens kept between turns" in line.formula) is (turns > 1)
        held[turns] = plan.value("key-value cache") / plan.value("cache per token")
    samples = given.batch.prompts_per_step * given.batch.samples_per_prompt
    longest = given.data.max_prompt_tokens + given.rollout.max_response_tokens
    assert held[3] - held[1] == samples * longest


def test_a_run_refuses_a_file_in_the_words_of_its_plan(tmp_path: Path) -> None:
    """It said less, and found it out in another process."""
    inputs = write_inputs(tmp_path)
    given = train_settings(inputs, tmp_path / "run", "environment.tools=[gone.py:f]", "environment.max_turns=2")
    (problem,) = check_settings(given, 14).problems
    with pytest.raises(UserError) as error:
        run_training(given, resume=False)
    assert str(error.value) == str(problem)
    assert "paths are relative to" in str(problem) and not (tmp_path / "run").exists()


def test_an_environment_that_judges_needs_no_reward_function(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    (inputs / "game.py").write_text("make = object\n")
    rows = ("data.train.files=[]", "data.train.episodes=8", "data.validation=null", "reward.function=null")
    given = train_settings(
        inputs, tmp_path / "run", *rows, f"environment.gym={inputs}/game.py:make", "environment.max_turns=2"
    )
    plan = build_plan(given, None)
    assert plan.problems == ()
    assert plan.value("training rows") == 8
    assert plan.value("reward function") == "none: the environment gives rewards"
    assert (plan.value("turns of an episode"), plan.value("longest turn")) == (2, 8)
    (problem,) = build_plan(train_settings(inputs, tmp_path / "run", "reward.function=null"), None).problems
    assert problem.code == "W001"
