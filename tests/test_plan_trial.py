"""What ``meshloom plan`` tries: packages of loggers, and code of the user's, refused in the words of the run."""

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshloom.cli import main
from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.problems import Problem
from meshloom.config.settings import EvalSettings, TrainSettings
from meshloom.data.rows import RowNames
from meshloom.lesson.model import CHAT_TEMPLATE
from meshloom.loop.rewarding import open_rewards
from meshloom.loop.run_inputs import RunInputs
from meshloom.observe.loggers import check_loggers
from meshloom.plan import build_plan, hardware_options
from meshloom.plan_trial import FirstPrompts, tried
from meshloom.prompts_worker import render_some
from tests.lesson_runs import write_model
from tests.test_plan_memory import make_folder

FILE = "reward.function=reward.py:score"
Told = tuple[str, str, str, str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "m")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def given(*overrides: str) -> list[str]:
    base = ["run_dir=r", "model.path=m", "data.train.files=rows.jsonl", "device=cpu", "reward.workers=1"]
    return [*base, "batch.prompts_per_step=1", "logging.loggers=[]", *overrides]


def settings(*overrides: str) -> TrainSettings:
    return load_settings(TrainSettings, None, given(*overrides))


def problems(*overrides: str, **more: Any) -> list[Problem]:
    found = settings(*overrides)
    with FirstPrompts(found) as prompts:
        return list(tried(found, build_plan(found, 1).problems, prompts, **more))


def words(error: Problem | UserError) -> Told:
    return error.what, error.where, error.why, error.fix


def words_of_the_run(begin: Callable[[], object]) -> Told:
    with pytest.raises(UserError) as caught:
        begin()
    return words(caught.value)


@pytest.mark.parametrize(
    ("source", "overrides", "said"),
    [
        ("def score(text, gold):\n    return 1.0\n", (FILE,), "cannot be called"),
        ("def score(request):\n    return 1.0\n", (FILE, "reward.kwargs={tolerance: 1}"), "cannot be called"),
        ("def score(request, tolerance):\n    return 1.0\n", (FILE,), "cannot be called"),
        ("def score(completions, gold): ...\n", (FILE,), "takes 'gold', and not all rows have such a column"),
        ("score = 1.0\n", (FILE,), "has no function 'score'"),
        ("import no_such_package\ndef score(request): ...\n", (FILE,), "raises ModuleNotFoundError"),
        ("import os\nos._exit(3)\ndef score(request): ...\n", (FILE,), "ends while it loads the function"),
        ("", ("reward.function=exact_match", "reward.kwargs={loose: true}"), "cannot be used with these arguments"),
        ("def score(text): ...\n", ("reward.components.maths.function=reward.py:score",), "cannot be called"),
    ],
)
def test_a_reward_that_a_run_would_refuse_is_refused_in_its_words(
    folder: Path, source: str, overrides: tuple[str, ...], said: str
) -> None:
    """The plan of such a run had no problems: it looked for the function's name alone."""
    (folder / "reward.py").write_text(source)
    (problem,) = problems(*overrides)
    assert problem.code == "U002" and said in problem.what

    def begin() -> None:
        with open_rewards(settings(*overrides), RowNames(columns=frozenset({"answer"})), None, None):
            raise AssertionError("the run began")

    assert words(problem) == words_of_the_run(begin)


def test_a_file_that_takes_too_long_is_killed(folder: Path) -> None:
    (folder / "reward.py").write_text("import time\ntime.sleep(1000)\ndef score(request): ...\n")
    began = time.monotonic()
    (problem,) = problems(FILE, start_deadline_s=3.0)
    assert "was not loaded within 3 s" in problem.what
    assert time.monotonic() - began < 300


def test_a_function_that_the_plan_refuses_already_is_not_imported(folder: Path) -> None:
    mark = folder / "imported"
    (folder / "reward.py").write_text(f"open({str(mark)!r}, 'w')\ndef other(request): ...\n")
    found = settings(FILE)
    plan = build_plan(found, 1)
    assert [problem.code for problem in plan.problems] == ["W004"]
    assert not list(tried(found, plan.problems, FirstPrompts(found))) and not mark.exists()


def test_a_function_that_can_be_called_is_called_with_nothing(folder: Path) -> None:
    source = f"def score(request):\n    open({str(folder / 'called')!r}, 'w')\n"
    (folder / "reward.py").write_text(source)
    assert not problems(FILE)
    assert not (folder / "called").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "tensorboad"])
def test_a_logger_that_cannot_be_opened_is_refused_in_the_words_of_the_run(name: str) -> None:
    """A run whose logger's package is missing was planned without a problem."""
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    (problem,) = problems("reward.function=exact_match", f"logging.loggers=[{name}]")
    assert problem.code == "U001"
    assert words(problem) == words_of_the_run(lambda: check_loggers([name]))


