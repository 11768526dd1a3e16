"""What verl's keys mean in our settings, where that is not obvious; and that all of verl's keys are known."""

import contextlib
import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.config.verl import Translation, translate
from meshloom.config.verl.defaults import ENTRIES, RL_DEFAULTS, SFT_DEFAULTS
from meshloom.config.verl.known import known_keys
from meshloom.from_verl import read_verl, settings_of

GRPO = "algorithm.adv_estimator=grpo"
ACTOR, REFERENCE, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
DEFAULTS: dict[str, Any] = json.loads(Path(__file__).with_name("data").joinpath("verl_defaults.json").read_text())[
    "defaults"
]
FALLBACK = "there is no counterpart here; leave it out"


def grpo(*overrides: str, **options: Any) -> Translation:
    return translate([GRPO, *overrides], **options)


def word(key: str, value: Any) -> str:
    return f"{key}='{value}'" if isinstance(value, str) else f"{key}={json.dumps(value)}"


def values(translation: Translation) -> dict[str, Any]:
    return {path: native.value for path, native in translation.settings.items()}


_CORRECTION = "algorithm.rollout_correction"
_BANDED = [f"{_CORRECTION}.rollout_is=token", f"{_CORRECTION}.rollout_is_threshold=0.5_4.0"]
_REJECTED = [f"{_CORRECTION}.rollout_rs=seq_max_k3", f"{_CORRECTION}.rollout_rs_threshold=0.3"]
_TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
_SCORER = ["reward_model.enable=True", "reward_model.model.path=scorer"]
_BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
_DAPO = ["reward_model.reward_manager=dapo", f"+{_BUFFER}.enable=True"]
_VIRTUAL = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"
_INTERLEAVED = ["model_engine=megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size=2", f"{_VIRTUAL}=2"]
_PENALTY = [*_DAPO, f"+{_BUFFER}.len=512", f"+{_BUFFER}.penalty_factor=0.5", f"+{_BUFFER}.log=True"]
_BATCH = ["reward_model.reward_manager=batch", "custom_reward_function.path=r.py"]
_ADAPTIVE = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"]
MEANING = [
    ("batch.prompts_per_step", 1024, []),
    ("batch.prompts_per_update", 256, []),
    ("batch.samples_per_prompt", 1, []),
    ("batch.epochs", 30, []),
    ("data.max_prompt_tokens", 512, []),
    ("rollout.max_response_tokens", 512, []),
    ("rollout.sampling.temperature", 1.0, []),
    ("rollout.sampling.top_k", 0, [f"{ROLLOUT}.top_k=-1"]),
    ("rollout.sampling.top_k", 50, [f"{ROLLOUT}.top_k=50"]),
    ("checkpoint.every_steps", 0, []),
    ("checkpoint.at_end", False, []),
    ("checkpoint.at_end", False, ["trainer.save_freq=-1"]),
    ("checkpoint.at_end", True, ["trainer.save_freq=10"]),
    ("validation.every_steps", 0, []),
    ("validation.after_training", False, ["trainer.test_freq=-1"]),
    ("validation.after_training", True, ["trainer.test_freq=5"]),
    ("validation.before_training", True, []),
    ("optimizer.warmup_updates", 0, []),
    ("optimizer.lr", 1e-5, [f"{ACTOR}.optim.lr='1e-5'"]),
    ("batch.prompts_per_update", 32, [f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=8"]),
    ("batch.prompts_per_update", None, ["data.train_batch_size=64"]),
    ("batch.samples_per_microbatch", 4, [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]),
    ("batch.tokens_per_microbatch", 4096, [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]),
    ("batch.samples_per_microbatch", 2, [f"{ACTOR}.ppo_micro_batch_size=16"]),
    (
        "batch.samples_per_microbatch",
        4,
        [f"{ACTOR}.ppo_micro_batch_size=16", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
    ),
    (
        "batch.samples_per_microbatch",
        8,
        [
            f"{ACTOR}.ppo_micro_batch_size=16",
            f"{ACTOR}.strategy=megatron",
            f"{ACTOR}.megatron.tensor_model_parallel_size=2",
            f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        ],
    ),
    ("batch.tokens_per_microbatch", 9000, [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=9000"]),
    ("batch.samples_per_microbatch", 8, [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8"]),
    ("batch.epochs_per_step", 3, [f"{ACTOR}.ppo_epochs=3"]),
    ("algorithm.clip_low", 0.2, [f"{ACTOR}.clip_ratio=0.3"]),
    ("algorithm.clip_high", 0.3, [f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_high=null"]),
    ("algorithm.clip_high", 0.28, [f"{ACTOR}.clip_ratio_high=0.28"]),
    ("algorithm.kl", "none", [f"{ACTOR}.kl_loss_coef=0.1"]),
    ("algorithm.kl", "loss", [f"{ACTOR}.use_kl_loss=True"]),
    ("algorithm.kl_estimator", "k3", [f"{ACTOR}.use_kl_loss=True"]),
    ("algorithm.kl_estimator", "k2+", [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=mse+"]),
    ("algorithm.kl", "reward", ["algorithm.use_kl_in_reward=True"]),
    ("algorithm.kl_estimator", "k1", ["algorithm.use_kl_in_reward=True"]),
    ("algorithm.kl_coefficient", 0.5, ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.5"]),
    ("algorithm.kl_control", "adaptive", [*_ADAPTIVE]),
    ("algorithm.kl_target", 0.1, [*_ADAPTIVE]),
    ("algorithm.kl_horizon", 500, [*_ADAPTIVE, "algorithm.kl_ctrl.horizon=500"]),
    ("algorithm.tau_negative", 1.2, [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.policy_loss.tau_neg=1.2"]),
    ("algorithm.correction.weights", "truncated", [f"{_CORRECTION}.rollout_is=token"]),
    ("algorithm.correction.threshold", 2.0, [f"{_CORRECTION}.rollout_is=token"]),
    ("algorithm.correction.level", "sequence", [f"{_CORRECTION}.rollout_is=sequence"]),
    ("algorithm.correction.weights", "banded", _BANDED),
    ("algorithm.correction.low", 0.5, _BANDED),
    ("algorithm.correction.threshold", 4.0, _BANDED),
    ("algorithm.correction.threshold", 5.0, [f"{ACTOR}.tis_imp_ratio_cap=5.0"]),
    ("algorithm.correction.weights", "truncated", ["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=3"]),
    ("algorithm.correction.reject", "k3", [*_REJECTED]),
    ("algorithm.correction.reject_level", "sequence-max", [*_REJECTED]),
    ("algorithm.correction.reject_threshold", 0.3, [*_REJECTED]),
    (
        "algorithm.correction.reject_threshold",
        math.log(2.0),
        [f"{_CORRECTION}.rollout_rs=geometric", f"{_CORRECTION}.rollout_rs_threshold=2.0"],
    ),
    ("algorithm.proximal", "sampler", [f"{_CORRECTION}.bypass_mode=True"]),
    ("algorithm.policy_loss", "gmpo", [f"{ACTOR}.policy_loss.loss_mode=geo_mean"]),
    ("algorithm.reduction_constant", 512.0, [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"]),
    (
        "algorithm.reduction_constant",
        9.0,
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=9"],
    ),
    ("algorithm.advantage", "rloo", ["algorithm.adv_estimator=rloo_vectorized"]),
    ("optimizer.warmup_updates", 40, [f"{ACTOR}.optim.lr_warmup_steps=10"]),
    ("optimizer.warmup_updates", 40, [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=100"]),
    ("optimizer.schedule", "cosine", [f"{ACTOR}.optim.lr_scheduler_type=cosine"]),
    ("optimizer.schedule", "cosine", ["model_engine=veomni"]),
    ("optimizer.schedule", "constant", [f"{ACTOR}.strategy=megatron", f"{ACTOR}.optim.lr_scheduler_type=cosine"]),
    (
        "optimizer.min_lr_ratio",
        0.1,
        [f"{ACTOR}.strategy=megatron", f"{ACTOR}.optim.lr_decay_style=linear", f"{ACTOR}.optim.min_lr=1e-7"],
    ),
    ("optimizer.max_grad_norm", None, [f"{ACTOR}.optim.clip_grad=0"]),
    ("data.overlong_prompts", "drop", ["data.filter_overlong_prompts=True", "data.truncation=left"]),
    ("data.overlong_prompts", "error", ["data.truncation=left"]),
    ("data.train.max_rows", None, ["data.train_max_samples=-1"]),
    ("data.train.max_rows", 100, ["data.train_max_samples=100"]),
    ("data.train.files", ["a.parquet", "b.parquet"], ["data.train_files=['a.parquet','b.parquet']"]),
    ("data.train.files", ["a.parquet"], ["data.train_files=a.parquet"]),
    ("rollout.max_response_tokens", 64, [f"{ROLLOUT}.response_length=64"]),
    ("validation.sampling.temperature", 0.6, [f"{ROLLOUT}.val_kwargs.temperature=0.6"]),
    ("model.lora", None, ["actor_rollout_ref.model.lora_alpha=32"]),
    ("model.lora.rank", 8, ["actor_rollout_ref.model.lora_rank=8"]),
    ("model.lora.alpha", 16.0, ["actor_rollout_ref.model.lora_rank=8"]),
    (
        "model.lora.target_modules",
        ["q_proj"],
        ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[q_proj]"],
    ),
    ("model.attention", "sdpa", ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]),
    ("model.dtype", "auto", []),
    ("model.dtype", "float32", [f"{ACTOR}.fsdp_config.dtype=fp32"]),
    ("model.gradient_checkpointing", True, []),
    ("model.gradient_checkpointing", False, [f"{ACTOR}.strategy=megatron"]),
    ("parallel.rollout.tensor", 2, []),
    ("parallel.actor.fsdp_size", None, []),
    ("parallel.actor.fsdp_size", None, [f"{ACTOR}.fsdp_config.fsdp_size=16"]),
    ("batch.prompts_per_update", 0, [f"{ACTOR}.ppo_mini_batch_size=0"]),
    ("parallel.actor.fsdp_size", 4, [f"{ACTOR}.fsdp_config.fsdp_size=4"]),
    (
        "parallel.actor.sequence",
        2,
        [f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4"],
    ),
    (
        "parallel.reference.tensor",
        4,
        ["model_engine=megatron", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
    ),
    ("parallel.actor.stages_per_device", 2, _INTERLEAVED),
    ("parallel.actor.stages_per_device", 1, ["model_engine=megatron", f"{_VIRTUAL}=null"]),
    ("parallel.reference.stages_per_device", 2, [*_INTERLEAVED, f"{ACTOR}.use_kl_loss=True"]),
    ("parallel.reference.sequence", 2, [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.ulysses_sequence_parallel_size=2"]),
    ("offload.actor.parameters", "host", [f"{ACTOR}.fsdp_config.offload_policy=True"]),
    (
        "offload.reference.parameters",
        "host",
        [f"{ACTOR}.use_kl_loss=True", f"{REFERENCE}.fsdp_config.param_offload=True"],
    ),
    ("logging.loggers", ["wandb"], []),
    ("logging.loggers", [], ["trainer.logger=console"]),
    ("checkpoint.keep_last", 3, ["trainer.max_actor_ckpt_to_keep=3"]),
    ("checkpoint.keep_last", 1_000_000, []),
    ("reward.form", "verl_batch", _BATCH),
    ("reward.function", "r.py:score", [*_BATCH, "custom_reward_function.name=score"]),
    ("reward.overlong.buffer_tokens", 512, _PENALTY),
    ("reward.overlong.factor", 0.5, _PENALTY),
    ("reward.overlong.max_tokens", 4096, [*_PENALTY, "+reward_model.reward_kwargs.max_resp_len=4096"]),
    ("validation.success_component", "function", _PENALTY),
    ("reward.components.reward_model.model.path", "scorer", _SCORER),
    (
        "reward.components.reward_model.model.tokens_per_batch",
        8192,
        [*_SCORER, "reward_model.forward_max_token_len_per_gpu=8192"],
    ),
    ("reward.components.reward_model.model.too_long", "truncate", [*_SCORER, "reward_model.max_length=2048"]),
    ("offload.reward.parameters", "host", [*_SCORER, "reward_model.model.fsdp_config.param_offload=True"]),
    (
        "reward.kwargs.alpha",
        0.5,
        ["reward.custom_reward_function.path=r.py", "+custom_reward_function.reward_kwargs.alpha=0.5"],
    ),
    ("rollout.vllm.arguments.swap", 4, [f"+{ROLLOUT}.engine_kwargs.vllm.swap=4"]),
    ("rollout.engine", "torch", [f"{ROLLOUT}.name=hf"]),
    ("seed", 7, ["data.seed=7"]),
    ("algorithm.lam", 0.95, ["algorithm.adv_estimator=gae", "algorithm.lam=0.95"]),
    ("critic.optimizer.lr", 1e-5, ["algorithm.adv_estimator=gae"]),
    ("critic.optimizer.lr", 2e-5, ["algorithm.adv_estimator=gae", "critic.optim.lr=2e-5"]),
    ("critic.optimizer.max_grad_norm", 2.0, ["algorithm.adv_estimator=gae", "critic.grad_clip=2.0"]),
    ("critic.value_clip", 0.2, ["algorithm.adv_estimator=gae", "critic.cliprange_value=0.2"]),
    ("critic.model", "c", ["algorithm.adv_estimator=gae", "critic.model.path=c"]),
    ("critic.warmup_steps", 19, ["algorithm.adv_estimator=gae", "trainer.critic_warmup=20"]),
    ("critic.warmup_steps", 0, ["algorithm.adv_estimator=gae", "trainer.critic_warmup=1"]),
    (
        "critic.tokens_per_microbatch",
        9000,
        [
            "algorithm.adv_estimator=gae",
            "critic.use_dynamic_bsz=True",
            "critic.ppo_max_token_len_per_gpu=9000",
        ],
    ),
    ("offload.critic.optimizer", "host", ["algorithm.adv_estimator=gae", "critic.fsdp.optimizer_offload=True"]),
]


_FILTER = "algorithm.filter_groups.enable=True"
MEANING.append(
    ("data.chat_template_arguments.enable_thinking", False, ["+data.apply_chat_template_kwargs.enable_thinking=False"])
)
_LORA = "actor_rollout_ref.model.lora"
_MEGATRON = f"{ACTOR}.megatron.offload"
_DISK = ["model_engine=megatron", f"{_MEGATRON}.param.target=disk", f"{_MEGATRON}.disk.path=/nvme"]
_MINDSPEED = ["model_engine=mindspeed", f"{ACTOR}.mindspeed.tensor_model_parallel_size=4"]
MEANING += [
    ("model.lora.target_modules", ["o_proj"], [f"{_LORA}.rank=8", f"{_LORA}.target_modules=[linear_proj]"]),
    ("offload.actor.parameters", "disk", _DISK),
    ("offload.folder", "/nvme", _DISK),
    ("offload.actor.optimizer", "host", ["model_engine=megatron", f"{_MEGATRON}.optimizer.target=cpu"]),
    ("parallel.actor.tensor", 4, _MINDSPEED),
    (
        "model.gradient_checkpointing",
        True,
        [*_MINDSPEED, f"+{ACTOR}.mindspeed.llm_kwargs.recompute_granularity=full"],
    ),
]
MEANING += [
    ("algorithm.advantage", "remax", ["algorithm.adv_estimator=remax"]),
    ("algorithm.filter_groups.enabled", True, [_FILTER]),
    ("algorithm.filter_groups.metric", "reward", [_FILTER, "algorithm.filter_groups.metric=acc"]),
    (
        "algorithm.filter_groups.metric",
        "acc",
        [_FILTER, "algorithm.filter_groups.metric=acc", "reward.custom_reward_function.path=mine.py"],
    ),
    ("algorithm.filter_groups.metric", "reward", [_FILTER, "algorithm.filter_groups.metric=seq_reward"]),
    ("algorithm.filter_groups.max_rounds", 7, [_FILTER, "algorithm.filter_groups.max_num_gen_batches=7"]),
    ("algorithm.filter_groups.prompts_per_round", 2048, [_FILTER, "data.gen_batch_size=2048"]),
]


_OVERLONG = "reward_model.overlong_buffer"
IGNORED = [
    ["+actor_rollout_ref.model.override_config.attention_dropout=0."],
    ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.lora_A_init_method=kaiming"],
    ["model_engine=megatron", f"+{_TRANSFORMER}.pipeline_model_parallel_layout='Et*6|t*5L'"],
    [f"{_CORRECTION}.bypass_mode=True", f"{_CORRECTION}.rollout_is=token", f"{_CORRECTION}.rollout_is_threshold=3"],
    [f"+{ROLLOUT}.enable_expert_parallel=False"],
    [f"{ACTOR}.use_kl_loss=True", f"{REFERENCE}.fsdp_config.model_dtype=bfloat16"],
    ["model_engine=megatron", f"{ACTOR}.use_kl_loss=True", f"{REFERENCE}.megatron.dtype=bfloat16"],
    ["model_engine=megatron", f"{ACTOR}.ulysses_sequence_parallel_size=1"],
    [f"{_OVERLONG}.len=4096"],
    [f"{_LORA}.rank=8", f"+{_LORA}.fully_sharded_loras=True"],
    ["actor_rollout_ref.model.use_prefix_tree=True"],
]


@pytest.mark.parametrize("overrides", IGNORED)
def test_what_changes_nothing_is_not_refused(overrides: list[str]) -> None:
    """Once refused, so that public commands could not run."""
    translation = grpo(*overrides)
    assert not translation.refused
    assert overrides[-1].lstrip("+").partition("=")[0] in translation.ignored
    assert not any(path.startswith("algorithm.correction") for path in translation.settings)


def test_the_program_of_dapo_is_understood() -> None:
    """It was refused with the word that there is no dynamic sampling."""
    words = [GRPO, _FILTER, f"{_OVERLONG}.enable=True", f"{_OVERLONG}.len=4096", f"{_OVERLONG}.penalty_factor=0.5"]
    for program in ("recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo"):
        translation = translate(["python3", "-m", program, *words])
        found = values(translation)
        assert not translation.refused
        assert (found["reward.overlong.buffer_tokens"], found["reward.overlong.factor"]) == (4096, 0.5)
        assert found["algorithm.filter_groups.enabled"] and found["run_dir"].startswith("checkpoints/verl-dapo/")


def test_rounds_without_a_bound_get_ours_and_it_is_said() -> None:
    translation = grpo(_FILTER, "algorithm.filter_groups.max_num_gen_batches=0")
    assert "algorithm.filter_groups.max_rounds" not in translation.settings
    assert "no bound" in translation.warnings["algorithm.filter_groups.max_num_gen_batches"]
    assert not translation.refused


@pytest.mark.parametrize(("path", "value", "overrides"), MEANING)
def test_a_key_means_what_it_means_in_verl(path: str, value: Any, overrides: list[str]) -> None:
    translation = grpo(*overrides)
    assert translation.settings[path].value == value
    assert not translation.refused


REFUSED = [
    ("algorithm.adv_estimator", "grpo, rloo", ["algorithm.adv_estimator=gdpo"]),
    ("critic.ppo_epochs", "the actor's updates", ["algorithm.adv_estimator=gae", "critic.ppo_epochs=2"]),
    ("critic.model.lora_rank", "without adapters", ["algorithm.adv_estimator=gae", "critic.model.lora_rank=8"]),
    ("critic.enable", "asks a critic", ["algorithm.adv_estimator=gae", "critic.enable=False"]),
    ("critic.enable", "asks no critic", ["critic.enable=True"]),
    (f"{ROLLOUT}.name", f"{ROLLOUT}.name=vllm", [f"{ROLLOUT}.name=sglang"]),
    (f"{ACTOR}.policy_loss.loss_mode", "vanilla, gspo", [f"{ACTOR}.policy_loss.loss_mode=clip_cov"]),
    ("algorithm.use_kl_in_reward", "enters once", [f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"]),
    ("algorithm.kl_ctrl.type", "fixed", ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=linear"]),
    ("data.gen_batch_size", "leave it out", ["data.gen_batch_size=2048"]),
    (f"{_CORRECTION}.rollout_is", "use token or sequence", [f"{_CORRECTION}.rollout_is=geometric"]),
    (
        f"{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel",
        "set it to False",
        [f"+{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=True"],
    ),
    (
        f"{ROLLOUT}.multi_turn.completion_callback",
        "set it to null",
        [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.completion_callback=a.B"],
    ),
    (f"{_CORRECTION}.rollout_rs", "no counterpart", [f"{_CORRECTION}.rollout_rs=seq_sum_k1"]),
    (
        f"{_CORRECTION}.rollout_rs_threshold",
        "set it to 3",
        [f"{_CORRECTION}.rollout_rs=token_k1", f"{_CORRECTION}.rollout_rs_threshold=0.5_3"],
    ),
    (
        f"{_CORRECTION}.rollout_rs",
        "no gap is left",
        [
            f"{_CORRECTION}.rollout_rs=token_k2",
            f"{_CORRECTION}.rollout_rs_threshold=1",
            f"{_CORRECTION}.bypass_mode=True",
        ],
    ),
    (f"{_CORRECTION}.rollout_rs", "rollout_rs_threshold", [f"{_CORRECTION}.rollout_rs=token_k2"]),
    (f"{_CORRECTION}.rollout_rs", "one of token_k1, seq_max_k2", [f"{_CORRECTION}.rollout_rs='token_k1,seq_max_k2'"]),
    (
        f"{ROLLOUT}.engine_kwargs.vllm.quantization",
        "same arithmetic",
        [f"+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8"],
    ),
    (f"{_MEGATRON}.param.target", "needs a folder", ["model_engine=megatron", f"{_MEGATRON}.param.target=disk"]),
    (f"{_LORA}.type", "no such choice", [f"{_LORA}.rank=8", f"{_LORA}.type=dora"]),
    (f"{_LORA}.target_modules", "no such choice", [f"{_LORA}.rank=8", f"{_LORA}.target_modules=[linear_q]"]),
    (f"{ROLLOUT}.custom.agents", "environment.tools", [f"+{ROLLOUT}.custom.agents=7"]),
    (f"{ROLLOUT}.moe_ep_size", "set it to 1", [f"+{ROLLOUT}.moe_ep_size=2"]),
    ("algorithm.codapo_top_k", "to 0.9; leave it out", ["+algorithm.codapo_top_k=4"]),
    (f"{_TRANSFORMER}.fp8", "bfloat16 or float32", ["model_engine=megatron", f"+{_TRANSFORMER}.fp8=hybrid"]),
    (
        "actor_rollout_ref.model.override_config.attention_dropout",
        "config.json",
        ["+actor_rollout_ref.model.override_config.attention_dropout=0.1"],
    ),
    (f"{ACTOR}.optim.optimizer", "AdamW", [f"{ACTOR}.optim.optimizer=Muon"]),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", "total_training_steps", [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"]),
    (f"{ACTOR}.optim.lr", "not a number", [f"{ACTOR}.optim.lr=fast"]),
    ("data.train_batch_size", "not a whole number", ["data.train_batch_size=1.5"]),
    ("data.train_batch_size", "not a whole number", ["data.train_batch_size=inf"]),
    ("data.shuffle", "neither true nor false", ["data.shuffle=maybe"]),
    (f"{ACTOR}.fsdp_config.dtype", "use bfloat16", [f"{ACTOR}.fsdp_config.dtype=float16"]),
    (f"{ROLLOUT}.multi_turn.enable", "environment.tools", [f"{ROLLOUT}.multi_turn.enable=True"]),
    (
        f"{ROLLOUT}.multi_turn.tool_config_path",
        "not run",
        [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml"],
    ),
    (
        f"{ROLLOUT}.multi_turn.format",
        "llama3_json",
        [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.format=gpt-oss"],
    ),
    (f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent", [f"{ROLLOUT}.agent.default_agent_loop=mine"]),
    (f"{ROLLOUT}.expert_parallel_size", "set it to 1", [f"{ROLLOUT}.expert_parallel_size=8"]),
    (f"{ACTOR}.strategy", "set it to fsdp", [f"{ACTOR}.strategy=deepspeed"]),
    ("reward.reward_manager.name", "naive", ["reward_model.reward_manager=mine"]),
    ("reward.reward_model.model_path", "one label", ["reward.reward_model.enable=True"]),
    (
        "reward.reward_model.enable_resource_pool",
        "placement.reward",
        [*_SCORER, "reward.reward_model.enable_resource_pool=True"],
    ),
    ("reward.custom_reward_function.path", "one of both", ["custom_reward_function.path=r.py", *_SCORER]),
    (f"{_BUFFER}.len", "1 token or more", [*_DAPO, f"{_BUFFER}.len=0"]),
    ("trainer.val_only", "meshloom eval", ["trainer.val_only=True"]),
    ("trainer.critic_warmup", "set it to 0", ["trainer.critic_warmup=20"]),
    ("trainer.v1.trainer_mode", "sync", ["trainer.v1.trainer_mode=separate_async"]),
    (
        "data.apply_chat_template_kwargs.deep",
        "leave it out",
        ["+data.apply_chat_template_kwargs.deep=[1]"],
    ),
    (
        "actor_rollout_ref.model.override_config.rope_theta",
        "config.json",
        ["+actor_rollout_ref.model.override_config.rope_theta=1e6"],
    ),
]


@pytest.mark.parametrize(("key", "said", "overrides"), REFUSED)
def test_what_has_no_counterpart_is_refused_with_what_to_do(key: str, said: str, overrides: list[str]) -> None:
    translation = grpo(*overrides)
    typed = next((one.partition("=")[0].lstrip("+") for one in overrides if one.lstrip("+").startswith(key)), key)
    found = translation.refused.get(typed) or translation.refused[overrides[0].partition("=")[0]]
    assert said in found


def test_bounds_of_turns_are_those_of_an_environment() -> None:
    group = f"{ROLLOUT}.multi_turn"
    tools = (
        f"{group}.enable=True",
        f"{group}.tool_config_path=tools.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
    )
    bounds = (f"{group}.max_assistant_turns=5", f"{group}.max_user_turns=3", f"{group}.max_tool_response_length=500")
    translation = grpo(*tools, *bounds, f"{group}.format=hermes")
    found = {path: native.value for path, native in translation.settings.items() if path.startswith("environment.")}
    assert found == {
        "environment.max_turns": 4,
        "environment.max_answer_characters": 500,
        "environment.tool_format": "hermes",
    }
    assert list(translation.refused) == [f"{group}.tool_config_path"]
    own = read_verl([GRPO, *tools, *bounds], ["environment.tools=[tools.py:search]"])
    assert not own.refused and f"{group}.tool_config_path" in own.ignored
    alone = read_verl([GRPO, *tools], [])
    assert alone.refused and not any(path.startswith("environment.") for path in alone.settings)


WARNED = [
    (f"{ACTOR}.clip_ratio", "changes nothing", [f"{ACTOR}.clip_ratio=0.3"]),
    (f"{ACTOR}.ppo_mini_batch_size", "one update a step", ["data.train_batch_size=8"]),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "verl refuses a command without it", []),
    (f"{ACTOR}.optim.lr_warmup_steps", "once an update here", [f"{ACTOR}.optim.lr_warmup_steps=10"]),
    ("data.truncation", "names its row", ["data.truncation=middle"]),
    (f"{ROLLOUT}.val_kwargs.do_sample", "greedy", [f"{ROLLOUT}.val_kwargs.do_sample=True"]),
    ("trainer.logger", "no logger clearml", ["trainer.logger=[console,clearml]"]),
    (f"{ROLLOUT}.name", "vLLM is not installed", []),
]


@pytest.mark.parametrize(("key", "said", "overrides"), WARNED)
def test_traps_are_warned_about(key: str, said: str, overrides: list[str]) -> None:
    assert said in grpo(*overrides, vllm_is_there=False).warnings[key]
    assert not grpo(f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_high=0.3").warnings.get(f"{ACTOR}.clip_ratio")


def test_without_vllm_the_embedded_engine_generates() -> None:
    translation = grpo(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.6", vllm_is_there=False)
    assert translation.settings["rollout.engine"].value == "torch"
    assert not any(path.startswith("rollout.vllm") for path in translation.settings)
    assert f"{ROLLOUT}.gpu_memory_utilization" in translation.ignored


def test_a_logger_of_verls_default_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that asks for no logger was refused for want of wandb."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "wandb" else find(name, *of))
    by_default = read_verl([GRPO])
    assert by_default.settings["logging.loggers"].value == []
    assert "not installed" in by_default.warnings["trainer.logger"]
    assert read_verl([GRPO, "trainer.logger=[console,wandb]"]).settings["logging.loggers"].value == ["wandb"]


def test_only_validation_files_of_verls_default_are_left_out_where_they_are_not_there() -> None:
    """A folder called default made a file verl's own, and so dropped it; fine-tuning was refused for want of GSM8K."""
    given, path = "data.val_files=/data/default/val.parquet", "data.validation.files"
    assert read_verl([GRPO, given]).settings[path].value == ["/data/default/val.parquet"]
    older = ["python3", "-m", "verl.trainer.fsdp_sft_trainer", "data.train_files=x.parquet"]
    by_default = read_verl(older)
    assert path not in by_default.settings and "is not there" in by_default.warnings["data.val_files"]
    assert read_verl([*older, given]).settings[path].value == ["/data/default/val.parquet"]


def test_where_offloaded_bytes_go_is_in_the_environment() -> None:
    offload = f"{ACTOR}.fsdp_config.optimizer_offload=True"
    disk = {"VERL_OFFLOAD_DIR": "/nvme"}
    found = grpo(offload, environment=disk).settings
    assert (found["offload.actor.optimizer"].value, found["offload.folder"].value) == ("disk", "/nvme")
    assert "offload.folder" not in grpo(environment=disk).settings
    host = disk | {"VERL_OFFLOAD_DEVICE": "cpu"}
    assert grpo(offload, environment=host).settings["offload.actor.optimizer"].value == "host"
    in_front = ["VERL_OFFLOAD_DEVICE=cpu", "python3", "-m", "verl.trainer.main_ppo", GRPO, offload]
    assert translate(in_front, environment=disk).settings["offload.actor.optimizer"].value == "host"
    assert "needs a folder" in grpo(environment={"VERL_OFFLOAD_DEVICE": "disk"}).refused["VERL_OFFLOAD_DEVICE"]
    assert "neither" in grpo(environment={"VERL_OFFLOAD_DEVICE": "tape"}).refused["VERL_OFFLOAD_DEVICE"]


def test_a_share_of_the_run_is_counted_with_the_rows() -> None:
    ratio = f"{ACTOR}.optim.lr_warmup_steps_ratio=0.5"
    translation = grpo(ratio, "data.train_batch_size=10", "trainer.total_epochs=2", num_prompts=109)
    assert translation.settings["optimizer.warmup_updates"].value == 10


def test_the_settings_say_everything_that_verl_would_do_by_default() -> None:
    """A default of ours never stands for one of verl's: what a run reads is stated, with its origin."""
    translation = grpo()
    assert all("verl" in native.origin for native in translation.settings.values())
    stated = set(translation.settings)
    for path in ("batch.prompts_per_step", "optimizer.betas", "algorithm.clip_low", "rollout.prefill_tokens"):
        assert path in stated
    settings = settings_of(translation)
    assert isinstance(settings, TrainSettings)
    assert settings.provenance.of("batch.prompts_per_step") == "verl's default data.train_batch_size=1024"
    assert settings.provenance.of("algorithm.advantage") == f"verl {GRPO}"
    assert settings_of(grpo(), ["optimizer.lr=0.5"]).provenance.of("optimizer.lr") == "override optimizer.lr=0.5"


CHANGES = {"actor_rollout_ref.rollout.enable_prefix_caching", "reward.num_workers", f"{ACTOR}.fsdp_config.dtype"}
"""Keys whose default is said only where it is given, since ours decides the same by itself."""


def test_giving_a_default_of_verl_changes_nothing() -> None:
    base = values(grpo())
    for key, value in DEFAULTS.items():
        if key == "algorithm.adv_estimator":
            continue
        found = grpo(word(key, value))
        assert key in {*found.translated, *found.ignored}, (key, found.refused)
        assert key in CHANGES or values(found) == base, key


def test_the_defaults_are_verls() -> None:
    for key, value in RL_DEFAULTS.items():
        if key in DEFAULTS:
            assert DEFAULTS[key] == value, key


@pytest.mark.parametrize(("kind", "first"), [("rl", GRPO), ("sft", "optim.lr=1e-5")])
def test_every_key_of_verl_has_a_rule(kind: str, first: str) -> None:
    for key in sorted(known_keys(kind).closed):
        for value in ("true", "x", "3", "null", "[a]"):
            found = translate([first, f"{key}={value}"])
            assert sum(key in account for account in (found.translated, found.ignored, found.refused)) == 1, (
                key,
                value,
            )
            assert found.refused.get(key) != FALLBACK, (key, value)


ODD = (
    "null",
    "0",
    "-1",
    "2.5",
    "x",
    "",
    "[a]",
    "{}",
    "{a:1}",
    "inf",
    "1e400",
    "${a.b}",
    "$A",
    "[",
    "megatron",
    "cosine",
)


def test_whatever_is_written_each_key_is_accounted_for_once() -> None:
    chance = random.Random(5)
    for kind, entry, defaults in (("rl", "main_ppo", RL_DEFAULTS), ("sft", "sft_trainer", SFT_DEFAULTS)):
        keys = [*sorted(known_keys(kind).closed | known_keys(kind).groups), *list(defaults) * 8]
        for _ in range(120):
            words = [f"{chance.choice(['', '+', '~'])}{key}={chance.choice(ODD)}" for key in chance.sample(keys, 12)]
            found = translate(["-m", f"verl.trainer.{entry}", *words])
            for key in (word.lstrip("+~").partition("=")[0] for word in words):
                assert sum(key in account for account in (found.translated, found.ignored, found.refused)) == 1, words
            with contextlib.suppress(UserError):
                settings_of(found)


_SFT_ARGUMENTS = "optim.override_optimizer_config"
SFT = [
    ("batch.samples_per_update", 256, []),
    ("batch.tokens_per_microbatch", 8192, []),
    ("data.prompt_column", "messages", []),
    ("optimizer.schedule", "cosine", ["optim.lr_scheduler_type=cosine"]),
    ("optimizer.warmup_updates", 5, ["optim.lr_warmup_steps=5"]),
    ("data.max_response_tokens", 2048, ["data.max_length=2048"]),
    ("model.path", "m", ["model.partial_pretrain=m"]),
    ("batch.epochs", 4, []),
    ("offload.actor.optimizer", "host", ["engine.optimizer_offload=True"]),
    ("offload.actor.optimizer", "none", ["engine.param_offload=True"]),
    ("checkpoint.at_end", True, []),
    ("checkpoint.at_end", True, ["trainer.save_freq=-1"]),
    (
        "data.prompt_column",
        "extra_info.question",
        ["data.prompt_key=extra_info", "+data.prompt_dict_keys=['question']"],
    ),
    ("optimizer.schedule", "cosine", ["engine=veomni", "optim=veomni", "model=hf_model"]),
    ("optimizer.schedule", "linear", ["engine=torchtitan"]),
    ("offload.actor.optimizer", "host", ["engine=megatron", f"+{_SFT_ARGUMENTS}.optimizer_cpu_offload=True"]),
    ("offload.actor.optimizer", "none", ["engine=megatron", f"+{_SFT_ARGUMENTS}.optimizer_offload_fraction=0"]),
    ("optimizer.lr", 1e-3, ["optim.optimizer=FusedAdam", "optim.optimizer_impl=te.optimizers.fused_adam"]),
    ("optimizer.lr", 1e-5, ["engine=automodel", "optim=automodel"]),
    ("parallel.actor.tensor", 2, ["engine=automodel", "engine.tp_size=2", "engine.backend_config.linear=te"]),
    ("model.dtype", "float32", ["engine=automodel", "engine.mp_param_dtype=fp32"]),
    ("data.validation.files", ["held.parquet"], ["data.val_files=held.parquet", "trainer.test_freq=5"]),
    ("data.validation.max_rows", 9, ["data.val_files=held.parquet", "data.val_max_samples=9"]),
    ("validation.every_steps", 5, ["data.val_files=held.parquet", "trainer.test_freq=5"]),
    ("validation.before_training", False, []),
]


def test_fine_tuning_saves_and_evaluates_after_each_epoch() -> None:
    words = ["-m", "verl.trainer.sft_trainer", "data.train_batch_size=32", "trainer.save_freq=after_each_epoch"]
    known = translate([*words, "trainer.test_freq=after_each_epoch"], num_prompts=109)
    assert not known.refused
    assert known.settings["checkpoint.every_steps"].value == known.settings["validation.every_steps"].value == 3
    assert "checkpoint.every_steps" in translate(words).warnings["trainer.save_freq"]
    assert "whole number" in grpo("trainer.save_freq=after_each_epoch").refused["trainer.save_freq"]


@pytest.mark.parametrize(("path", "value", "overrides"), SFT)
def test_fine_tuning_is_understood_too(path: str, value: Any, overrides: list[str]) -> None:
    translation = translate(["-m", "verl.trainer.sft_trainer", *overrides])
    assert (translation.kind, translation.refused) == ("sft", {})
    assert translation.settings[path].value == value
    assert isinstance(settings_of(translation), SftSettings)


def test_each_program_has_its_own_defaults() -> None:
    old = translate(["-m", "verl.trainer.fsdp_sft_trainer", "trainer.total_training_steps=100"])
    assert old.settings["optimizer.betas"].value == [0.9, 0.95]
    assert old.settings["optimizer.warmup_updates"].value == 10
    assert old.settings["data.prompt_column"].value == "question"
    assert set(ENTRIES) >= {"verl.trainer.main_ppo", "verl.trainer.sft_trainer"}
    assert translate(["model.partial_pretrain=m", "optim.lr=1e-5"]).kind == "sft"
    assert set(SFT_DEFAULTS) <= known_keys("sft").closed
    assert set(RL_DEFAULTS) <= known_keys("rl").closed


def test_keys_of_earlier_releases_are_neither_lost_nor_more_than_they_were() -> None:
    """The bound of turns under its first name was ignored; weights without a bound, which verl never made, had one of 2."""
    turns = grpo(f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.max_turns=3")
    assert turns.settings["environment.max_turns"].value == 3
    weights = grpo("algorithm.rollout_is=True")
    assert "algorithm.correction.weights" not in weights.settings
    assert "rollout_is_threshold is not given" in weights.warnings["algorithm.rollout_is"]
