"""What is asked of vLLM and what is made of its answers, without vLLM."""

import importlib.util

import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import RolloutSettings
from meshloom.loop.build import check_engine
from meshloom.rollout.protocol import FinishReason, Request, SamplingParams
from meshloom.rollout.stopping import StopRule
from meshloom.rollout.vllm_requests import RunningSample, finish_reason, require_possible, vllm_seed
from meshloom.rollout.vllm_samples import SamplesAtWork


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


def at_work(apart: bool, *kinds: tuple[int, float]) -> SamplesAtWork:
    """Samples that wait, each of a request and with a temperature."""
    found = SamplesAtWork(kinds_apart=apart)
    for number, temperature in kinds:
        params = SamplingParams(max_tokens=9, temperature=temperature)
        request = Request(id=number, prompt_ids=[1], params=params, seeds=[0])
        found.add([RunningSample(request, 0, StopRule.of(params, (), None), marks=[(0, 0)])])
    return found


def start(found: SamplesAtWork) -> list[int]:
    """Put what is ready into vLLM."""
    ready = found.ready()
    found.running.update((f"{sample.request.id}", sample) for sample in ready)
    return [sample.request.id for sample in ready]


def test_greedy_samples_and_others_are_not_in_vllm_together_where_it_mixes_them_up() -> None:
    """Those that come later join their own kind, and the other kind follows when that has ended."""
    assert start(at_work(False, (0, 0.0), (1, 1.0))) == [0, 1]
    found = at_work(True, (0, 0.0), (1, 1.0))
    assert start(found) == [1]
    found.add([*at_work(True, (2, 1.0)).waiting, *at_work(True, (3, 0.0)).waiting])
    assert start(found) == [2]
    for key in ("1", "2"):
        found.finished(key)
    assert start(found) == [0, 3] and found and not found.waiting


def test_a_request_has_begun_with_the_first_token_of_any_sample() -> None:
    found = at_work(True, (0, 1.0), (1, 1.0), (2, 1.0), (2, 0.0), (3, 0.0))
    start(found)
    assert found.unbegun(lambda sample: sample.request.id == 0) == {1, 2, 3}
    found.finished("2")
    assert found.unbegun(lambda sample: False) == {0, 1, 3}, "what is left of 2 was begun with it"


def test_samples_that_end_early_are_in_vllm_no_more_and_those_that_never_were_have_no_tokens() -> None:
    found = at_work(True, (0, 1.0), (1, 1.0), (2, 0.0), (3, 0.0))
    start(found)
    keys, ended = found.take(lambda sample: sample.request.id in (1, 2))
    assert (keys, [sample.request.id for sample in ended]) == (["1"], [1, 2])
    assert list(found.running) == ["0"] and [sample.request.id for sample in found.waiting] == [3]
    assert ended[1].completion(FinishReason.ABORTED).versions == []


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
