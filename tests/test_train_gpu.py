"""Training on a GPU gives what training on the processor gives: every kernel that is chosen there, together."""

import copy

import pytest
import torch

from meshloom.config.settings import LoraSettings
from meshloom.train.attention import use_layouts
from meshloom.train.load import add_lora
from tests.models import tiny_model
from tests.test_train_model import SETTINGS, make_samples, trained, weighted
from tests.test_train_sharing import make_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_processor(family: str, dtype: torch.dtype, recompute: bool) -> None:
    """Packed samples and shared prompts, compiled layers, the fused head; float32 exactly, bfloat16 to its rounding."""
    module = tiny_model(family, dtype)
    use_layouts(module)
    settings = SETTINGS.model_copy(update={"gradient_checkpointing": recompute, "logits_chunk_bytes": 97 * 8 * 20})
    models = [
        trained(copy.deepcopy(module).float(), 60),
        trained(copy.deepcopy(module).to("cuda"), 60, settings=settings),
    ]
    assert models[1].in_graph == (dtype == torch.bfloat16)
    for samples in (make_samples(), make_groups()):
        for model in models:
            model.forward_backward(samples, weighted, temperature=0.8)
        exact, ours = ({name: m.grad.cpu() for name, m in model.optimizer.masters.items()} for model in models)
        bound = 0.05 if dtype == torch.bfloat16 else 1e-4
        for name, grad in ours.items():
            assert (grad - exact[name]).norm() <= bound * exact[name].norm(), name
        one, other = (model.forward(samples, temperature=0.8)[0] for model in models)
        torch.testing.assert_close(other, one, rtol=0, atol=0.1 if dtype == torch.bfloat16 else 1e-4)


def test_adapters_train_on_a_gpu() -> None:
    lora = LoraSettings(rank=4)
    module = tiny_model("qwen3", torch.bfloat16)
    use_layouts(module)
    settings = SETTINGS.model_copy(update={"lora": lora})
    model = trained(add_lora(module, lora, seed=1).to("cuda"), 64, settings=settings)
    before = model.forward(make_samples(), temperature=1.0)[0]
    for _ in range(3):
        model.forward_backward(make_samples(), weighted, temperature=1.0)
        model.optim_step(total_updates=3)
    assert (model.forward(make_samples(), temperature=1.0)[0] - before).abs().max() > 1e-3
    torch.testing.assert_close(
        model.forward(make_samples(), temperature=1.0, adapters=False)[0], before, rtol=0, atol=0.05
    )


def test_a_pass_waits_for_nothing_until_its_results_are_read() -> None:
    """No copy or product of a microbatch makes the processor wait for the device; the first pass compiles and may."""
    module = tiny_model("llama", torch.bfloat16).to("cuda")
    use_layouts(module)
    model = trained(module, 60)
    for _ in range(2):
        model.forward_backward(make_groups(), weighted, temperature=1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forward_backward(make_groups(), weighted, temperature=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
