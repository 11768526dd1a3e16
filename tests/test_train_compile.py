"""Compiled layers: the same gradients, one piece of code for all layers and lengths, and nothing outside training passes."""

import copy

import pytest
import torch

from meshloom.config.errors import UserError
from meshloom.config.settings import LoraSettings
from meshloom.samples import Samples
from meshloom.train.attention import use_layouts
from meshloom.train.layer_passes import LayerPasses
from meshloom.train.load import add_lora
from meshloom.train.model import TrainedModel
from tests.models import tiny_model
from tests.test_train_model import SETTINGS, gradients, make_samples, trained, weighted


class Counting:
    """A backend that compiles nothing, and counts what it was given to compile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> object:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def compiled(model: TrainedModel, backend: object = "aot_eager") -> TrainedModel:
    recompute = model.settings.gradient_checkpointing
    model.layers = LayerPasses(model.decoder, compiled=True, recompute=recompute, backend=backend)
    return model


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.init()  # else the compiler does it in the midst of a recomputed layer, which torch refuses


def test_gradients_are_those_of_layers_that_are_not_compiled() -> None:
    """With windows in some layers, and recomputed in the backward pass."""
    module = tiny_model("gemma3", torch.float64)
    use_layouts(module)
    settings = SETTINGS.model_copy(update={"gradient_checkpointing": True})
    plain = trained(copy.deepcopy(module), 34, settings=settings)
    ours = compiled(trained(module, 34, settings=settings))
    samples = make_samples()
    for model in (plain, ours):
        model.forward_backward(samples, weighted, temperature=1.0)
    for name, grad in gradients(ours).items():
        torch.testing.assert_close(grad, gradients(plain)[name], rtol=1e-6, atol=1e-7)
    for one, other in zip(*(m.forward(samples, temperature=1.0) for m in (plain, ours)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_adapters_are_compiled_and_left_out_alike() -> None:
    lora = LoraSettings(rank=4, target_modules=("q_proj",))
    module = tiny_model("qwen3", torch.float64)
    use_layouts(module)
    settings = SETTINGS.model_copy(update={"lora": lora})
    models = [trained(add_lora(copy.deepcopy(module), lora, seed=1), 34, settings=settings) for _ in range(2)]
    compiled(models[1])
    for model in models:
        for parameter in model.optimizer.parameters.values():
            parameter.data.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.1)
        model.forward_backward(make_samples(), weighted, temperature=1.0)
    for name, grad in gradients(models[1]).items():
        torch.testing.assert_close(grad, gradients(models[0])[name], rtol=1e-6, atol=1e-7)
    for adapters in (True, False):
        one, other = (model.forward(make_samples(), temperature=1.0, adapters=adapters)[0] for model in models)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_new_lengths_and_further_layers_compile_nothing() -> None:
    module = tiny_model("qwen2")
    use_layouts(module)
    backend = Counting()
    model = compiled(trained(module, 200), backend)
    counts = []
    for lengths in ([5, 7], [30], [9, 9, 3], [4, 4, 4, 4], [11, 2, 100], [60, 61], [17], [150, 50]):
        ids = torch.arange(sum(lengths)) % 90 + 3
        samples = Samples(torch.tensor(lengths), {"ids": ids, "mask": torch.ones(len(ids), dtype=torch.bool)})
        samples.tokens["mask"][samples.offsets[:-1]] = False
        samples = samples.with_tokens(weight=torch.ones(len(ids)))
        model.forward_backward(samples, weighted, temperature=1.0)
        counts.append(backend.graphs)
    # Before, between and after attention, and the last norm; once more for attention outputs of one run of equal lengths.
    assert counts[0] > 0 and counts[1] <= 8
    assert set(counts[1:]) == {counts[1]}


def test_nothing_is_compiled_outside_a_pass() -> None:
    module = tiny_model("llama")
    use_layouts(module)
    backend = Counting()
    model = compiled(trained(module, 64), backend)
    from meshloom.train.attention import PackedAttention

    ids = torch.arange(6)[None]
    with torch.inference_mode():
        model.decoder(input_ids=ids, position_ids=ids, layout=PackedAttention([6]), use_cache=False)
    assert backend.graphs == 0
    assert all("forward" not in vars(layer) for layer in module.model.layers)


def test_what_cannot_be_compiled_is_an_error() -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list) -> object:
        raise RuntimeError("no compiler here")

    module = tiny_model("llama")
    use_layouts(module)
    model = compiled(trained(module, 64), fails)
    with pytest.raises(UserError, match="cannot be compiled") as caught:
        model.forward_backward(make_samples(), weighted, temperature=1.0)
    assert caught.value.fix == "model.compile=false" and "no compiler here" in caught.value.why
    assert all("forward" not in vars(layer) for layer in module.model.layers)


def test_a_pass_that_failed_in_a_recomputed_layer_leaves_nothing_behind(monkeypatch) -> None:
    """Also while the exception is still looked at, as by whoever reports it."""
    module = tiny_model("llama")
    use_layouts(module)
    model = trained(module, 64, settings=SETTINGS.model_copy(update={"gradient_checkpointing": True}))

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(module.model.layers[1].mlp, "forward", fails)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        model.forward_backward(make_samples(), weighted, temperature=1.0)
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    assert caught.value is not None and x.grad.tolist() == [2, 2]


def test_a_model_without_layers_of_the_usual_kind_is_refused() -> None:
    with pytest.raises(UserError, match="no layers"):
        LayerPasses(torch.nn.Linear(2, 2), compiled=False, recompute=True)


def test_the_compiler_of_the_processor_gives_the_same_gradients() -> None:
    module = tiny_model("qwen2")
    use_layouts(module)
    plain = trained(copy.deepcopy(module), 100)
    ours = trained(module, 100, settings=SETTINGS.model_copy(update={"compile": True}))
    for model in (plain, ours):
        model.forward_backward(make_samples(), weighted, temperature=1.0)
    for name, grad in gradients(ours).items():
        torch.testing.assert_close(grad, gradients(plain)[name], rtol=1e-3, atol=1e-4)
