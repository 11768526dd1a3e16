"""Named shapes: how a response is written, whatever it answers."""

import pytest
import torch

from meshloom.algorithms.shaping import overlong_penalty
from meshloom.config.reward_settings import OverlongSettings
from meshloom.loop.rewarding import overlong_formula
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.shaping import length_penalty, regex_format, repetition_penalty, tag_format


def ask(response: str = "", tokens: int = 0) -> RewardRequest:
    return RewardRequest(
        response=response,
        answer=None,
        data_source="",
        extra={},
        prompt="",
        finish="stop",
        response_ids=tuple(range(tokens)),
    )


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("  <think>a\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("well <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> done", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_stand_once_in_order_with_nothing_outside(response: str, wanted: float) -> None:
    assert tag_format()(ask(response)) == wanted


def test_the_prompt_may_have_opened_the_first_tag() -> None:
    score = tag_format(opened=True)
    assert score(ask("a</think><answer>b</answer>")) == 1.0
    assert score(ask("<think>a</think><answer>b</answer>")) == 0.0
    assert score(ask("</think><answer>b</answer>")) == 0.0


def test_tags_of_other_names() -> None:
    score = tag_format(tags="plan, code ,check")
    assert score(ask("<plan>a</plan><code>b</code><check>c</check>")) == 1.0
    assert score(ask("<plan>a</plan><code>b</code>")) == 0.0


def test_a_pattern_is_found_anywhere_or_is_the_whole() -> None:
    assert regex_format(pattern=r"\d+")(ask("it is 42!")) == 1.0
    assert regex_format(pattern=r"\d+", whole=True)(ask("it is 42!")) == 0.0
    assert regex_format(pattern=r"\d+", whole=True)(ask(" 42\n")) == 1.0


@pytest.mark.parametrize("curve", ["linear", "cosine"])
def test_a_length_penalty_runs_from_nothing_to_the_factor(curve: str) -> None:
    score = length_penalty(max_tokens=30, free_tokens=10, factor=2.0, curve=curve)
    found = [score(ask(tokens=count)) for count in (0, 10, 15, 20, 25, 30, 50)]
    assert found[:2] == [0.0, 0.0]
    assert found[3] == pytest.approx(-1.0)
    assert found[-2:] == [pytest.approx(-2.0)] * 2
    assert found == sorted(found, reverse=True)
    assert found[2] == pytest.approx(-0.5 if curve == "linear" else -1 + 2**-0.5)


def test_repetition_is_the_share_of_n_grams_that_come_again() -> None:
    score = repetition_penalty(ngram=2, factor=3.0)
    assert score(ask("one two three four")) == 0.0
    assert score(ask("a b A B a b")) == pytest.approx(-3.0 * (1 - 2 / 5))
    assert score(ask("one")) == 0.0
    assert repetition_penalty(ngram=1, unit="tokens")(ask("x x x", tokens=3)) == 0.0


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (tag_format, {"tags": "think,think"}),
        (tag_format, {"tags": "a b"}),
        (tag_format, {"tags": ""}),
        (regex_format, {"pattern": "("}),
        (length_penalty, {"max_tokens": 5, "free_tokens": 5}),
        (length_penalty, {"max_tokens": 5, "curve": "steep"}),
        (length_penalty, {"max_tokens": 5, "factor": -1.0}),
        (repetition_penalty, {"ngram": 0}),
        (repetition_penalty, {"unit": "letters"}),
    ],
)
def test_arguments_that_cannot_be_are_refused(make: object, arguments: dict) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make(**arguments)


def test_the_overlong_component_is_the_penalty_of_the_algorithm() -> None:
    formula = overlong_formula(OverlongSettings(buffer_tokens=4, factor=0.5), longest=20)
    lengths = torch.tensor([0, 15, 16, 17, 20, 24])
    wanted = overlong_penalty(lengths, max_tokens=20, buffer_tokens=4, factor=0.5)
    assert [formula(ask(tokens=int(length))) for length in lengths] == wanted.tolist()
    assert wanted.tolist() == [0, 0, 0, -0.125, -0.5, -1.0]
