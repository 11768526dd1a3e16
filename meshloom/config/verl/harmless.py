"""Keys of verl that decide nothing here, with the reason; and those whose one harmless value is known.

Owns: the tables. Always holds: a pattern is here only if no value of the key changes what is learned, or if the values that
do not are named.
"""

from fnmatch import fnmatchcase
from typing import Any

from meshloom.config.verl.sheet import Sheet

_SPEED = "it is about speed"
_MEMORY = "it is about memory; what the run needs is in the plan's memory ledger"
_PADDING = "samples are never padded here"
_CHUNKS = "log-probs and entropy are always computed in chunks (model.logits_chunk_bytes)"
_PROFILE = "times of each phase are always measured; there is no profiler"
_RAY = "there is no Ray cluster to set up"
_PICTURES = "prompts are text; rows that hold more are refused when they are looked at"
_WEIGHTS = "weights move within a device, and are checked"

HARMLESS: tuple[tuple[str, str], ...] = (
    ("*profiler*", _PROFILE),
    ("*.profile.*", _PROFILE),
    ("npu_profile*", _PROFILE),
    ("trainer.npu_profile*", _PROFILE),
    ("trainer.*_nsight_options*", _PROFILE),
    ("trainer.profile_*", _PROFILE),
    ("ray_kwargs*", _RAY),
    ("trainer.runtime_env*", _RAY),
    ("trainer.ray_wait_register_center_timeout", _RAY),
    ("transfer_queue*", "samples stay in one process"),
    ("skip.*.dump_dir", "nothing is skipped"),
    ("skip.*.steps", "nothing is skipped"),
    ("skip.*.action", "nothing is skipped"),
    ("*nccl_timeout", "every wait has a deadline of its own"),
    ("*.use_shm", "files are read from where they are"),
    ("data.cache_dir", "files are read from where they are"),
    ("*.entropy_checkpointing", _CHUNKS),
    ("*.entropy_from_logits_*", _CHUNKS),
    ("*.use_fused_kernels", "log-probs are always computed without whole logits"),
    ("*.fused_kernel_options*", "log-probs are always computed without whole logits"),
    ("*.use_liger", _SPEED),
    ("*.tiled_mlp.*", _MEMORY),
    ("*.enable_activation_offload", _MEMORY),
    ("*.use_remove_padding", _PADDING),
    ("*.pad_to_length*", _PADDING),
    ("*.pad_bshd_to_minibatch_max", _PADDING),
    ("*.max_seqlen_per_dp_cp_rank", _PADDING),
    ("*.use_torch_compile", "it compiles verl's entropy; layers are compiled as model.compile says"),
    ("*.use_prefix_tree", "it saves time where samples share a prompt; the result is the same"),
    ("*.prefix_tree_attention", "it saves time where samples share a prompt; the result is the same"),
    ("*.use_prefix_grouper", "it saves time where samples share a prompt; the result is the same"),
    ("*.rollout_n", "it is actor_rollout_ref.rollout.n"),
    ("*.load_weight", "weights are always loaded"),
    ("*.calculate_entropy", "entropy is always measured"),
    ("*.calculate_sum_pi_squared", "only estimators that are not here need it"),
    ("*.trust_remote_code", "no code of a model's folder is run; a model that needs it is refused by name"),
    ("*.gradient_checkpointing_kwargs*", "a layer is recomputed whole"),
    ("*.freeze_vision_tower", "the part of a model that sees is never trained"),
    ("*.mtp.*", "no further tokens are predicted at once"),
    ("*.*config.strategy", "the role's own strategy decides"),
    ("*.veomni.strategy", "the role's own strategy decides"),
    ("*.torchtitan.strategy", "the role's own strategy decides"),
    ("*.full_determinism", "order and sampling follow from the seed; kernels may round differently"),
    ("*.fsdp_config.seed", "order and sampling follow from the setting seed"),
    ("*.megatron.seed", "order and sampling follow from the setting seed"),
    ("*.veomni.seed", "order and sampling follow from the setting seed"),
    ("*.torchtitan.seed", "order and sampling follow from the setting seed"),
    ("actor_rollout_ref.rollout.seed", "order and sampling follow from the setting seed"),
    ("*.reshard_after_forward", _MEMORY),
    ("*.forward_prefetch", _SPEED),
    ("*.use_orig_params", "it is about how FSDP keeps parameters"),
    ("*.wrap_policy*", "each layer is cut on its own"),
    ("*.use_no_sync_for_gradient_accumulation", _SPEED),
    ("*.forward_only", "it follows from the role"),
    ("*.turbo_config.*", "it is about how layers are cut, moved and recomputed by another engine"),
    ("*.router_replay.*_file", "experts are not replayed"),
    ("*.megatron.sequence_parallel", "it is about where activations are within a tensor-parallel group"),
    ("*.megatron.use_distributed_optimizer", "the optimizer's state is cut as parallel.* says"),
    ("*.megatron.use_megatron_fsdp", "training is FSDP2"),
    ("*.megatron.dynamic_context_parallel", _SPEED),
    ("*.megatron.*dist_checkpointing*", "weights are read from the Hugging Face folder at model.path"),
    ("*.megatron.dist_ckpt_*", "checkpoints have their own form"),
    ("*.megatron.distrib_optim_*", "checkpoints have their own form"),
    ("*.megatron.*mbridge", "weights are read from the Hugging Face folder at model.path"),
    ("*.megatron.extra", "there is no Megatron"),
    ("*.megatron.override_ddp_config*", "there is no Megatron"),
    ("*.megatron.override_mcore_model_config", "it is empty"),
    ("*.mbridge_config*", "weights are read from the Hugging Face folder at model.path"),
    ("*.veomni.*_implementation", "kernels are chosen by model.attention and model.compile"),
    ("*.veomni.enable_full_shard", "layers are always cut whole"),
    ("*.veomni.*activation_offload*", _MEMORY),
    ("*.veomni.enable_fsdp_offload", _MEMORY),
    ("*.veomni.mixed_precision", "model.dtype decides"),
    ("*.veomni.*", "it is about VeOmni's own loading and cutting"),
    ("*.torchtitan.activation_checkpoint", "model.gradient_checkpointing decides"),
    ("*.torchtitan.attn_type", "model.attention decides"),
    ("*.torchtitan.mixed_precision", "model.dtype decides"),
    ("*.torchtitan.*", "it is about torchtitan's own cutting"),
    ("*.activation_observer", "nothing is quantised"),
    ("*.qat.*", "nothing is quantised"),
    ("*.qat", "nothing is quantised"),
    ("actor_rollout_ref.ref.optim.*", "the reference has no optimizer"),
    ("actor_rollout_ref.rollout.calculate_log_probs", "the sampler's log-probs are always kept"),
    ("actor_rollout_ref.rollout.cudagraph_capture_sizes", _SPEED),
    ("actor_rollout_ref.rollout.enable_chunked_prefill", _SPEED),
    ("actor_rollout_ref.rollout.multi_stage_wake_up", _MEMORY),
    ("actor_rollout_ref.rollout.layered_summon", _MEMORY),
    ("actor_rollout_ref.rollout.load_format", _WEIGHTS),
    ("actor_rollout_ref.rollout.layer_name_map.*", _WEIGHTS),
    ("actor_rollout_ref.rollout.checkpoint_engine*", _WEIGHTS),
    ("actor_rollout_ref.rollout.update_weights_bucket_megabytes", _WEIGHTS),
    ("actor_rollout_ref.rollout.disable_log_stats", "the engine's figures are in the run's metrics"),
    ("actor_rollout_ref.rollout.prometheus*", "the engine's figures are in the run's metrics"),
    ("actor_rollout_ref.rollout.moe_load_balance_metrics_interval", "it only measures"),
    ("actor_rollout_ref.rollout.trace*", "every sample is in the run's samples.jsonl"),
    ("actor_rollout_ref.rollout.skip_dump_dir", "nothing is skipped"),
    ("actor_rollout_ref.rollout.skip_tokenizer_init", "text never reaches the engine"),
    ("actor_rollout_ref.rollout.limit_images*", "prompts are text"),
    ("actor_rollout_ref.rollout.swap_space", _MEMORY),
    ("actor_rollout_ref.rollout.enable_sleep_mode", _MEMORY),
    ("actor_rollout_ref.rollout.scheduling_policy", _SPEED),
    ("actor_rollout_ref.rollout.n_gpus_per_node", "generation shares the trainer's devices"),
    ("actor_rollout_ref.rollout.disaggregation.*", "prefill and decoding share their devices"),
    ("actor_rollout_ref.rollout.quantization_config*", "nothing is quantised"),
    ("actor_rollout_ref.rollout.qat", "nothing is quantised"),
    ("actor_rollout_ref.rollout.mtp", "no further tokens are predicted at once"),
    ("actor_rollout_ref.rollout.agent.*", "episodes are played by the controller"),
    ("data.val_batch_size", "validation rows are generated together, as memory allows"),
    ("data.custom_cls.name", "data.custom_cls.path decides"),
    ("data.sampler.class_name", "data.sampler.class_path decides"),
    ("data.datagen.name", "data.datagen.path decides"),
    ("data.filter_overlong_prompts_workers", _SPEED),
    ("data.dataloader_num_workers", _SPEED),
    ("data.num_workers", _SPEED),
    ("data.return_*", "what a row holds goes to the reward function"),
    ("data.image_patch_size", "prompts are text"),
    ("data.mm_processor_kwargs*", "prompts are text"),
    ("data.image_key", _PICTURES),
    ("data.video_key", _PICTURES),
    ("data.audio_key", _PICTURES),
    ("data.validation_shuffle", "validation counts every row once"),
    ("data.need_tools_kwargs", "there are no tools"),
    ("data.answer_key", "the answer is reward_model.ground_truth of the row, or data.answer_column"),
    ("trainer.balance_batch", "microbatches are always balanced by tokens"),
    ("data.balance_dp_token", "microbatches are always balanced by tokens"),
    ("trainer.log_val_generations", "every sample is in the run's samples.jsonl"),
    ("trainer.val_generations_to_log_to_wandb", "every sample is in the run's samples.jsonl"),
    ("trainer.rollout_data_dir", "every sample is in the run's samples.jsonl"),
    ("trainer.validation_data_dir", "every sample is in the run's samples.jsonl"),
    ("trainer.del_local_ckpt_after_load", "checkpoints are kept as checkpoint.keep_last says"),
    ("trainer.max_critic_ckpt_to_keep", "there is no critic"),
    ("trainer.esi_redundant_time", "a run that is stopped saves first"),
    ("trainer.use_legacy_worker_impl", "there is one implementation"),
    ("trainer.use_v1", "there is one implementation"),
    ("trainer.v1.*", "generation and training take turns"),
    ("reward_model.launch_reward_fn_async", "rewards are always computed beside generation"),
    ("reward.reward_kwargs", "it is empty"),
    ("engine.*", "it is about how an engine of verl's keeps and computes the model"),
    ("model", "verl has one such group"),
    ("optim", "AdamW, on float32 master weights"),
    ("data.prompt_key", "rows are chats"),
    ("data.*_dict_keys", "rows are chats"),
)
"""Patterns of keys, the first that fits."""

