"""Which function scores: the named verifiers, a user's file, the default, and what is refused before a run."""

import subprocess
import sys

import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import DataSettings, RewardSettings, SourceSettings
from meshloom.data.sources import load_rows
from meshloom.rewards.function import choose_function, load_function
from meshloom.rewards.outcome import InvalidReason, RewardRequest
from meshloom.rewards.pool import RewardPool
from meshloom.rewards.verifiers import VERIFIERS


def ask(response, answer=None, **fields):
    defaults = {"data_source": "d", "extra": {"k": 1}, "prompt": "p", "finish": "stop"}
    return RewardRequest(response=response, answer=answer, **(defaults | fields))


def scored(verifier, response, answer, **kwargs):
    return VERIFIERS[verifier](**kwargs)(ask(response, answer))


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("42", "42", 1),
        ("  42 \n\n", "42", 1),
        ("thinking\n  4   2 ", "4 2", 1),
        ("42\nso 43", "42", 0),
        ("<answer>41</answer> no, <answer>\n42\n</answer> done", "42", 1),
        ("<answer>42</answer> then <answer>41</answer>", "42", 0),
        ("<answer>42", "42", 0),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}, done", r"\frac{1}{2}", 1),
        (r"\boxed{1} and \boxed{2", "1", 1),
        (r"\boxed{7} but <answer>8</answer>", "8", 1),
        ("42", 42, 1),
        ("Paris", "paris", 0),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
        ("", "42", 0),
    ],
)
def test_exact_match_compares_the_answer_it_finds(response, answer, score):
    assert scored("exact_match", response, answer) == score


def test_exact_match_can_ignore_case():
    assert scored("exact_match", "PARIS", "paris", ignore_case=True) == 1


@pytest.mark.parametrize(
    ("response", "score"),
    [("answer: 1, answer: 42", 1), ("answer: 42, answer: 1", 0), ("42", 0), ("answer:   42", 1)],
)
def test_regex_compares_group_one_of_the_last_match(response, score):
    assert scored("regex", response, 42, pattern=r"answer:\s*(\d+)") == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1),
        ("The answer is 1/2", r"\frac{1}{2}", 1),
        ("$x^2+2x+1$", "(x+1)^2", 1),
        ("#### 1,000", 1000, 1),
        (r"\boxed{5}", "$5$", 1),
        (r"\boxed{4}", "5", 0),
        ("no idea", "5", 0),
    ],
)
def test_math_verify_compares_values_not_text(response, answer, score):
    assert scored("math_verify", response, answer) == score


@pytest.mark.parametrize("verifier", ["exact_match", "math_verify"])
def test_a_row_without_ground_truth_is_never_a_zero(verifier):
    with pytest.raises(ValueError, match="no ground truth"):
        scored(verifier, "5", None)


def test_an_unreadable_ground_truth_is_never_a_zero():
    with pytest.raises(ValueError, match="cannot read the ground truth"):
        scored("math_verify", "5", "%$#@")


def test_reasoning_gym_rows_bring_their_verifier():
    """A task with a verifier of its own, one that compares text, and arguments that travel with the row."""
    rows = []
    for task, args in (("countdown", {"min_numbers": 3, "max_numbers": 3}), ("chain_sum", {"max_terms": 3})):
        source = SourceSettings(reasoning_gym=task, size=4, task=args)
        rows += load_rows(source, DataSettings(train=source))
    texts = ("so <answer>{}</answer>", " {}\n", "<answer>0 + 0</answer>")
    requests = [
        ask(text.format(row.answer), row.answer, data_source=row.data_source, extra=row.extra)
        for text in texts
        for row in rows
    ]
    with RewardPool(RewardSettings(workers=1), {row.data_source for row in rows}) as pool:
        assert pool.spec.name == "reasoning_gym"
        values = [reward.value for reward in pool.score(requests)]
    assert values[:16] == [1.0] * 16
    assert max(values[16:]) < 0.5


def test_reasoning_gym_needs_its_own_rows():
    with pytest.raises(ValueError, match="not from reasoning-gym"):
        scored("reasoning_gym", "5", "5")


def own(tmp_path, source, **settings):
    path = tmp_path / "my_rewards.py"
    path.write_text(source)
    return RewardSettings(function=f"{path}:score", workers=1, **settings)


