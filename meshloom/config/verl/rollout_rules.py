"""verl's keys of generation: engine, sampling, limits, validation, turns.

Owns: their meaning here. Always holds: what changes the distribution of the samples is translated or refused.
"""

from typing import Any

from meshloom.config.rollout_settings import ENGINES_NOT_OFFERED
from meshloom.config.verl.actor_rules import ROLLOUT
from meshloom.config.verl.sheet import Sheet
from meshloom.config.verl.turn_rules import turn_rules

_ENGINES = {"vllm": "vllm", "vllm_omni": "vllm", "hf": "torch"}


def rollout_rules(sheet: Sheet, *, vllm_is_there: bool) -> None:
    """Everything under ``actor_rollout_ref.rollout`` but for parallelism of the trainer and microbatches.

    Args:
        vllm_is_there: otherwise the embedded engine generates.
    """
    engine = _engine(sheet, vllm_is_there)
    _sampling(sheet)
    _limits(sheet, engine)
    _engine_arguments(sheet, engine)
    _validation(sheet)
    _must_be(sheet)
    turn_rules(sheet)
    _parallel(sheet)


def _engine(sheet: Sheet, vllm_is_there: bool) -> str:
    key = f"{ROLLOUT}.name"
    name = sheet.text(key)
    engine = _ENGINES.get(name, "")
    if engine == "vllm" and not vllm_is_there:
        engine = "torch"
        text = "vLLM is not installed here, so the embedded engine generates: the same distribution, weights shared"
        sheet.warn(key, f'{text} with the trainer; pip install "meshloom[vllm]" for vLLM')
    if engine:
        sheet.set("rollout.engine", engine, key)
        return engine
    fix = f"set {key}=vllm, or {key}=hf for the embedded engine"
    why = f": {ENGINES_NOT_OFFERED[name]}" if name in ENGINES_NOT_OFFERED else ""
    sheet.refuse(key, f"the engine {name!r} does not generate here{why}; {fix}")
    sheet.settings.pop("rollout.engine", None)
    return name


def _top_k(sheet: Sheet, key: str) -> int:
    value = sheet.whole(key)
    return value if value and value > 0 else 0


def _sampling(sheet: Sheet) -> None:
    path = "rollout.sampling"
    sheet.set(f"{path}.temperature", sheet.number(f"{ROLLOUT}.temperature"), f"{ROLLOUT}.temperature")
    sheet.set(f"{path}.top_p", sheet.number(f"{ROLLOUT}.top_p"), f"{ROLLOUT}.top_p")
    sheet.set(f"{path}.top_k", _top_k(sheet, f"{ROLLOUT}.top_k"), f"{ROLLOUT}.top_k")
    if sheet.has(f"{ROLLOUT}.min_p"):
        sheet.set(f"{path}.min_p", sheet.number(f"{ROLLOUT}.min_p"), f"{ROLLOUT}.min_p")
    if sheet.has(f"{ROLLOUT}.stop"):
        sheet.set("rollout.stop", sheet.texts(f"{ROLLOUT}.stop"), f"{ROLLOUT}.stop")
    sheet.ignore("it is null", f"{ROLLOUT}.min_p", f"{ROLLOUT}.stop")
    sheet.set("rollout.ignore_eos", sheet.flag(f"{ROLLOUT}.ignore_eos"), f"{ROLLOUT}.ignore_eos")


def _limits(sheet: Sheet, engine: str) -> None:
    sheet.set("rollout.max_sequences", sheet.whole(f"{ROLLOUT}.max_num_seqs"), f"{ROLLOUT}.max_num_seqs")
    tokens = f"{ROLLOUT}.max_num_batched_tokens"
    sheet.set("rollout.prefill_tokens", sheet.whole(tokens), tokens)
    share, eager, length, sleep = (
        f"{ROLLOUT}.{name}"
        for name in ("gpu_memory_utilization", "enforce_eager", "max_model_len", "free_cache_engine")
    )
    if engine != "vllm":
        sheet.ignore("vLLM alone reads it", share, eager, length, sleep)
        return
    sheet.set("rollout.vllm.gpu_memory_utilization", sheet.number(share), share)
    sheet.set("rollout.vllm.enforce_eager", sheet.flag(eager), eager)
    own = f"{ROLLOUT}.engine_kwargs.vllm.max_model_len"
    if sheet.has(own):
        sheet.set("rollout.vllm.max_model_len", sheet.whole(own), own)
        sheet.ignore(f"{own} decides", length)
    else:
        sheet.set("rollout.vllm.max_model_len", sheet.whole(length), length)
    sheet.set("rollout.vllm.sleep", sheet.flag(sleep), sleep)


