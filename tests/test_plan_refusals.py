"""Refusals of runs that cannot work: each with changes that the plan then accepts."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan import Plan, build_plan

PUBLIC: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "public_models.json").read_text())
DATA = ("run_dir=r", "data.train.reasoning_gym=basic_arithmetic")


@dataclass(frozen=True)
class Models:
    """Folders with a config.json each."""

    path: Path

    def plan(self, name: str, *given: str) -> Plan:
        folder = self.path / name
        if not folder.is_dir():
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(PUBLIC[name]))
        return build_plan(load_settings(TrainSettings, None, [*DATA, f"model.path={folder}", *given]), 100_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def codes(found: Plan) -> list[str]:
    return [problem.code for problem in found.problems]


def require_accepted(models: Models, name: str, *given: str) -> Plan:
    """Every change that a refusal suggests ends it and brings no other."""
    found = models.plan(name, *given)
    assert found.problems
    for problem in found.problems:
        assert problem.suggestions, problem
        for change in problem.suggestions:
            after = codes(models.plan(name, *given, *change))
            assert after.count(problem.code) < codes(found).count(problem.code), (problem, change)
            assert set(after) <= set(codes(found)), (problem, change, after)
    return found


def test_a_model_that_one_gpu_of_known_memory_cannot_hold_is_refused_without_its_kind(models: Models) -> None:
    """It used to be a warning without numbers, and the plan said that the run can work."""
    found = require_accepted(models, "Qwen2.5-7B", "device=cuda", f"device_memory_bytes={24 * 2**30}")
    assert codes(found) == ["M007"]
    assert len(found.problems[0].suggestions) > 1
    assert "time" not in [line.section for line in found.lines]
    fits = models.plan("Qwen2.5-0.5B", "device=cuda", f"device_memory_bytes={80 * 2**30}")
    assert (codes(fits), fits.value("memory of the GPU")) == ([], 80 * 2**30)


def test_a_cache_without_room_for_the_longest_sample_is_refused(models: Models) -> None:
    """It used to be planned, and the engine refused the first prompt."""
    for devices in ("cluster.devices_per_node=1", "cluster.devices_per_node=2", "cluster.device=h100"):
        found = require_accepted(models, "Qwen2.5-0.5B", "device=cuda", devices, "rollout.kv_cache_bytes=1000")
        assert codes(found) == ["M010"]
        assert found.problems[0].suggestions[0] == (f"rollout.kv_cache_bytes={1088 * 2 * 24 * 128 * 2}",)
    share = ("rollout.engine=vllm", "cluster.device=a100-40gb", "cluster.devices_per_node=2", "model.lora.rank=8")
    share += ("rollout.vllm.gpu_memory_utilization=0.35",)
    assert codes(require_accepted(models, "Qwen2.5-7B", *share)) == ["M010"]


def test_a_device_with_room_for_less_than_one_sequence_is_refused(models: Models) -> None:
    """The engine's cache used to shrink to nothing, and a step of one sequence at a time was planned."""
    long = ("rollout.max_response_tokens=250000", "batch.tokens_per_microbatch=250512", "model.lora.rank=8")
    found = require_accepted(models, "Qwen2.5-7B", "cluster.device=l4", "cluster.devices_per_node=2", *long)
    assert codes(found) == ["M007"]


def test_where_no_devices_of_this_kind_are_enough_others_and_shorter_responses_are_named(models: Models) -> None:
    """A replica of Qwen3-235B does not fit a node of four H100; a sample of four million tokens fits no device."""
    big = ("cluster.device=h100", "cluster.nodes=1024", "cluster.devices_per_node=4", "batch.prompts_per_step=16384")
    found = require_accepted(models, "Qwen3-235B-A22B", *big)
    assert found.problems[0].suggestions[0][0].startswith("device_memory_bytes=")
    long = ("rollout.max_response_tokens=4000000", "batch.tokens_per_microbatch=4000512")
    found = require_accepted(models, "Qwen2.5-0.5B", "cluster.device=h100", "cluster.devices_per_node=8", *long)
    shorter, smaller = found.problems[0].suggestions[0]
    most = int(shorter.removeprefix("rollout.max_response_tokens="))
    assert 500_000 < most < 1_000_000 and smaller == f"batch.tokens_per_microbatch={most + 512}"
    slightly = (f"rollout.max_response_tokens={most + 1}", f"batch.tokens_per_microbatch={most + 513}")
    after = models.plan("Qwen2.5-0.5B", "cluster.device=h100", "cluster.devices_per_node=8", *slightly)
    assert "M008" in [warning.code for warning in after.warnings]