VERL = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return (data_source, solution_str, ground_truth, extra_info) == ("d", "r", "a", {"k": 1})
"""
VERL_WITH_BONUS = "def score(data_source, solution_str, ground_truth, extra_info, bonus=0, **kw):\n return bonus"
OWN = "def score(request, scale):\n return scale * (request.response + request.prompt + request.finish).index('stop')"
DATACLASS = """
from __future__ import annotations
import dataclasses
@dataclasses.dataclass
class Number:
    x: int
def score(request):
    return Number(9).x
"""


@pytest.mark.parametrize(
    ("source", "kwargs", "value"),
    [
        (VERL, {}, 1),
        (VERL_WITH_BONUS, {"bonus": 3}, 3),
        ("def score(solution_str, ground_truth):\n return 4", {}, 4),
        ("def score(solution_str, **kw):\n return len(kw)", {"a": 1}, 4),
        (OWN, {"scale": 2}, 4),
        ("async def score(request):\n return 5", {}, 5),
        ("class C:\n def __call__(self, request):\n  return 6\nscore = C()", {}, 6),
        ("import functools\ndef f(x, request):\n return x\nscore = functools.partial(f, 7)", {}, 7),
        ("import neighbour\ndef score(request):\n return neighbour.EIGHT", {}, 8),
        (DATACLASS, {}, 9),
    ],
)
def test_a_function_of_the_users_is_called_in_its_form(tmp_path, source, kwargs, value):
    (tmp_path / "neighbour.py").write_text("EIGHT = 8")
    with RewardPool(own(tmp_path, source, kwargs=kwargs)) as pool:
        assert pool.score([ask("r", "a")])[0].value == value


@pytest.mark.parametrize(
    ("wrapper", "value"),
    [("wrapper(*args, **kw):\n  return f(*args, **kw)", 1), ("wrapper(completions):\n  return [2]", 2)],
)
def test_a_function_that_wraps_another_has_the_form_of_what_is_called(tmp_path, wrapper, value):
    """functools.wraps says of any wrapper that it takes what the function inside takes."""
    source = f"import functools\ndef over(f):\n @functools.wraps(f)\n def {wrapper}\n return wrapper\n"
    with RewardPool(own(tmp_path, source + "@over\ndef score(solution_str):\n return 1")) as pool:
        assert pool.score([ask("r")])[0].value == value


@pytest.mark.parametrize(
    ("form", "source", "value"),
    [
        ("request", "def score(sample):\n return sample.response == 'r'", 1),
        ("verl", "def score(**kw):\n return kw['solution_str'] == 'r' and len(kw) == 4", 1),
        ("verl_batch", "def score(*args, **kw):\n return [kw['solution_strs'] == ['r'] and len(kw) == 4]", 1),
        ("trl", "def score(*args, **kw):\n return [kw['completions'] == ['r'] and len(kw)]", 3),
        ("trl", "def score(completions, solution_str=2):\n return [solution_str]", 2),
    ],
)
def test_the_settings_say_the_form_of_a_function_whose_parameters_do_not(tmp_path, form, source, value):
    with RewardPool(own(tmp_path, source, form=form)) as pool:
        assert pool.score([ask("r", "a")])[0].value == value


@pytest.mark.parametrize("form", ["verl", "verl_batch", "trl"])
def test_a_function_of_another_form_than_the_settings_say_is_refused(tmp_path, form):
    message = refused(own(tmp_path, "def score(request): ...", form=form))
    assert f"reward.form is {form}, but it is score(request)" in message


def refused_when_loaded(settings):
    with pytest.raises(UserError) as caught:
        load_function(choose_function(settings))
    return str(caught.value)


def refused(settings, data_sources=()):
    with pytest.raises(UserError) as caught:
        RewardPool(settings, data_sources)
    return str(caught.value)


FORMS = ["score(request, **kwargs)", "solution_str, ground_truth"]


@pytest.mark.parametrize(
    ("source", "kwargs", "words"),
    [
        ("def scores(request): ...\ndef other(): ...", {}, ["no function 'score'", "scores, other"]),
        ("import math\nx = 1", {}, ["no function 'score'", "defines no function"]),
        ("score = 3", {}, ["no function 'score'"]),
        ("def score(prompts, answers): ...", {}, ["(prompts, answers)", "reward.form=request", *FORMS]),
        ("def score(*args, **kwargs): ...", {}, ["(*args, **kwargs)", "reward.form", *FORMS]),
        ("def score(completions, solution_str): ...", {}, ["in 2 ways", "reward.form=verl or reward.form=trl"]),
        ("def score(request, completions): ...", {}, ["in 2 ways", "reward.form=request or reward.form=trl"]),
        ("def score(solution_strs, gold): ...", {}, ["cannot be called", "gold"]),
        ("def score(completions, /): ...", {}, ["cannot be called", "completions, /"]),
        ("def score(completions, trainer_state, **kw): ...", {}, ["trainer_state", "give it a default"]),
        ("def score(completions, **kw): ...", {"prompts": 1}, ["'prompts'", "comes from the sample"]),
        ("def score(request): ...", {"bonus": 1}, ["cannot be called", "bonus", *FORMS]),
        ("def score(request, bonus): ...", {}, ["cannot be called", "bonus"]),
        ("def score(data_source, solution_str, gold): ...", {}, ["cannot be called", "gold"]),
        ("def score(request, **kw): ...", {"request": 1}, ["'request'", "comes from the sample"]),
        ("def score(solution_str, **kw): ...", {"extra_info": 1}, ["'extra_info'", "comes from the sample"]),
        ("raise RuntimeError('no GPU')", {}, ["raises RuntimeError", "no GPU", "line 1"]),
    ],
)
def test_a_function_that_cannot_be_used_is_one_clear_error(tmp_path, monkeypatch, source, kwargs, words):
    monkeypatch.setattr(sys, "path", [*sys.path])
    message = refused_when_loaded(own(tmp_path, source, kwargs=kwargs))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"function": "exact_macth"}, ["no verifier 'exact_macth'", "exact_match"]),
        ({"function": "judge"}, ["no verifier 'judge'", "rewards.py:score", "math_verify"]),
        ({"function": "nowhere/r.py:score"}, ["cannot be read", "nowhere/r.py"]),
        ({"function": "rewards.txt:score"}, ["no Python file", "rewards.txt"]),
        ({"function": "regex"}, ["regex cannot be used", "pattern", "regex(*, pattern: str"]),
        ({"function": "regex", "kwargs": {"pattern": "(("}}, ["no regular expression"]),
        ({"function": "regex", "kwargs": {"pattern": "a"}}, ["needs a group"]),
        ({"function": "exact_match", "form": "trl"}, ["no function of a file", "leave reward.form out"]),
        ({"form": "verl"}, ["no function of a file", "reward.function=file.py:function"]),
        ({"function": "exact_match", "kwargs": {"case": True}}, ["'case'", "ignore_case"]),
    ],
)
def test_a_wrong_name_or_argument_is_one_clear_error(settings, words):
    message = refused_when_loaded(RewardSettings(workers=1, **settings))
    for word in words:
        assert word in message


def test_an_error_of_the_worker_reaches_the_caller_whole(tmp_path):
    message = refused(own(tmp_path, "def scores(request): ..."))
    assert message == refused_when_loaded(own(tmp_path, "def scores(request): ..."))
    assert "it has: scores" in message


@pytest.mark.parametrize("data_sources", [(), ("",), ("reasoning_gym/chain_sum", "openai/gsm8k")])
def test_without_a_function_the_data_must_bring_one(data_sources):
    message = refused(RewardSettings(), data_sources)
    assert "a reward function is needed" in message
    assert "file.py:function, or one of exact_match, regex, math_verify, reasoning_gym" in message


def test_choosing_runs_none_of_the_users_code(tmp_path):
    settings = own(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(request): ...")
    assert choose_function(settings).name == "score"
    assert not (tmp_path / "ran").exists()


def test_an_invalid_reward_says_where_it_was_raised(tmp_path):
    with RewardPool(own(tmp_path, "def score(request):\n    return {}['x']")) as pool:
        (reward,) = pool.score([ask("r")])
    assert reward.reason is InvalidReason.RAISED
    assert reward.detail.endswith("my_rewards.py:2 in score: KeyError: 'x'")


def test_the_room_imports_without_torch():
    code = (
        "import sys, meshloom.rewards.pool, meshloom.rewards.verifiers;"
        "print({'torch', 'transformers', 'reasoning_gym', 'math_verify', 'sympy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
