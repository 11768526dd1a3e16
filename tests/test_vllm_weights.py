"""Weights in real vLLM: its own loaders show where its parameters hold what, and copies alone do the rest."""

import copy
from collections.abc import Iterator

import pytest
import torch

from meshloom.config.errors import UserError
from meshloom.rollout.protocol import Request, SamplingParams
from meshloom.weights.movement import Movement
from meshloom.weights.probe import trainer_logprobs
from meshloom.weights.source import WeightsSource
from tests.models import FAMILIES
from tests.vllm_engines import DEVICE, opened, trained, vllm_engine

pytestmark = pytest.mark.vllm


class Unpacked:
    """vLLM's model as it is on a GPU: what its loaders fill is what its kernels read."""

    keeps_layout = True

    def __init__(self, family: str) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model

        config = copy.copy(opened(family, 8, 10**8, 64).llm.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with set_current_vllm_config(config), DEVICE:
            self.built = initialize_model(vllm_config=config)

    def model(self) -> torch.nn.Module:
        return self.built

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.built.load_weights(tensors)

    def reload(self, tensors: object) -> None:
        raise AssertionError("the loaders are asked again")


@pytest.mark.parametrize("family", FAMILIES)
def test_vllms_loaders_can_be_replaced_by_copies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, receiver = trained(family), Unpacked(family)
    movement = Movement(WeightsSource(model))
    first = movement.move(receiver)
    assert first.direct
    expected = Unpacked(family).model()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.normal_()
        expected.load_weights(WeightsSource(model)())
    monkeypatch.setattr(type(receiver.built), "load_weights", None)
    assert movement.move(receiver).checksum != first.checksum
    for name, parameter in receiver.built.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_log_probs_of_given_tokens_are_the_trainers() -> None:
    engine, _ = vllm_engine("qwen3")
    ids = [[5, 9, 31, 4, 4, 60], [1, 2]]
    for found, expected in zip(engine.score(ids), trainer_logprobs(trained("qwen3"))(ids), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_prompt_is_kept_within_a_version_and_forgotten_with_it() -> None:
    engine, _ = vllm_engine("llama", max_sequences=1)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [Request(id=0, prompt_ids=list(range(2, 80)) * 4, params=params, seeds=[1, 2, 3])]

    def kept() -> int:
        before = engine.metrics()["cached_prompt_tokens"]
        list(engine.generate(requests, deadline_s=60))
        return engine.metrics()["cached_prompt_tokens"] - before

    first, second = kept(), kept()
    assert 0 < first < second
    engine.load_weights(1)
    assert kept() == first


def test_weights_that_come_while_it_sleeps_are_there_when_it_wakes() -> None:
    engine, model = vllm_engine("llama")
    ids = [[5, 9, 31, 4, 4, 60]]
    before = engine.score(ids)
    engine.sleep()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    engine.load_weights(3)
    engine.wake()
    assert engine.score(ids) != before
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    done = list(engine.generate([Request(id=0, prompt_ids=[4], params=params, seeds=[0])], deadline_s=60))
    assert done[0].versions == [3, 3]


def test_filters_and_temperatures_that_vllm_uses_in_another_way_are_refused() -> None:

    engine, _ = vllm_engine("llama")
    for wrong, says in (
        ({"top_p": 0.9, "min_p": 0.1}, "together"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
        ({"max_tokens": 40_000}, "max_model_len of at least 40001"),
    ):
        params = SamplingParams(**{"max_tokens": 2} | wrong)
        with pytest.raises(UserError, match=says):
            engine.generate([Request(id=0, prompt_ids=[4], params=params, seeds=[0])], deadline_s=1)
