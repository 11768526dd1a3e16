"""The memory ledger of many devices, against what the trainer allocates and against torch's own cuts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.parameters import count_parameters
from meshloom.plan.residency import EngineRole, ModelRole, Phase, Residency
from meshloom.plan.sharded_memory import (
    DeviceLedger,
    checkpoint_bytes,
    device_ledger,
    engine_holdings,
    model_holdings,
    moves,
)
from meshloom.plan.shards import Cut, cached_values, part_of, stage_layers

PUBLIC: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "public_models.json").read_text())
GIB, ROOT = 2**30, Path(__file__).parents[1]


def numbers(name: str) -> DecoderNumbers:
    return count_parameters(PUBLIC[name])


def actor(model: DecoderNumbers, **changes: Any) -> ModelRole:
    """A trained role on a GPU, as a run with plain settings has it."""
    given: dict[str, Any] = {
        "name": "actor",
        "model": model,
        "computes": (Phase.LOGPROB, Phase.UPDATE),
        "lends": (Phase.SYNC,),
        "width": 2,
        "tokens": 16384,
        "recompute": False,
        "compiled": True,
        "chunk_bytes": 256 * 2**20,
        "logit_bytes": 6,
    }
    return ModelRole(**{**given, **changes})


def held(holdings: Any) -> dict[str, int]:
    return {holding.name: holding.bytes for holding in holdings}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_training_allocates_what_the_ledger_says(family: str, dtype: str, lora: bool, tmp_path: Path) -> None:
    """Bytes of weights, gradients, masters, moments and of a checkpoint's files, to 2 %."""
    import torch
    from safetensors.torch import save_file

    from meshloom.config.settings import LoraSettings
    from meshloom.train.attention import use_layouts
    from meshloom.train.load import add_lora
    from meshloom.train.snapshot import snapshot_bytes
    from tests.models import tiny_model
    from tests.test_train_model import SETTINGS, make_samples, trained, weighted

    module = tiny_model(family, getattr(torch, dtype), vocab_size=512)
    config, adapters = module.config.to_dict(), LoraSettings(rank=4)
    use_layouts(module)
    if lora:
        module = add_lora(module, adapters, seed=0)
    settings = SETTINGS.model_copy(update={"lora": adapters}) if lora else SETTINGS
    model = trained(module, 100, settings=settings)
    role = actor(
        count_parameters(config),
        width=torch.finfo(getattr(torch, dtype)).bits // 8,
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad) if lora else None,
    )
    model.forward_backward(make_samples(), weighted, temperature=1.0)
    model.optimizer.collect()
    optimizer = model.optimizer
    gradients = sum(master.grad.nbytes for master in optimizer.masters.values())
    model.optim_step(10)
    state = optimizer.state_tensors()
    weights = {p.data_ptr(): p.nbytes for p in module.parameters()}
    said = held(model_holdings(role))
    assert sum(weights.values()) == pytest.approx(said["weights"] + said.get("adapter weights", 0), rel=0.02)
    assert gradients == pytest.approx(said["gradients"], rel=0.02)
    masters = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("master/"))
    assert masters == pytest.approx(said["float32 masters"], rel=0.02)
    moments = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("exp_avg"))
    assert moments == pytest.approx(said["optimizer moments"], rel=0.02)
    assert snapshot_bytes(model) == pytest.approx(checkpoint_bytes(role), rel=0.02)
    save_file(state, tmp_path / "optimizer.safetensors")
    written = (tmp_path / "optimizer.safetensors").read_bytes()
    header = 8 + int.from_bytes(written[:8], "little")
    assert len(written) - header == pytest.approx(said["float32 masters"] + said["optimizer moments"], rel=0.02)