_FROM_SETTINGS = {
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "max_num_seqs": f"{ROLLOUT}.max_num_seqs",
    "max_num_batched_tokens": f"{ROLLOUT}.max_num_batched_tokens",
    "gpu_memory_utilization": f"{ROLLOUT}.gpu_memory_utilization",
    "enforce_eager": f"{ROLLOUT}.enforce_eager",
}
"""vLLM's arguments that verl's own keys give as well."""
_PERFORMANCE: tuple[str, ...] = (
    "compilation_config",
    "additional_config",
    "async_scheduling",
    "mm_processor_cache_gb",
    "swap_space",
)
_PERFORMANCE += ("disable_mm_preprocessor_cache", "cuda_graph_sizes", "enable_chunked_prefill", "disable_log_stats")


def _engine_arguments(sheet: Sheet, engine: str) -> None:
    caching = f"{ROLLOUT}.enable_prefix_caching"
    if engine == "vllm" and caching in sheet.given.entries:
        path = "rollout.vllm.arguments.enable_prefix_caching"
        sheet.set(path, sheet.flag(caching), caching)
    sheet.ignore("it is about speed", caching)
    group = f"{ROLLOUT}.engine_kwargs"
    for key in [key for key in sheet.open() if key.startswith(group)]:
        kind, _, name = key.removeprefix(f"{group}.").partition(".")
        first = name.partition(".")[0].replace("-", "_")
        if kind != "vllm" or engine != "vllm" or not name:
            sheet.ignore("vLLM, where it generates, alone gets further arguments, and its own only", key)
        elif first in _PERFORMANCE or not sheet.has(key):
            sheet.ignore("it is about speed and memory of vLLM, whose defaults hold", key)
        elif first in _FROM_SETTINGS:
            sheet.refuse(key, f"one number, one key: give it as {_FROM_SETTINGS[first]}")
        elif first in _ALLOWED:
            allowed, reason, advice = _ALLOWED[first]
            if sheet.value(key) not in allowed:
                sheet.refuse(key, advice)
            sheet.ignore(reason, key)
        elif "." in name or isinstance(sheet.value(key), list | dict):
            sheet.refuse(key, "an argument of vLLM is one number or text here; leave it out")
        else:
            sheet.set(f"rollout.vllm.arguments.{first}", sheet.value(key), key)


def _validation(sheet: Sheet) -> None:
    group = f"{ROLLOUT}.val_kwargs"
    temperature = sheet.number(f"{group}.temperature")
    sheet.set("validation.sampling.temperature", temperature, f"{group}.temperature")
    sheet.set("validation.sampling.top_p", sheet.number(f"{group}.top_p"), f"{group}.top_p")
    sheet.set("validation.sampling.top_k", _top_k(sheet, f"{group}.top_k"), f"{group}.top_k")
    if sheet.has(f"{group}.min_p"):
        sheet.set("validation.sampling.min_p", sheet.number(f"{group}.min_p"), f"{group}.min_p")
    sheet.ignore("it is null", f"{group}.min_p")
    sheet.set("validation.samples_per_prompt", sheet.whole(f"{group}.n"), f"{group}.n")
    sampled = f"{group}.do_sample"
    if sampled in sheet.given.entries and sheet.flag(sampled) == (temperature == 0):
        doing = "greedy, as its temperature is 0" if temperature == 0 else "sampled, as its temperature is above 0"
        sheet.warn(
            sampled, f"validation is {doing}; do_sample={sheet.value(sampled)} changes nothing, as in verl's servers"
        )
    sheet.ignore("the temperature of validation decides: 0 is greedy", sampled)


