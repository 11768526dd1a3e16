"""What the embedded engine promises beyond the contract: the trainer's module and memory are left as they were."""

import sys
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DeepseekV2Config, DiffLlamaConfig, GPT2Config

from bench import engine as bench_engine
from bench import turns as bench_turns
from meshloom.config.errors import RunFault, UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan import build_plan
from meshloom.rollout.kv_cache import CacheShape
from meshloom.rollout.protocol import Request, SamplingParams
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.attention import use_layouts
from tests.models import tiny_model
from tests.test_engine import DEVICE, ask, collect, converse, mixed_requests, prompt, tokens_of, torch_engine


class Ledger:
    """Bytes of the cache's tensors that are alive, watched from outside: at allocation and when their storage dies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = self.peak = 0
        allocate = CacheShape.empty

        def watched(shape: CacheShape, slots: int, capacity: int) -> torch.Tensor:
            tensor = allocate(shape, slots, capacity)
            weakref.finalize(tensor, self._add, -tensor.nbytes)
            self._add(tensor.nbytes)
            return tensor

        monkeypatch.setattr(CacheShape, "empty", watched)

    def _add(self, num_bytes: int) -> None:
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)


@pytest.mark.parametrize("cache_tokens", [190, 300, 600, 1500])
def test_the_cache_never_takes_more_bytes_than_it_may(monkeypatch, cache_tokens):
    """Also while banks grow, shrink and hand over, and when samples are set back for want of memory."""
    ledger = Ledger(monkeypatch)
    budget = cache_tokens * 2 * 3 * 2 * 16 * 8
    engine, _ = torch_engine("llama", kv_cache_bytes=budget, max_sequences=16)
    collect(engine, mixed_requests())
    assert budget / 4 < ledger.peak <= budget
    assert ledger.alive == 0


def test_closing_early_frees_the_cache(monkeypatch):
    ledger = Ledger(monkeypatch)
    engine, _ = torch_engine("llama")
    stream = engine.generate([ask(i, prompt(5), max_tokens=3 + 90 * i) for i in range(3)], deadline_s=60)
    next(stream)
    assert ledger.alive > 0
    stream.close()
    assert ledger.alive == 0


def test_what_is_kept_stays_within_the_bound_and_goes_with_the_generation(monkeypatch):
    """It takes memory that slots do not need, and no more."""
    ledger = Ledger(monkeypatch)
    budget = 600 * 2 * 3 * 2 * 16 * 8
    engine, _ = torch_engine("llama", kv_cache_bytes=budget)
    converse(engine, keep=True, seeds=range(6))
    assert engine.take_prompts().reused > 0 and budget / 2 < ledger.peak <= budget
    assert ledger.alive == 0


def test_memory_follows_what_was_generated_not_what_might_be(monkeypatch):
    ledger = Ledger(monkeypatch)
    engine, _ = torch_engine("llama", eos_ids=tuple(range(97)))
    collect(engine, [ask(i, prompt(5), max_tokens=4000, ignore_eos=False) for i in range(8)])
    assert ledger.peak <= 8 * 64 * 1536


def test_the_module_keeps_its_mode_and_nothing_leaks_between_samples():
    engine, model = torch_engine("llama")
    model.train()
    model.lm_head.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    for _ in engine.generate([ask(i, prompt(5), max_tokens=3 + 5 * i) for i in range(3)], deadline_s=60):
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_model_in_training_with_checkpointing_generates_the_same():
    engine, model = torch_engine("qwen3")
    expected = tokens_of(collect(engine, mixed_requests()))
    model.gradient_checkpointing_enable()
    model.train()
    assert tokens_of(collect(engine, mixed_requests())) == expected


def test_adapters_take_part():
    base = tiny_model("qwen3", torch.float64).to(DEVICE)
    use_layouts(base)
    requests = [ask(0, prompt(6), seeds=[1, 2])]
    before = tokens_of(collect(TorchEngine(base, eos_ids=(), kv_cache_bytes=10**7), requests))
    wrapped = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    engine = TorchEngine(wrapped, eos_ids=(), kv_cache_bytes=10**7)
    assert tokens_of(collect(engine, requests)) == before
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=torch.Generator(weight.device).manual_seed(0))
    adapted = tokens_of(collect(engine, requests))
    assert adapted != before
    merged = wrapped.merge_and_unload()
    assert tokens_of(collect(TorchEngine(merged, eos_ids=(), kv_cache_bytes=10**7), requests)) == adapted


def test_weights_that_are_not_finite_stop_the_generation():
    engine, model = torch_engine("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RunFault, match="model.path"):
        collect(engine, [ask(0, prompt(4))])
    engine.load_weights(3)
    with pytest.raises(RunFault, match="of version 3 give logits that are not finite\n.*optimizer.lr"):
        collect(engine, [ask(0, prompt(4))])


def test_the_default_bound_is_a_part_of_the_free_memory():
    engine, _ = torch_engine("llama", kv_cache_bytes=None)
    assert 2**20 < engine.kv_cache_bytes < 2**43


def test_a_family_with_its_own_names_of_sizes_generates():
    """GPT-2 calls its heads n_head and its width n_embd: the engine used to end with a KeyError."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, initializer_range=0.15, bos_token_id=2, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE, torch.float64).eval()
    use_layouts(model)
    engine = TorchEngine(model, eos_ids=(), kv_cache_bytes=10**7)
    (done,) = collect(engine, [ask(0, prompt(6), seeds=[1])]).values()
    model.set_attn_implementation("eager")
    ids = torch.tensor([*prompt(6), *done.ids], device=DEVICE)
    logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[5:-1].gather(-1, ids[6:, None])
    torch.testing.assert_close(logprobs.squeeze(-1).float().tolist(), list(done.logprobs), rtol=0, atol=1e-5)