_NULL = (None, "", False)

ONLY: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    (
        "data.reward_fn_key",
        ("data_source", None),
        "it is the column data_source",
        "the column is data_source here; rename it",
    ),
    (
        "data.tokenizer",
        _NULL,
        "it is the model's",
        "the tokenizer is the model's; put its files into the model's folder",
    ),
    (
        "data.custom_cls.path",
        _NULL,
        "there is none",
        "classes of your own do not read rows; write the rows as Parquet or JSON Lines",
    ),
    ("data.sampler.class_path", _NULL, "there is none", "the order follows from seed and data.shuffle; set it to null"),
    ("data.datagen.path", _NULL, "there is none", "rows are not made while training; set it to null"),
    ("data.tool_config_path", _NULL, "there are no tools", "tools are not offered; set it to null"),
    ("data.function_tool_path", _NULL, "there are no tools", "tools are not offered; set it to null"),
    ("data.chat_template_func", _NULL, "there is none", "put chat_template.jinja into the model's folder instead"),
    (
        "*model.custom_chat_template",
        _NULL,
        "it is the tokenizer's",
        "put it as chat_template.jinja into the model's folder",
    ),
    ("*.external_lib", _NULL, "there is none", "no package is imported for a model; use one that transformers knows"),
    (
        "*.lora_adapter_path",
        _NULL,
        "adapters begin anew",
        "adapters begin anew; merge those you have into the model's folder first",
    ),
    (
        "*.mtp.enable*",
        _NULL,
        "no further tokens are predicted at once",
        "the extra heads are not trained; set it to False",
    ),
    (
        "*.moe_config.freeze_moe_router",
        _NULL,
        "the router is trained too",
        "every weight is trained, the router too; set it to False, or train adapters",
    ),
    ("engine.enable_fp8", _NULL, "it is off", "training computes in bfloat16 or float32; set it to False"),
    (
        "engine.backend_config.fake_*",
        (None, False, 0, 0.0),
        "it is off",
        "experts are chosen by the router alone; leave it out",
    ),
    ("*.qat.enable", _NULL, "nothing is quantised", "quantised training is not offered; set it to False"),
    (
        "*.router_replay.mode",
        ("disabled", None),
        "experts are not replayed",
        "experts chosen while sampling are not replayed; set it to disabled",
    ),
    ("*.state_masking", _NULL, "it is off", "there are no turns of an environment to mask; set it to False"),
    (
        "*.ref.model*",
        _NULL,
        "the reference is the model that training starts from",
        "the reference is the model that training starts from; leave it out",
    ),
    (
        "actor_rollout_ref.rollout.custom*",
        (None, {}),
        "it is empty",
        "agent frameworks of your own are not run; add environment.tools or environment.gym to the command",
    ),
    ("skip.*.enable", _NULL, "nothing is skipped", "samples are always generated; set it to False"),
)
"""Patterns of keys, the values that change nothing, why, and what to do about others. They come before ``HARMLESS``."""