def test_updates_that_do_not_divide_a_step_are_refused_with_values_on_either_side(models: Models) -> None:
    """Values that leave a device without work are not among them."""
    given = ("batch.samples_per_prompt=1", "batch.prompts_per_step=10", "batch.prompts_per_update=9")
    alone = require_accepted(models, "Qwen2.5-0.5B", *given).problems[0].suggestions
    steps = ("batch.prompts_per_step=9",), ("batch.prompts_per_step=18",)
    assert alone == (("batch.prompts_per_update=5",), ("batch.prompts_per_update=10",), *steps)
    eight = require_accepted(models, "Qwen2.5-0.5B", "cluster.devices_per_node=8", *given).problems[0]
    assert eight.suggestions == (("batch.prompts_per_update=10",), *steps)
    assert "prompts_per_update=5" not in eight.fix


@pytest.mark.parametrize(
    "given",
    [
        ("batch.tokens_per_microbatch=600",),
        ("batch.tokens_per_microbatch=300", "cluster.devices_per_node=4", "parallel.actor.sequence=2"),
        ("algorithm.advantage=grop",),
        ("algorithm.advantage=gae", "critic.tokens_per_microbatch=100"),
        ("algorithm.policy_loss=ppoo", "algorithm.kl_estimator=k9"),
        ("algorithm.reduction=seq-mean-token-sum-norm",),
        ("rollout.sampling.temperature=0",),
        ("rollout.sampling.top_k=1", "rollout.sampling.min_p=1"),
        ("reward.function=exact_mach",),
        ("rollout.engine=vllm", "rollout.vllm.max_model_len=100"),
        ("rollout.engine=vllm", "rollout.sampling.temperature=9"),
        ("rollout.engine=vllm", "rollout.sampling.top_p=0.9", "rollout.sampling.min_p=0.1"),
    ],
)
def test_every_refusal_of_settings_has_changes_as_records(models: Models, given: tuple[str, ...]) -> None:
    require_accepted(models, "Qwen2.5-1.5B", *given)


def test_the_embedded_engine_caches_keys_and_values_of_every_head(models: Models) -> None:
    """A model with latent attention used to be counted as if its latent vector were cached, as vLLM does."""
    config = PUBLIC["Moonlight-16B-A3B"]
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    whole = layers * heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]) * 2
    latent = layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 2
    given = ("cluster.device=h200", "cluster.devices_per_node=8", "batch.prompts_per_step=8")
    for engine, each in (("torch", whole * 1088), ("vllm", latent * 1024)):
        found = models.plan("Moonlight-16B-A3B", *given, f"rollout.engine={engine}")
        line = next(line for line in found.lines if line.name == "rollout: key-value cache")
        assert str(each // (1088 if engine == "torch" else 1024)) in line.formula
        assert engine == "vllm" or line.value == 8 * each
        assert ("M012" in codes(found)) == (engine == "torch")


def test_random_runs_that_do_not_fit_are_refused_with_changes_that_are_accepted(models: Models) -> None:
    draw, refused = random.Random(3), 0
    for _ in range(16):
        given = [
            f"cluster.device={draw.choice(['a10', 'a100-40gb', 'h100', 'h200'])}",
            f"cluster.devices_per_node={draw.choice([1, 2, 3, 4, 8])}",
            f"cluster.nodes={draw.choice([1, 1, 2, 4])}",
            f"rollout.max_response_tokens={draw.choice([512, 4096, 16384])}",
            "batch.tokens_per_microbatch=20000",
            "batch.prompts_per_step=64",
            f"model.gradient_checkpointing={draw.choice(['auto', 'true', 'false'])}",
            f"rollout.engine={draw.choice(['torch', 'vllm'])}",
            f"algorithm.kl={draw.choice(['none', 'loss'])}",
            f"offload.actor.optimizer={draw.choice(['none', 'host'])}",
        ]
        name = draw.choice(["Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen2.5-32B", "gemma-3-4b", "Llama-3.2-1B"])
        if models.plan(name, *given).problems:
            require_accepted(models, name, *given)
            refused += 1
    assert 4 < refused < 16


@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B", "Moonlight-16B-A3B", "Mixtral-8x7B-v0.1", "Qwen2.5-7B", "gemma-3-4b"]
)
def test_one_device_holds_what_the_ledger_of_many_says_of_one(models: Models, name: str) -> None:
    """Experts and latent attention used to be counted on one device as if their layers were Llama's: activations by half."""
    given = ("device=cuda", "model.gradient_checkpointing=false", f"device_memory_bytes={2**42}")
    found = models.plan(name, *given)
    assert found.outlook is not None
    held = {holding.name: holding.bytes for holding in found.outlook.groups[0].ledger.holdings}
    for line in ("weights", "activations", "key-value cache"):
        assert found.value(line) == held[line]