def test_a_layer_that_attends_twice_in_a_pass_is_refused():
    """What it cached first was written over, and all that was generated was wrong."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**sizes)).to(DEVICE).eval()
    use_layouts(model)
    with pytest.raises(UserError, match="layer 0 of the model attends more than once"):
        collect(TorchEngine(model, eos_ids=(), kv_cache_bytes=10**7), [ask(0, prompt(6))])


def test_a_model_with_latent_attention_is_refused_by_the_plan_in_the_same_words(tmp_path):
    """It ended with a traceback about shapes; then in a refusal after the plan had accepted the run."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    latent = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    model = AutoModelForCausalLM.from_config(DeepseekV2Config(**sizes, **latent, first_k_dense_replace=1))
    with pytest.raises(UserError, match="latent attention") as caught:
        TorchEngine(model, eos_ids=())
    model.save_pretrained(tmp_path)
    given = ["run_dir=r", f"model.path={tmp_path}", "data.train.reasoning_gym=basic_arithmetic", "device=cpu"]
    (problem,) = build_plan(load_settings(TrainSettings, None, given), 100).problems
    refusal = caught.value
    assert (problem.code, problem.suggestions) == ("M012", (("rollout.engine=vllm",),))
    assert (problem.what, problem.why, problem.fix) == (refusal.what, refusal.why, refusal.fix)
    assert problem.where.startswith(refusal.where)


def test_bfloat16_generates():
    engine, _ = torch_engine("gemma3", torch.bfloat16)
    done = collect(engine, mixed_requests())
    assert all(-50 < logprob <= 0 for completion in done.values() for logprob in completion.logprobs)


def test_the_benchmark_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine.py", "--tiny"])
    bench_engine.main()
    assert capsys.readouterr().out.count("ratio (tiny") == 2
    bench_turns.main()
    assert "tiny parameters, 16 conversations" in capsys.readouterr().out


def test_a_small_model_decodes_on_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waking a second thread for tiny products took four times as long when the other core had work."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []
    try:
        model = tiny_model("llama")
        use_layouts(model)
        model.model.layers[0].register_forward_hook(lambda *unused: seen.append(torch.get_num_threads()))
        engine = TorchEngine(model, eos_ids=())
        request = Request(id=0, prompt_ids=[3, 4], params=SamplingParams(max_tokens=3), seeds=[0])
        for _ in engine.generate([request], deadline_s=60):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