_TRANSFORMER_SAME = (
    "attention_backend", "recompute_*", "*fusion*", "*_fusion", "deallocate_pipeline_outputs", "persist_layer_norm",
    "use_flash_attn", "use_fused_*", "use_naive_l2norm", "sequence_parallel", "moe_grouped_gemm", "moe_token_dispatcher_type",
    "moe_enable_deepep", "moe_shared_expert_overlap", "num_layers_in_*_pipeline_stage", "account_for_*_in_pipeline_split",
    "context_parallel_algo", "cuda_graph*", "enable_cuda_graph", "tp_comm_overlap", "moe_router_dtype", "pipeline_dtype",
    "moe_pad_expert_input_to_capacity", "moe_flex_dispatcher_backend", "cpu_offloading*", "batch_p2p_comm", "swap_*",
    "pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage", "cp_partition_mode", "context_parallel_size",
    "sequence_packing_scheduler", "max_seqlen_per_dp_cp_rank", "variable_seq_lengths", "overlap_*", "tp_comm_*",
    "init_method_std", "keep_mtp_spec_in_bf16", "seq_length", "micro_batch_size", "spec", "cp_comm_type",
    "calculate_per_token_loss", "delay_wgrad_compute", "distribute_saved_activations", "use_cpu_initialization",
)  # fmt: skip
"""Arguments of Megatron's transformer that are about speed, memory and where layers are."""
_TRANSFORMER_ZERO = {
    "moe_aux_loss_coeff": "no loss for the balance of experts is added",
    "moe_z_loss_coeff": "no loss for the router's logits is added",
    "dsa_indexer_loss_coeff": "no loss for what attention looks at is added",
    "moe_router_bias_update_rate": "the router's bias is not moved",
    "attention_dropout": "there is no dropout",
    "hidden_dropout": "there is no dropout",
}