CUT_BY_TORCH = """
import json, sys, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.models import tiny_model

shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
found = {}
for family in ("llama", "qwen2", "qwen3"):
    for replicate, fsdp, tensor in ((1, 2, 1), (1, 8, 1), (2, 4, 1), (1, 1, 4), (1, 4, 2), (2, 2, 2)):
        world = replicate * fsdp * tensor
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        mesh = init_device_mesh("cpu", (replicate, fsdp, tensor), mesh_dim_names=("replicate", "fsdp", "tp"))
        model = tiny_model(family, **shape)
        if tensor > 1:
            wide, back = ColwiseParallel(), RowwiseParallel()
            for layer in model.model.layers:
                plan = {f"self_attn.{name}_proj": wide for name in "qkv"} | {"self_attn.o_proj": back}
                plan |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": back}
                parallelize_module(layer, mesh["tp"], plan)
            parallelize_module(model, mesh["tp"], {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()})
            if model.config.tie_word_embeddings:
                model.lm_head.weight = model.model.embed_tokens.weight
        if fsdp > 1:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["replicate", "fsdp"])
            fully_shard(model, mesh=mesh["replicate", "fsdp"])
        local = {}
        for p in model.parameters():
            here = p.to_local() if hasattr(p, "to_local") else p
            local[id(p)] = here.numel()
        found[f"{family} {replicate} {fsdp} {tensor}"] = sum(local.values())
        torch.distributed.destroy_process_group()
    found[family] = model.config.to_dict()
print(json.dumps(found, default=str))
"""


def test_shards_are_as_large_as_those_that_torch_makes() -> None:
    """FSDP, HSDP, tensor parallelism and both, on the first of two to eight devices that do not exist; to 2 %."""
    out = subprocess.run(
        [sys.executable, "-c", CUT_BY_TORCH], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    found = json.loads(out.strip().rsplit("\n", 1)[-1])
    compared = 0
    for key, count in found.items():
        family, *degrees = key.split()
        if degrees:
            replicate, fsdp, tensor = map(int, degrees)
            cut = Cut(replicate=replicate, fsdp=fsdp, tensor=tensor)
            part = part_of(count_parameters(found[family]), cut, compiled=True)
            assert count == pytest.approx(part.sharded, rel=0.02), key
            compared += 1
    assert compared == 18


MIXTURES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
    },
    {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 96,
    },
]


