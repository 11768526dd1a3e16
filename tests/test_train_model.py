"""Packed forward and backward: equal to one-by-one in transformers, and independent of how samples are packed."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    Llama4TextConfig,
    MambaConfig,
    PreTrainedConfig,
)

from meshloom.config.errors import RunFault, UserError
from meshloom.config.settings import LoraSettings, ModelSettings, OptimizerSettings
from meshloom.samples import Samples
from meshloom.train import products
from meshloom.train.attention import use_layouts
from meshloom.train.head import OutputHead, check_head
from meshloom.train.load import add_lora
from meshloom.train.model import LossParts, MicrobatchBound, TrainedModel
from meshloom.train.optimizer import Optimizer
from meshloom.train.snapshot import save_adapter_config
from tests.models import FAMILIES, tiny_model

LENGTHS = [13, 5, 21, 13, 2, 9]
_NARROW = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
SETTINGS = ModelSettings(path="-", logits_chunk_bytes=97 * 8 * 7)


def make_samples(seed: int = 0) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    samples = Samples(
        torch.tensor(LENGTHS),
        tokens={
            "ids": torch.randint(3, 97, (total,), generator=generator),
            "mask": torch.rand(total, generator=generator) < 0.7,
        },
    )
    samples.tokens["mask"][samples.offsets[:-1]] = False
    return samples.with_tokens(weight=torch.randn(total, generator=generator, dtype=torch.float64))


def weighted(microbatch: Samples, logprob_T: torch.Tensor, entropy_T: torch.Tensor) -> LossParts:
    """A loss whose gradient differs at every token."""
    per_token = microbatch["weight"].to(logprob_T.dtype) * logprob_T + 0.1 * entropy_T * microbatch["weight"].abs()
    return LossParts((per_token * microbatch["mask"]).sum(), {"tokens": microbatch["mask"].sum()})


def trained(
    module: torch.nn.Module, tokens: int, samples: int | None = None, settings: ModelSettings = SETTINGS
) -> TrainedModel:
    return TrainedModel(module, settings, MicrobatchBound(tokens, samples), OptimizerSettings(lr=1e-3))


def gradients(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.optimizer.parameters.items()}


def reference_gradients(module: torch.nn.Module, samples: Samples) -> dict[str, torch.Tensor]:
    """One sample at a time, whole logits, transformers' own attention."""
    for part in samples:
        logp = log_softmax(module(input_ids=part["ids"][None]).logits[0].double(), -1)[:-1]
        chosen = logp.gather(-1, part["ids"][1:, None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        weight, mask = part["weight"][1:], part["mask"][1:]
        ((weight * chosen + 0.1 * entropy * weight.abs()) * mask).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradient_equals_one_by_one(family: str) -> None:
    module = tiny_model(family, torch.float64)
    samples = make_samples()
    expected = reference_gradients(copy.deepcopy(module), samples)
    use_layouts(module)
    # Gemma's norms compute in float32 whatever the model's dtype, which turns differences of 1e-16 into 1e-7.
    tolerance = 1e-5 if family == "gemma3" else 1e-10
    for tokens, count in ((sum(LENGTHS), None), (21, None), (40, 2)):
        model = trained(copy.deepcopy(module), tokens, count)
        sums = model.forward_backward(samples, weighted, temperature=1.0)
        assert sums["tokens"] == samples["mask"].sum()
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, expected[name], rtol=tolerance, atol=tolerance)


def test_gradient_does_not_depend_on_order_or_recompute() -> None:
    module = tiny_model("qwen3", torch.float64)
    use_layouts(module)
    samples = make_samples()
    first = trained(copy.deepcopy(module), 34)
    loss = first.forward_backward(samples, weighted, temperature=0.7)["loss"]
    for order, recompute in (([5, 2, 0, 4, 3, 1], False), (range(6), True)):
        settings = SETTINGS.model_copy(update={"gradient_checkpointing": recompute})
        other = trained(copy.deepcopy(module), 50, settings=settings)
        again = other.forward_backward(samples.select(list(order)), weighted, temperature=0.7)["loss"]
        assert abs(again - loss) < 1e-10
        for name, grad in gradients(other).items():
            torch.testing.assert_close(grad, gradients(first)[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_dropout_of_the_model_is_never_on(lora: LoraSettings | None) -> None:
    """Recompute and adapters used to put the whole model into training mode: attention dropout of a model's own
    configuration then ended the run in its first step, and other dropout was trained with, unlike what was sampled."""
    module = tiny_model("qwen3")
    use_layouts(module)
    layers = module.model.layers
    layers[0].mlp = torch.nn.Sequential(layers[0].mlp, torch.nn.Dropout(0.5))
    layers[1].self_attn.attention_dropout = 0.5
    settings = SETTINGS.model_copy(update={"gradient_checkpointing": True, "lora": lora})
    module = module if lora is None else add_lora(module, lora, seed=0)
    model = trained(module, 64, settings=settings)
    recomputed = []
    layers[2].mlp.register_forward_pre_hook(lambda *unused: recomputed.append(1))
    losses = [model.forward_backward(make_samples(), weighted, temperature=1.0)["loss"] for _ in range(2)]
    assert losses[0] == losses[1]
    assert len(recomputed) == 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FalconConfig(**_NARROW), "FalconForCausalLM mixes tokens in ways of its own"),
        (MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=1), "MambaForCausalLM mixes"),
        (Gemma3TextConfig(**_NARROW, head_dim=16, use_bidirectional_attention=True), "attend to later ones"),
        (Llama4TextConfig(**_NARROW, num_local_experts=2, layer_types=["chunked_attention"]), "chunked_attention"),
    ],
)
def test_layers_that_mix_tokens_by_other_means_are_refused(config: PreTrainedConfig, said: str) -> None:
    """Such layers never look at where a sample begins: fine-tuning trained each sample on those packed before it, and nothing
    said so."""
    with pytest.raises(UserError, match=said):
        use_layouts(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_whole_logits_at_a_temperature(family: str) -> None:
    module = tiny_model(family, torch.float64)
    samples = make_samples()
    logits = [module(input_ids=part["ids"][None]).logits[0].double() for part in samples]
    use_layouts(module)
    logprob_T, entropy_T = trained(module, 30).forward(samples, temperature=0.6)
    for part, whole, logprob, entropy in zip(
        samples, logits, logprob_T.split(LENGTHS), entropy_T.split(LENGTHS), strict=True
    ):
        logp = log_softmax(whole[:-1] / 0.6, -1)
        mask = part["mask"][1:]
        torch.testing.assert_close(logprob[1:], logp.gather(-1, part["ids"][1:, None]).squeeze(-1) * mask)
        torch.testing.assert_close(entropy[1:], -(logp.exp() * logp).sum(-1) * mask)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_of_a_bfloat16_model_are_not_rounded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were on the processor: half of what sampler and trainer disagreed about was that. In pieces of the vocabulary."""
    monkeypatch.setattr(products, "_PIECE_BYTES", 40 * 64 * 4)
    module = tiny_model(family, torch.bfloat16)
    hidden_ND = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        logits_NV = OutputHead(module).logits(hidden_ND)
    exact_NV = hidden_ND.double() @ module.get_output_embeddings().weight.double().T
    torch.testing.assert_close(logits_NV.double(), exact_NV, rtol=1e-5, atol=1e-5)


def test_bfloat16_model_accumulates_and_steps_in_float32() -> None:
    """Adding many small bfloat16 gradients or updates in bfloat16 would lose them."""
    module = tiny_model("llama", torch.bfloat16)
    use_layouts(module)
    model = trained(module, 21)
    before = {name: m.detach().clone() for name, m in model.optimizer.masters.items()}
    model.forward_backward(make_samples(), weighted, temperature=1.0)
    assert all(p.grad is None for p in model.optimizer.parameters.values())
    assert all(m.grad.dtype == torch.float32 for m in model.optimizer.masters.values())
    assert model.optim_step(total_updates=10).grad_norm > 0
    for name, master in model.optimizer.masters.items():
        assert not torch.equal(master, before[name])
        torch.testing.assert_close(model.optimizer.parameters[name], master.to(torch.bfloat16), rtol=0, atol=0)


def test_adapters_train_alone_and_the_base_answers_without_them() -> None:
    module = tiny_model("qwen3", torch.float32)
    use_layouts(module)
    base_logprob, _ = trained(copy.deepcopy(module), 64).forward(make_samples(), temperature=1.0)
    settings = SETTINGS.model_copy(update={"lora": LoraSettings(rank=4)})
    model = trained(add_lora(module, settings.lora, seed=1), 64, settings=settings)
    assert all("lora_" in name for name in model.optimizer.parameters)
    for _ in range(3):
        model.forward_backward(make_samples(), weighted, temperature=1.0)
        model.optim_step(total_updates=3)
    with_adapters, _ = model.forward(make_samples(), temperature=1.0)
    without, _ = model.forward(make_samples(), temperature=1.0, adapters=False)
    torch.testing.assert_close(without, base_logprob)
    assert (with_adapters - without).abs().max() > 1e-3


def test_settings_of_adapters_name_layers_in_one_order(tmp_path: Path) -> None:
    """They were in the order of a set: another one in each process, so two equal runs had different checkpoints."""
    settings = SETTINGS.model_copy(update={"lora": LoraSettings(rank=2)})
    model = trained(add_lora(tiny_model("qwen3"), settings.lora, seed=1), 64, settings=settings)
    save_adapter_config(model, tmp_path / "adapter")
    names = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert len(names) == 7 and names == sorted(names)


@pytest.mark.parametrize(("value", "said"), [(1e25, "as a whole, is not finite"), (float("nan"), "where: weight")])
def test_a_gradient_that_no_number_holds_stops_the_run_with_a_reason(value: float, said: str) -> None:
    """Where each gradient was finite and their norm was not, an error of the program named no parameter."""
    module = torch.nn.Linear(3, 3, bias=False)
    optimizer, before = Optimizer(module, OptimizerSettings()), module.weight.clone()
    module.weight.grad = torch.full((3, 3), value)
    with pytest.raises(RunFault, match=said):
        optimizer.step(total_updates=1)
    assert torch.equal(module.weight, before)


def test_no_tensor_of_tokens_times_vocabulary_is_alive() -> None:
    """The largest tensor made in forward and backward stays under the chunk bound, not tokens × vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if (
                    isinstance(tensor, torch.Tensor)
                    and tensor.ndim == 2
                    and tensor.shape[-1] == 97
                    and tensor.shape[0] != 64
                ):
                    Largest.elements = max(Largest.elements, tensor.numel())
            return out

    module = tiny_model("llama", torch.float32)
    use_layouts(module)
    model = trained(module, 100, settings=SETTINGS.model_copy(update={"logits_chunk_bytes": 97 * 4 * 6}))
    with Largest():
        model.forward_backward(make_samples(), weighted, temperature=1.0)
    # Six rows of logits a chunk. What has 64 rows is a view of the weight itself.
    assert 0 < Largest.elements <= 97 * 6


def test_first_token_cannot_be_trained_on() -> None:
    module = tiny_model("llama")
    use_layouts(module)
    samples = make_samples()
    samples.tokens["mask"][0] = True
    with pytest.raises(ValueError, match="first token"):
        trained(module, 64).forward(samples, temperature=1.0)


def test_a_parameter_without_gradient_is_refused() -> None:
    module = tiny_model("llama")
    use_layouts(module)
    module.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match="forgotten"):
        trained(module, 64).forward_backward(make_samples(), weighted, temperature=1.0)


def test_a_model_whose_weights_are_no_numbers_is_refused_with_the_weights_name():
    model = tiny_model("qwen3")
    use_layouts(model)
    check_head(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(UserError, match=r"NaN(.|\n)*layers\.1\.mlp\.up_proj\.weight has values"):
        check_head(model)
