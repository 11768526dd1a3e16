"""What the engine for GPUs promises beyond the contract: it shares the trainer's weights and gives its pages back.

Without a GPU its kernels are replaced by the same operations in torch; ``test_paged_kernels`` holds the two together.
"""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from meshloom.config.errors import RunFault
from meshloom.rollout import paged_engine as paged_module
from meshloom.rollout.decode_stack import Projection, reason_against
from meshloom.rollout.embedded import embedded_engine
from meshloom.rollout.paged_engine import PagedEngine
from meshloom.rollout.pages import Pages
from meshloom.rollout.step_runner import StepRunner, row_counts
from meshloom.train.attention import use_layouts
from meshloom.train.head import check_head
from tests.models import FAMILIES, tiny_model
from tests.test_engine import DEVICE, ask, collect, mixed_requests, paged_engine, prompt, token_bytes, tokens_of


def count_pages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Pages, int]]:
    """The pages of each generation, and how many there were, as they are made."""
    made: list[tuple[Pages, int]] = []

    class Watched(Pages):
        def __init__(self, count: int, size: int) -> None:
            super().__init__(count, size)
            made.append((self, count))

    monkeypatch.setattr(paged_module, "Pages", Watched)
    return made


@pytest.mark.parametrize("cache_tokens", [200, 320, 2000])
def test_all_pages_come_back(monkeypatch, cache_tokens):
    """Also when samples were set back for want of pages, or aborted, and when a prompt was kept for samples to come."""
    made = count_pages(monkeypatch)
    engine, _ = paged_engine("llama", max_sequences=3, kv_cache_bytes=cache_tokens * token_bytes("paged"))
    collect(engine, mixed_requests())
    stream = engine.generate(mixed_requests(), deadline_s=60)
    next(stream)
    engine.abort(3)
    list(stream)
    assert len(made) == 2
    for pages, count in made:
        assert pages.num_free == count <= cache_tokens // 16


@pytest.mark.parametrize("steps_ahead", [1, 3, 50])
def test_tokens_do_not_depend_on_how_far_ahead_the_device_runs(steps_ahead):
    expected = tokens_of(collect(paged_engine("qwen2")[0], mixed_requests()))
    engine, _ = paged_engine("qwen2", steps_ahead=steps_ahead)
    assert tokens_of(collect(engine, mixed_requests())) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_stay_the_trainers_own(family, tmp_path):
    """Matrices are laid side by side, under the same parameters: an update in place is seen, and a file has each whole."""
    engine, model = paged_engine(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    first = tokens_of(collect(engine, mixed_requests()))
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and torch.equal(parameter, before[name])
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    check_head(model)
    save_file({name: p.detach() for name, p in model.named_parameters() if "lm_head" not in name}, tmp_path / "x")
    saved = load_file(tmp_path / "x")
    assert all(torch.equal(saved[name], before[name].cpu()) for name in saved)
    with torch.no_grad():
        attention.v_proj.weight.mul_(-1)
    changed = tokens_of(collect(engine, mixed_requests()))
    assert changed != first
    with torch.no_grad():
        attention.v_proj.weight.mul_(-1)
    assert tokens_of(collect(engine, mixed_requests())) == first


def test_weights_that_moved_are_found_again():
    engine, model = paged_engine("qwen3")
    first = tokens_of(collect(engine, mixed_requests()))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.zero_()
    fresh = tokens_of(
        collect(PagedEngine(model, eos_ids=(1,), max_sequences=8, kv_cache_bytes=10**8, page=16), mixed_requests())
    )
    assert tokens_of(collect(engine, mixed_requests())) == fresh != first


def test_neighbours_in_one_storage_are_recognised():
    linears = [torch.nn.Linear(4, width) for width in (3, 5)]
    projection = Projection(linears)
    projection.join()
    at = linears[0].weight.data_ptr()
    projection.join()
    assert linears[0].weight.data_ptr() == at
    x = torch.randn(2, 4)
    torch.testing.assert_close(projection(x), torch.cat([linear(x) for linear in linears], 1))


def test_adapters_take_part():
    base = tiny_model("qwen3", torch.float32 if DEVICE == "cuda" else torch.float64).to(DEVICE)
    use_layouts(base)
    options = {"eos_ids": (), "kv_cache_bytes": 10**7, "page": 16}
    requests = [ask(0, prompt(6), seeds=[1, 2])]
    before = tokens_of(collect(PagedEngine(base, **options), requests))
    wrapped = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear"))
    wrapped.train()
    engine = PagedEngine(wrapped, **options)
    assert tokens_of(collect(engine, requests)) == before
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=torch.Generator(weight.device).manual_seed(0))
    adapted = tokens_of(collect(engine, requests))
    assert adapted != before
    merged = wrapped.merge_and_unload()
    assert tokens_of(collect(PagedEngine(merged, **options), requests)) == adapted