@pytest.mark.parametrize("given", MIXTURES, ids=lambda given: given["model_type"])
def test_activations_of_mixtures_are_near_what_their_layers_keep(given: dict[str, Any]) -> None:
    """Distinct tensors that autograd keeps of transformers' own layers in float32, ÷ the estimate; more norms keep more."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    config = {**shape, "num_attention_heads": 4, "num_key_value_heads": 2, **given}
    numbers_of = count_parameters(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(256).reshape(4, 64) % 97, use_cache=False)
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    estimate = 256 * 4 * part_of(numbers_of, Cut(), compiled=False).kept_values
    assert 1.0 <= measured / estimate <= 1.35


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Llama-3.1-8B", "DeepSeek-V3", "Qwen3-30B-A3B", "gemma-3-27b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_stages_together_are_the_model(name: str, stages: int) -> None:
    model = numbers(name)
    cut = Cut(pipeline=stages)
    parts = [part_of(model, cut, compiled=True, stage=stage) for stage in range(stages)]
    twice = model.embedding if model.tied and stages > 1 else 0
    assert sum(part.parameters for part in parts) == model.total + twice
    assert [index for stage in range(stages) for index in stage_layers(len(model.layers), stages, stage)] == list(
        range(len(model.layers))
    )
    assert max(part.layers for part in parts) - min(part.layers for part in parts) <= 1
    assert [part.vocabulary > 0 for part in parts] == [False] * (stages - 1) + [True]


def test_devices_together_hold_the_model_and_copies_of_what_is_not_divided() -> None:
    model = numbers("Qwen3-30B-A3B")
    part = part_of(model, Cut(fsdp=4, sequence=2, tensor=4), compiled=True)
    whole = sum(layer.norms + layer.router for layer in model.layers) + model.final_norm
    copies = 3 * whole
    assert model.total + copies <= part.sharded * 4 * 2 * 4 < model.total + copies + 32 * len(model.layers)


def test_each_way_to_cut_takes_from_what_it_divides() -> None:
    model = numbers("Llama-3.1-8B")
    whole = held(model_holdings(actor(model)))
    sharded = held(model_holdings(actor(model, cut=Cut(fsdp=8))))
    for name in ("optimizer moments", "gradients"):
        assert sharded[name] == whole[name] / 8
    assert sharded["weights"] == whole["float32 masters"] / 8
    assert "float32 masters" not in sharded
    assert sharded["activations"] == whole["activations"]
    largest = model.layers[0].total
    assert sharded["gathered layers"] == 2 * (model.embedding + model.head + model.final_norm + 2 * largest)
    halves = held(model_holdings(actor(model, cut=Cut(sequence=2))))
    assert halves["activations"] == whole["activations"] / 2
    assert halves["optimizer moments"] == whole["optimizer moments"] / 2
    tensor = held(model_holdings(actor(model, cut=Cut(tensor=4))))
    assert whole["activations"] / 4 < tensor["activations"] < whole["activations"] / 2
    assert tensor["gathered layers"] == pytest.approx(
        2 * (model.embedding + model.head + model.final_norm + largest) / 4, rel=0.01
    )
    replicas = held(model_holdings(actor(model, cut=Cut(replicate=4))))
    assert replicas == held(model_holdings(actor(model, over_ranks=True))) | {"communication": 256 * 2**20}


def test_a_pipelines_first_stage_keeps_most_microbatches() -> None:
    model = numbers("Llama-3.1-8B")
    role = actor(model, cut=Cut(pipeline=4), microbatches=8)
    kept = [held(model_holdings(role, stage))["activations"] for stage in range(4)]
    one = held(model_holdings(actor(model)))["activations"] / 4
    assert kept == [4 * one, 3 * one, 2 * one, one]
    alone = replace(role, microbatches=1)
    assert held(model_holdings(alone))["activations"] == one
    of_stages = [DeviceLedger(holdings=model_holdings(role, stage)).held(Phase.UPDATE) for stage in range(4)]
    assert device_ledger([role]).held(Phase.UPDATE) == max(of_stages) > min(of_stages)


def test_stages_of_one_device_hold_its_layers_and_passes_of_each_in_flight() -> None:
    """Eight microbatches over four devices: 11 passes through a half of the first device's layers, where one stage has 4."""
    model = numbers("Llama-3.1-8B")
    whole, halves = Cut(pipeline=4), Cut(pipeline=4, stages_per_device=2)
    ends = [[part_of(model, cut, compiled=True, stage=stage) for stage in (0, 3)] for cut in (whole, halves)]
    assert ends[0] == ends[1]
    one = held(model_holdings(actor(model)))["activations"] / 4
    role = actor(model, cut=halves, microbatches=8)
    kept = [held(model_holdings(role, stage))["activations"] for stage in range(4)]
    assert kept == [one * passes / 2 for passes in (11, 9, 7, 5)]
    formula = next(it.formula for it in model_holdings(role, 0) if it.name == "activations")
    assert "11 in flight ÷ 2 stages of the device" in formula


def test_offload_frees_the_phases_that_do_not_need_it_and_says_what_it_moves() -> None:
    model = numbers("Qwen2.5-1.5B")
    engine = EngineRole(model=model, width=2, own_weights=True, sequences=256, slot_tokens=1024)
    here = device_ledger([actor(model)], [engine])
    role = actor(model, parameters_at=Residency.HOST, optimizer_at=Residency.HOST)
    away = device_ledger([role], [engine])
    state = held(here.holdings)
    saved = state["weights"] + state["float32 masters"] + state["optimizer moments"]
    assert here.held(Phase.GENERATE) - away.held(Phase.GENERATE) == saved == away.elsewhere(Residency.HOST)
    assert here.held(Phase.UPDATE) == away.held(Phase.UPDATE)
    assert here.held(Phase.LOGPROB) - away.held(Phase.LOGPROB) == saved - state["weights"]
    moved = {move.name: move for move in moves(away.holdings)}
    assert {name: (move.bytes, move.ways) for name, move in moved.items()} == {
        "weights": (state["weights"], 2),
        "float32 masters": (state["float32 masters"], 2),
        "optimizer moments": (state["optimizer moments"], 2),
    }
    assert moved["weights"].seconds(1e9) == 2 * state["weights"] / 1e9
    assert moves(here.holdings) == ()


