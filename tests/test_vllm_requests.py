"""What is asked of vLLM and what is made of its answers, without vLLM."""

import importlib.util

import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import RolloutSettings
from meshloom.loop.build import check_engine
from meshloom.rollout.protocol import FinishReason, Request, SamplingParams
from meshloom.rollout.stopping import StopRule
from meshloom.rollout.vllm_requests import RunningSample, finish_reason, require_possible, vllm_seed


def sample(**params) -> RunningSample:
    request = Request(id=7, prompt_ids=[1, 2], params=SamplingParams(**{"max_tokens": 9} | params), seeds=[5])
    return RunningSample(
        request, 0, StopRule.of(request.params, (1,), lambda ids: "".join(map(chr, ids))), marks=[(0, 3)]
    )


def test_tokens_end_with_the_one_that_completes_a_stop_string() -> None:
    running = sample(stop_strings=("cd",))
    assert running.streams and running.add([97, 99], [-1.0, -2.0]) is None
    assert running.add([100, 101], [-3.0, -4.0]) == FinishReason.STOP
    done = running.completion(FinishReason.STOP)
    assert (done.ids, done.logprobs) == ([97, 99, 100], [-1.0, -2.0, -3.0])


def test_each_token_knows_its_version() -> None:
    running = sample()
    running.ids, running.logprobs = [4] * 6, [-1.0] * 6
    running.marks += [(2, 4), (5, 6)]
    assert running.completion(FinishReason.LENGTH).versions == [3, 3, 4, 4, 4, 6]
    running.ids, running.logprobs = [4] * 3, [-1.0] * 3
    assert running.completion(FinishReason.ABORTED).versions == [3, 3, 4]


def test_greedy_tokens_have_log_probability_zero() -> None:
    running = sample(temperature=0)
    running.ids, running.logprobs = [4, 5], [-0.5, -0.6]
    assert running.completion(FinishReason.LENGTH).logprobs == [0.0, 0.0]


def test_every_integer_is_a_seed() -> None:
    seeds = [vllm_seed(seed) for seed in (-1, 0, 1, 2**80, -(2**63))]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert vllm_seed(5) == vllm_seed(5)


def test_a_sample_that_vllm_gave_up_is_no_sample() -> None:
    assert finish_reason("length") == FinishReason.LENGTH
    with pytest.raises(RuntimeError, match="error"):
        finish_reason("error")


def test_what_vllm_would_answer_otherwise_is_refused_with_numbers() -> None:
    require_possible([sample(top_p=0.9).request, sample(min_p=0.2).request], longest=11)
    with pytest.raises(UserError, match="max_model_len of at least 11"):
        require_possible([sample().request], longest=10)
    with pytest.raises(UserError, match="top_p and min_p"):
        require_possible([sample(top_p=0.9, min_p=0.2).request], longest=11)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    check_engine(RolloutSettings())
    with pytest.raises(UserError, match=r"vllm>=0.24"):
        check_engine(RolloutSettings(engine="vllm"))