_ALLOWED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "do_sample": ((True, None), "training samples are drawn", "training samples cannot be greedy; set it to True"),
    "use_fire_sampling": ((False, None), "it is off", "this sampling is not offered; set it to False"),
    "repetition_penalty": (
        (1, 1.0, None),
        "a penalty of 1 changes nothing",
        "a penalty changes the sampled distribution, which the trainer does not know; set it to 1.0",
    ),
    "logprobs_mode": (
        ("processed_logprobs", None),
        "log-probs are those of the distribution that is sampled",
        "log-probs are those of the distribution that is sampled; set it to processed_logprobs",
    ),
    "over_sample_rate": ((0, 0.0, None), "no more samples are made than are used", "set it to 0: it is not offered"),
    "quantization": (
        (None, False),
        "the sampler computes as the trainer does",
        "sampler and trainer compute in the same arithmetic; set it to null",
    ),
    "disaggregation.enabled": ((False, None), "it is off", "prefill and decoding share their devices; set it to False"),
    "enable_rollout_routing_replay": (
        (False, None),
        "it is off",
        "experts chosen while sampling are not replayed; set it to False",
    ),
    "enable_expert_parallel": (
        (False, None),
        "it is off",
        "experts are not spread over devices while generating; set it to False",
    ),
    "moe_ep_size": ((1, None), "it is 1", "experts are not spread over devices while generating; set it to 1"),
    "moe_tensor_parallel_size": ((1, None), "it is 1", "experts are cut as all layers are; set it to 1"),
    "moe_tp_size": ((1, None), "it is 1", "experts are cut as all layers are; set it to 1"),
    "skip_rollout": ((False, None), "it is off", "samples are always generated; set it to False"),
    "nnodes": (
        (0, None),
        "generation shares the trainer's devices",
        "generation shares the trainer's devices; native placement.rollout gives it its own: set it to 0",
    ),
    "router_config_path": (
        (None, ""),
        "there is no router",
        "requests are not routed by a file of rules; set it to null",
    ),
    "agent.agent_loop_config_path": (
        (None, ""),
        "there is none",
        "agent loops of your own are not run; set it to null",
    ),
    "agent.agent_loop_manager_class": (
        (None, ""),
        "there is none",
        "agent loops of your own are not run; set it to null",
    ),
    "agent.custom_async_server.path": ((None, ""), "there is none", "servers of your own are not run; set it to null"),
    "mode": (("async", "sync", None), "generation takes its turn with training", "set it to async"),
}
"""Keys with values that change nothing: those values, why, and what to do about others."""


def _must_be(sheet: Sheet) -> None:
    dtype = f"{ROLLOUT}.dtype"
    trained = sheet.settings["model.dtype"].value
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32", "auto": trained}
    if sheet.has(dtype) and names.get(sheet.text(dtype)) not in (trained, "bfloat16" if trained == "auto" else trained):
        text = f"sampler and trainer compute in one arithmetic, here {trained}"
        sheet.refuse(dtype, f"{text}; leave it out, or set actor_rollout_ref.actor.fsdp_config.dtype to the same")
    sheet.ignore("the sampler computes as the trainer does (model.dtype)", dtype)
    for name, (allowed, reason, advice) in _ALLOWED.items():
        key = f"{ROLLOUT}.{name}"
        if key in sheet.given.entries and sheet.value(key) not in allowed:
            sheet.refuse(key, advice)
        sheet.ignore(reason, key)


def _parallel(sheet: Sheet) -> None:
    experts, stages, replicas = (
        f"{ROLLOUT}.{name}" for name in ("expert_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    )
    if (sheet.whole(experts, 1) or 1) > 1:
        text = "experts are not spread over devices while generating (no expert parallelism)"
        sheet.refuse(experts, f"{text}; set it to 1 and raise {ROLLOUT}.tensor_model_parallel_size")
    if (sheet.whole(stages, 1) or 1) > 1:
        text = "generation is not cut into stages"
        sheet.refuse(stages, f"{text}; set it to 1 and raise {ROLLOUT}.tensor_model_parallel_size")
    sheet.ignore("it is 1", experts, stages)
    sheet.ignore("replicas follow from the devices and parallel.rollout.tensor", replicas)