@pytest.mark.parametrize("what", ["logging.loggers=[wandb]", FILE, "logging.loggers=[tensorboad]"])
def test_a_package_that_is_missing_here_refuses_no_plan_for_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """It may be there where the run will be; what is wrong everywhere is refused all the same."""
    (folder / "reward.py").write_text("import no_such_package\ndef score(request): ...\n")
    monkeypatch.setattr(hardware_options, "on_gpu", lambda device: False)
    reward = () if what == FILE else ("reward.function=exact_match",)
    if "wandb" in what and importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    code = main(["plan", *given(*reward, what), "device=cuda", "--json"])
    told = json.loads(capsys.readouterr().out)
    refused, warned = ([found["code"] for found in told[kind]] for kind in ("problems", "warnings"))
    is_wrong_everywhere = "tensorboad" in what
    assert (code == 2) == is_wrong_everywhere == bool(refused)
    assert any(found.startswith("U00") for found in (refused if is_wrong_everywhere else warned))


def test_own_functions_and_environments_are_tried_too(folder: Path) -> None:
    (folder / "own.py").write_text(
        "def advantage(batch, more):\n    return batch\n\nclass Game:\n    def reset(self): ...\n"
    )
    overrides = [
        "reward.function=exact_match",
        "algorithm.advantage=own.py:advantage",
        "environment.custom=own.py:Game",
    ]
    found = {problem.code: problem.what for problem in problems(*overrides)}
    assert set(found) == {"U003", "U004"}
    assert "no method 'step'" in found["U003"] and "takes other arguments" in found["U004"]


def test_the_command_shows_what_was_tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "reward.py").write_text("def score(text):\n    return 1.0\n")
    assert main(["plan", "--json", *given(FILE)]) == 2
    told = json.loads(capsys.readouterr().out)
    assert [problem["code"] for problem in told["problems"]] == ["U002"]
    assert "D007" in [warning["code"] for warning in told["warnings"]]  # the model has no tokenizer
    evaluation = [text for text in given(FILE) if not text.startswith(("batch", "logging"))]
    found = load_settings(EvalSettings, None, evaluation)
    assert list(tried(found, (), FirstPrompts(found)))


SYSTEM = {"role": "system", "content": "b"}
ASKS = {"role": "user", "content": "1+1="}
REFUSES = (
    '{% for m in messages %}{% if m.role == "critic" %}{{ raise_exception("no such role") }}{% endif %}{% endfor %}'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), template=REFUSES + CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("chat", "overrides", "said"),
    [
        ([ASKS], ("data.chat_template_arguments={enable_thinking: false}",), "reads no argument 'enable_thinking'"),
        ([ASKS], ("data.chat_template_arguments={tools: a}",), "reads no argument 'tools'"),
        ([SYSTEM, ASKS], ("data.system_prompt=a",), "has a system message of its own"),
        ([{"role": "critic", "content": "a"}], (), "refuses a chat"),
        ([ASKS], ("data.max_prompt_tokens=2",), "more than data.max_prompt_tokens=2"),
    ],
)
def test_prompts_that_a_run_would_refuse_are_refused_in_its_words(
    folder: Path, model: Path, chat: list[dict[str, str]], overrides: tuple[str, ...], said: str
) -> None:
    """A plan accepted arguments that the chat template does not read, and whatever else ends a run as it renders its rows."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": chat, "answer": "2"}) + "\n")
    given = ("reward.function=exact_match", f"model.path={model}", *overrides)
    (problem,) = problems(*given)
    assert problem.code == "U005" and said in problem.what
    assert words(problem) == words_of_the_run(lambda: RunInputs.read(settings(*given), resume=False))


def test_prompts_that_a_run_drops_or_never_reads_are_not_refused(folder: Path, model: Path) -> None:
    """Only the first rows are rendered: all of them may be longer than those behind them."""
    rows = [{"prompt": [{"role": "user", "content": "1" * length}], "answer": "2"} for length in (*[50] * 16, 1)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "bad.jsonl").write_text(json.dumps({"prompt": [SYSTEM, ASKS], "answer": "2"}) + "\n")
    given = ("reward.function=exact_match", f"model.path={model}", "data.train.files=long.jsonl")
    render_some(settings(*given, "data.overlong_prompts=drop", "data.max_prompt_tokens=40"))
    render_some(
        settings(*given, "data.system_prompt=a", "data.train.files=[long.jsonl,bad.jsonl]", "data.train.max_rows=17")
    )
    with pytest.raises(UserError) as caught:
        render_some(settings(*given, "data.system_prompt=a", "data.train.files=[long.jsonl,bad.jsonl]"))
    assert caught.value.where == "bad.jsonl, row 0"


def test_prompts_are_rendered_for_a_model_whose_weights_are_not_there_yet(folder: Path, model: Path) -> None:
    """The plan goes by config.json alone, and was refused for the weights once the tokenizer lay beside it."""
    bare = shutil.copytree(model, folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    render_some(settings("reward.function=exact_match", f"model.path={bare}"))


def test_prompts_that_nobody_waits_for_are_dropped(model: Path) -> None:
    """They are begun before the plan is made, which may refuse the run at once."""
    found = settings("reward.function=exact_match", f"model.path={model}")
    before = psutil.Process().children(recursive=True)  # those that tests share
    with FirstPrompts(found) as prompts:
        assert set(psutil.Process().children(recursive=True)) > set(before)
        assert not list(prompts.problems({"data.train"}))
    assert not set(psutil.Process().children(recursive=True)) - set(before)
    assert not list(FirstPrompts(settings(f"model.path={'m' * 300}")).problems(set()))