def apply_tables(sheet: Sheet) -> None:
    """Account for the keys that no rule has read, as far as the tables know them."""
    for key in sheet.open():
        if ".override_transformer_config" in key or ".override_mcore_model_config." in key:
            _transformer(sheet, key)
            continue
        for pattern, allowed, reason, advice in ONLY:
            if fnmatchcase(key, pattern):
                if sheet.value(key) in allowed:
                    sheet.ignore(reason, key)
                else:
                    sheet.refuse(key, advice)
                break
        else:
            reasons = (reason for pattern, reason in HARMLESS if fnmatchcase(key, pattern))
            sheet.ignore(next(reasons, ""), key) if _fits(key) else None


def _fits(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern, _ in HARMLESS)


def _transformer(sheet: Sheet, key: str) -> None:
    name = key.rpartition(".")[2]
    value = sheet.value(key)
    if name in _TRANSFORMER_ZERO:
        if value not in (None, 0, 0.0):
            sheet.refuse(key, f"{_TRANSFORMER_ZERO[name]} here; set it to 0")
        sheet.ignore(_TRANSFORMER_ZERO[name], key)
    elif name == "moe_router_load_balancing_type" and value not in (None, "none"):
        sheet.refuse(key, "no loss for the balance of experts is added here; set it to none")
    elif name == "moe_router_load_balancing_type":
        sheet.ignore("no loss for the balance of experts is added", key)
    elif name == "moe_router_enable_expert_bias":
        if value and sheet.value(f"{key.rpartition('.')[0]}.moe_router_bias_update_rate") != 0:
            sheet.refuse(key, "the router's bias is not moved here; set moe_router_bias_update_rate to 0 as well")
        sheet.ignore("the router's bias is what the model's folder holds", key)
    elif name.startswith("mtp_") and value:
        sheet.refuse(key, "further tokens at once are not learned; leave it out")
    elif name.startswith(("fp8", "fp4")) and value:
        sheet.refuse(key, "training computes in bfloat16 or float32; leave it out")
    elif any(fnmatchcase(name, pattern) for pattern in _TRANSFORMER_SAME) or value in (None, {}):
        sheet.ignore("it is about how Megatron computes, not about what", key)
    else:
        sheet.refuse(
            key, f"config.json is read as it is; write {name} into a copy of the model's folder, or leave it out"
        )
