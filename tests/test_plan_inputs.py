"""What a plan finds in the data and the reward's file, without running or loading either."""

import json
from pathlib import Path

import pytest

from meshloom.config.load import load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan import Plan, build_plan
from tests.test_plan_memory import make_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "rows.jsonl").write_text('\n{"prompt": "1+1=", "answer": "2"}\n' * 3)
    (tmp_path / "reward.py").write_text("def score(request):\n    return 1.0\n")
    return tmp_path


def plan(*overrides: str, kind: type = TrainSettings) -> Plan:
    given = ["run_dir=runs/a", "model.path=m", "data.train.files=rows.jsonl", "device=cpu", "batch.prompts_per_step=3"]
    given = [text for text in given if kind is TrainSettings or "batch" not in text]
    reward = [] if kind is SftSettings else ["reward.function=reward.py:score"]
    return build_plan(load_settings(kind, None, [*given, *reward, *overrides]), 3)


def codes(found: Plan) -> list[str]:
    return [problem.code for problem in found.problems]


def test_a_run_with_everything_is_planned_and_its_inputs_are_shown() -> None:
    found = plan("reward.workers=3")
    assert found.problems == ()
    lines = {line.name: (line.section, line.value) for line in found.lines}
    assert len(lines) == len(found.lines)
    assert lines["training data"] == ("data", "rows.jsonl")
    assert lines["training rows"] == ("data", 3)
    assert (lines["prompt column"][1], lines["answer column"][1]) == ("prompt", "answer")
    assert lines["chat template"] == ("data", "the tokenizer's")
    assert lines["reward function"] == ("reward", "reward.py:score")
    assert (lines["deadline of a call"][1], lines["reward workers"][1]) == (10.0, 3)


def test_a_missing_reward_is_refused_where_the_rows_bring_none(folder: Path) -> None:
    """The plan of such a run had no problems, and training refused it."""
    for kind in (TrainSettings, EvalSettings):
        (problem,) = plan("reward.function=null", kind=kind).problems
        assert (problem.code, problem.what) == ("W001", "a reward function is needed")
    assert plan("reward.function=null", "data.train={reasoning_gym: basic_arithmetic}").problems == ()
    row = {"prompt": "1+1=", "answer": "2", "data_source": "reasoning_gym/basic_arithmetic"}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    found = plan("reward.function=null")
    assert (found.problems, found.value("reward function")) == ((), "reasoning_gym")


def test_a_misspelt_function_is_refused_with_the_nearest() -> None:
    (problem,) = plan("reward.function=reward.py:scroe").problems
    assert (problem.code, problem.fix) == ("W004", "did you mean reward.py:score?")
    assert codes(plan("reward.function=rewards.py:score")) == ["S006"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("score = lambda request: 1.0", None),
        ("score: object = print", None),
        ("try:\n    from a import score\nexcept ImportError:\n    score = None", None),
        ("if True:\n    class score: ...", None),
        ("from rewards.maths import other as score", None),
        ("from rewards.maths import *", None),
        ("globals()['score'] = print", None),
        ("def make():\n    global score\n    score = print\nmake()", None),
        ("raise SystemExit('the plan ran it')\ndef score(request): ...", None),
        ("def outer():\n    def score(request): ...", "W004"),
        ("print('score')", "W004"),
        ("def score(:", "W003"),
    ],
)
def test_names_are_found_without_running_the_file(folder: Path, text: str, code: str | None) -> None:
    (folder / "reward.py").write_text(text)
    assert codes(plan()) == ([code] if code else [])


def test_the_first_row_must_have_the_columns(folder: Path) -> None:
    for overrides, said in (
        (["data.prompt_column=question"], "there is no column 'question'"),
        (["data.answer_column=solution"], "there is no column 'solution'"),
    ):
        (problem,) = plan(*overrides).problems
        assert problem.code == "D001"
        assert f"rows.jsonl, line 2: {said}" == problem.what
        assert "prompt" in problem.why
    assert codes(plan(kind=SftSettings)) == ["D001"]
    assert codes(plan("data.response_column=answer", kind=SftSettings)) == []
    assert codes(plan("data.validation.files=none.jsonl")) == ["S002"]
    (folder / "rows.jsonl").write_text("\n")
    assert codes(plan()) == ["D002"]
    (folder / "rows.jsonl").write_text("{")
    assert "is not JSON" in plan().problems[0].what


def test_columns_of_parquet_and_of_nested_answers(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    chat = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": "2"}}] * 5
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    found = plan("data.train.files=[rows.parquet, rows.jsonl]", "data.max_prompt_tokens=8")
    assert found.problems == ()
    assert (found.value("answer column"), found.value("training rows")) == ("reward_model.ground_truth", 8)
    assert found.value("training data") == "rows.parquet and 1 more"
    (problem,) = plan("data.train.files=rows.parquet", "data.prompt_column=question").problems
    assert problem.what == "rows.parquet, row 0: there is no column 'question'"


def test_a_template_that_is_needed_must_be_there(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}))
    assert codes(plan()) == []
    assert codes(plan("data.chat_template=never")) == ["D004"]
    (folder / "m" / "tokenizer_config.json").write_text("{}")
    assert codes(plan()) == ["D005"]
    (folder / "m" / "chat_template.jinja").write_text("{{ messages }}")
    assert codes(plan()) == []


def test_a_marker_of_the_template_without_a_token_is_warned_of(folder: Path) -> None:
    """A model was trained for weeks on turns that its tokenizer cut into pieces, and nothing said so."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}))
    template = (
        "{{ '<|im_start|>' ~ messages[0]['content'] ~ '<|im_end|><end_of_turn>' }}{% if x %}<|{{ x }}|>{% endif %}"
    )
    (folder / "m" / "chat_template.jinja").write_text(template)
    tokens = {"model": {"vocab": {"<end_of_turn>": 2}}, "added_tokens": [{"content": "<|im_start|>"}]}
    (folder / "m" / "tokenizer.json").write_text(json.dumps(tokens))
    (warning,) = plan().warnings
    assert (warning.code, warning.what.split(",")[0]) == ("D006", "the chat template writes <|im_end|>")
    (folder / "m" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert plan().warnings == ()
    (folder / "m" / "tokenizer_config.json").write_text("{}")
    (folder / "m" / "tokenizer.json").unlink()
    assert plan().warnings == ()