def adapted_llama(**options) -> torch.nn.Module:
    base = tiny_model("llama", torch.float32 if DEVICE == "cuda" else torch.float64).to(DEVICE)
    use_layouts(base)
    wrapped = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **options))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "modules_to_save" in name:
                weight.add_(torch.rand(weight.shape, generator=random).to(weight))
    return wrapped


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["k_proj", "up_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    ],
)
def test_adapters_that_are_left_out_or_merged_are_noticed(options):
    """A captured step went on with the adapters of its first generation, and a stack with the norms of theirs."""
    wrapped = adapted_llama(**options)
    requests = [ask(0, prompt(6), seeds=[1, 2])]
    engine = PagedEngine(wrapped, eos_ids=(), kv_cache_bytes=10**7, page=16)
    with_adapters, runner = tokens_of(collect(engine, requests)), engine._runner
    assert tokens_of(collect(engine, requests)) == with_adapters and engine._runner is runner
    with wrapped.disable_adapter():
        expected = tokens_of(collect(PagedEngine(wrapped, eos_ids=(), kv_cache_bytes=10**7, page=16), requests))
        assert tokens_of(collect(engine, requests)) == expected != with_adapters
        assert engine._runner is not runner
    runner = engine._runner
    wrapped.merge_adapter()
    assert tokens_of(collect(engine, requests)) == with_adapters and engine._runner is not runner


def test_models_whose_weights_cannot_be_laid_side_by_side_are_refused():
    """An adapter on the embedding was passed over; of two places that shared a weight one kept its old values."""
    assert "embedding" in reason_against(adapted_llama(target_modules=["q_proj", "embed_tokens"]))
    for there, here in (("v_proj", 0), ("k_proj", 2)):
        model = tiny_model("llama")
        getattr(model.model.layers[here].self_attn, there).weight = model.model.layers[0].self_attn.k_proj.weight
        assert "share" in reason_against(model)


def test_old_buffers_and_graphs_go_before_new_ones_are_made(monkeypatch):
    """They stayed until the garbage collector came: two sets of buffers and, after weights had moved, two of weights."""
    made: list[weakref.ref[StepRunner]] = []

    class Watched(StepRunner):
        def __init__(self, *args) -> None:
            assert all(old() is None for old in made)
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(paged_module, "StepRunner", Watched)
    engine, _ = paged_engine("llama")
    gc.collect()
    gc.disable()
    try:
        for tokens in (5, 50, 500):
            collect(engine, [ask(0, prompt(4), max_tokens=tokens)])
        assert len(made) == 3
        del engine
        assert made[-1]() is None
    finally:
        gc.enable()


def test_weights_that_are_not_finite_stop_the_generation():
    engine, model = paged_engine("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RunFault, match="model.path"):
        collect(engine, [ask(0, prompt(4))])
    engine.load_weights(3)
    with pytest.raises(RunFault, match="of version 3 give logits that are not finite\n.*optimizer.lr"):
        collect(engine, [ask(0, prompt(4))])
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    collect(engine, [ask(0, prompt(4))])


def test_a_family_of_another_form_is_named_and_gets_the_other_engine():
    assert all(reason_against(tiny_model(family)) is None for family in FAMILIES)
    learned_positions = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=97, n_embd=64, n_layer=1, n_head=4))
    assert "GPT2LMHeadModel are not of a family" in (reason_against(learned_positions) or "")
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    narrow = AutoModelForCausalLM.from_config(config)
    assert "width 12" in reason_against(narrow)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    moving = AutoModelForCausalLM.from_config(
        Qwen2Config(**{**config.to_dict(), "hidden_size": 64, "rope_parameters": rope})
    )
    assert "dynamic" in reason_against(moving)
    use_layouts(narrow)
    engine = embedded_engine(narrow, eos_ids=(), max_sequences=2, kv_cache_bytes=None, prefill_tokens=64, decode=None)
    assert type(engine).__name__ == "TorchEngine"


@settings(deadline=None)
@given(st.integers(1, 1100))
def test_a_number_of_rows_has_a_step_that_is_not_much_larger(rows):
    counts = row_counts(1100)
    assert counts == sorted(set(counts)) and counts[-1] == 1100
    size = next(count for count in counts if count >= rows)
    assert size <= max(2 * rows - 1, 8) if rows < 32 else size <= rows * 1.5
    assert len(counts) < 32


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_pages_are_neither_lost_nor_given_twice(steps):
    pages, held = Pages(12, 16), []
    for take, number in steps:
        if take and number <= pages.num_free:
            held.append(pages.take(number))
        elif not take and held:
            pages.release(held.pop(number % len(held)))
        taken = [page for own in held for page in own]
        assert len(taken) == len(set(taken)) and pages.num_free == 12 - len(taken)
    if held:
        pages.share(held[0])
        pages.release(held[0])
        assert all(pages.holders(page) == 1 for page in held[0])