def test_a_reference_comes_in_and_is_dropped_unchanged() -> None:
    role = actor(numbers("Qwen2.5-0.5B"), computes=(Phase.LOGPROB,), lends=(), parameters_at=Residency.DISK)
    ledger = device_ledger([role])
    assert [(move.name, move.ways, move.at) for move in moves(ledger.holdings)] == [("weights", 1, Residency.DISK)]
    assert ledger.held(Phase.UPDATE) == 0
    assert "gradients" not in held(ledger.holdings)


def test_weights_that_are_lent_across_the_end_of_a_step_move_once() -> None:
    """The engine samples from the actor's own weights: they are gone while rewards are computed, and at no other time."""
    role = actor(numbers("Qwen2.5-0.5B"), lends=(Phase.GENERATE, Phase.SYNC), parameters_at=Residency.HOST)
    assert [move.ways for move in moves(model_holdings(role))] == [2]


def test_roles_of_one_phase_take_turns() -> None:
    model = numbers("Qwen2.5-0.5B")
    critic = actor(model.with_scalar_head(), name="critic", tokens=1000)
    alone, both = device_ledger([actor(model)]), device_ledger([actor(model), critic])
    kept = sum(h.bytes for h in model_holdings(critic) if not h.fleeting)
    assert both.held(Phase.UPDATE) == alone.held(Phase.UPDATE) + kept
    assert critic.model.total == model.total + model.hidden + 1


def test_an_engine_that_sleeps_leaves_the_update_alone() -> None:
    model = numbers("Llama-3.1-8B")
    awake = EngineRole(model=model, tensor=2, width=2, own_weights=True, sleeps=False, sequences=64, slot_tokens=2048)
    asleep = replace(awake, sleeps=True)
    weights = held(engine_holdings(awake))["engine's weights"]
    assert weights == pytest.approx(model.total, rel=0.001)
    cache = held(engine_holdings(awake))["key-value cache"]
    assert cache == 64 * 2048 * 32 * 2 * 4 * 128 * 2
    difference = device_ledger([], [awake]).held(Phase.UPDATE) - device_ledger([], [asleep]).held(Phase.UPDATE)
    assert difference == weights + cache
    given = held(engine_holdings(replace(awake, cache_bytes=10**12)))["key-value cache"]
    filled = held(engine_holdings(replace(awake, cache_bytes=10**12, fills_cache=True)))["key-value cache"]
    assert (given, filled) == (cache, 10**12)


def test_caches_follow_what_a_family_keeps_of_a_token() -> None:
    llama, latent = numbers("Llama-3.1-70B"), numbers("DeepSeek-V3")
    assert [cached_values(llama, tensor) for tensor in (1, 4, 8, 16)] == [163840, 40960, 20480, 20480]
    assert cached_values(latent, 1) == cached_values(latent, 8) == 61 * 576


def test_peaks_margins_and_lines_say_the_same() -> None:
    model = numbers("Llama-3.1-70B")
    on_one = device_ledger([actor(model)], memory_bytes=80 * GIB)
    assert on_one.margin(Phase.UPDATE) < 0
    cut = Cut(fsdp=64)
    ledger = device_ledger([actor(model, cut=cut, recompute=True, tokens=8192)], memory_bytes=80 * GIB)
    assert ledger.peak[0] is Phase.UPDATE
    assert ledger.margin(Phase.UPDATE) == 80 * GIB - ledger.needed(Phase.UPDATE) > 0
    lines = {line.name: line for line in ledger.lines()}
    assert lines["held in update"].value == ledger.held(Phase.UPDATE)
    assert lines["margin in update"].value == ledger.margin(Phase.UPDATE)
    assert "÷ 64 (shards) × 4" in lines["actor: weights"].formula
    named = [line.name for line in ledger.lines()]
    assert len(named) == len(set(named))


def test_thousands_of_cuts_are_weighed_in_a_second() -> None:
    """A search asks for thousands; seconds are of a machine that others use too."""
    import time

    model = numbers("Qwen2.5-7B")
    started = time.process_time()
    for fsdp in range(1, 201):
        device_ledger([actor(model, cut=Cut(fsdp=fsdp, tensor=2))])
    assert time.process_time() - started < 5
