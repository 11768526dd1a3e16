"""verl's keys of the update: batches, loss, divergence, optimizer, precision.

Owns: their meaning here. Always holds: a key that changes the loss is translated or refused; one that only bounds memory
may be ignored.
"""

from meshloom.config.verl.sheet import Sheet

ACTOR = "actor_rollout_ref.actor"
REFERENCE = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"


def batch_rules(sheet: Sheet, devices_of_replica: int) -> None:
    """Samples of a prompt, prompts of an update, passes over a step, and what a device holds at once.

    Args:
        sheet: of the translation.
        devices_of_replica: that work on the same samples.
    """
    sheet.set("batch.samples_per_prompt", sheet.whole(f"{ROLLOUT}.n"), f"{ROLLOUT}.n")
    key = f"{ACTOR}.ppo_mini_batch_size"
    prompts, update = sheet.whole("data.train_batch_size") or 0, sheet.whole(key)
    if (update or 0) > prompts and key not in sheet.given.entries:
        text = f"verl's default of {update} prompts an update is more than the {prompts} of a step, which verl refuses"
        sheet.set("batch.prompts_per_update", None, "data.train_batch_size")
        sheet.warn(key, f"{text}; here it is one update a step")
    else:
        sheet.set("batch.prompts_per_update", update, key)
    sheet.set("batch.epochs_per_step", sheet.whole(f"{ACTOR}.ppo_epochs"), f"{ACTOR}.ppo_epochs")
    why = "which prompts of a step share an update follows from the order of the data, which data.shuffle decides"
    sheet.ignore(why, f"{ACTOR}.shuffle", f"{ACTOR}.data_loader_seed")
    _microbatch(sheet, max(1, num_devices(sheet) // devices_of_replica))
    _log_prob_bounds(sheet)


def longest_tokens(sheet: Sheet) -> int:
    """Tokens of the longest prompt and response together."""
    lengths = ("data.max_prompt_tokens", "rollout.max_response_tokens")
    return sum(int(sheet.settings[path].value or 0) for path in lengths)


def _microbatch(sheet: Sheet, replicas: int) -> None:
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    each, all_devices = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"
    if sheet.flag(dynamic):
        sheet.set("batch.tokens_per_microbatch", sheet.whole(tokens), tokens, dynamic)
        sheet.ignore("microbatches are bounded in tokens, as use_dynamic_bsz is true", each, all_devices)
        return
    sheet.ignore("microbatches are bounded in samples, as use_dynamic_bsz is false", tokens)
    samples = sheet.whole(each)
    deciding = each
    if samples is None and sheet.has(all_devices):
        samples, deciding = max(1, (sheet.whole(all_devices) or 1) // replicas), all_devices
    sheet.ignore(f"{deciding} decides", *[key for key in (each, all_devices) if key != deciding])
    if samples is None:
        _unbounded(sheet, each, dynamic)
        return
    sheet.set("batch.samples_per_microbatch", samples, deciding, dynamic)
    sheet.set("batch.tokens_per_microbatch", samples * longest_tokens(sheet), deciding)


def _unbounded(sheet: Sheet, each: str, dynamic: str) -> None:
    """Microbatches where the update's own bound is not given: that of log-probs, or some tokens."""
    others = [f"{role}.log_prob_micro_batch_size_per_gpu" for role in (ROLLOUT, REFERENCE)]
    found = next((key for key in others if sheet.has(key)), "")
    if found:
        sheet.warn(each, f"verl refuses a command without it; here {found} bounds updates, too")
        samples = sheet.whole(found) or 1
        sheet.set("batch.samples_per_microbatch", samples, found, dynamic)
        sheet.set("batch.tokens_per_microbatch", samples * longest_tokens(sheet), found)
        return
    why = "verl refuses a command without it; here microbatches are bounded by tokens of one longest sample or more"
    sheet.warn(each, why)
    sheet.set("batch.tokens_per_microbatch", max(16384, longest_tokens(sheet)), each, dynamic)


def num_devices(sheet: Sheet) -> int:
    """Devices of all nodes."""
    return (sheet.whole("trainer.nnodes") or 1) * (sheet.whole("trainer.n_gpus_per_node") or 1)


def _log_prob_bounds(sheet: Sheet) -> None:
    why = "passes for log-probs are bounded as updates are (batch.tokens_per_microbatch); it never changes the result"
    for role in (ROLLOUT, REFERENCE):
        names = ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
        keys = [*(f"{role}.log_prob_{name}" for name in names), f"{role}.micro_batch_size"]
        sheet.ignore(why, *sheet.open(keys))


_LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
_REDUCTIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def loss_rules(sheet: Sheet) -> None:
    """The policy loss, its clipping, its reduction, the entropy bonus."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = sheet.text(key)
    if mode in _LOSSES:
        sheet.set("algorithm.policy_loss", _LOSSES[mode], key)
    else:
        sheet.refuse(key, f"the policy loss {mode!r} has no counterpart here; use one of {', '.join(_LOSSES)}")
    group = f"{ACTOR}.policy_loss"
    names = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    sheet.ignore(f"the loss {mode!r} does not use it", *(f"{group}.{name}" for name in names))
    _clipping(sheet)
    _temperatures(sheet, mode)
    _reduction(sheet)
    sheet.set("algorithm.entropy_coefficient", sheet.number(f"{ACTOR}.entropy_coeff"), f"{ACTOR}.entropy_coeff")


def _clipping(sheet: Sheet) -> None:
    both, low, high = (f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high"))
    used = []
    for path, key in (("algorithm.clip_low", low), ("algorithm.clip_high", high)):
        own = sheet.value(key) is not None
        sheet.set(path, sheet.number(key if own else both), key if own else both)
        used += [] if own else [key]
    sheet.count("algorithm.clip_low", *used)
    if not used:
        why = "clip_ratio_low and clip_ratio_high decide; both are 0.2 where they are not given, so it changes nothing"
        sheet.ignore(why, both)
        if both in sheet.given.entries and low not in sheet.given.entries and high not in sheet.given.entries:
            value = sheet.text(both)
            text = f"clip_ratio={value} alone changes nothing, in verl too: set clip_ratio_low and clip_ratio_high to {value}"
            sheet.warn(both, text)
    sheet.set("algorithm.dual_clip", sheet.number(f"{ACTOR}.clip_ratio_c"), f"{ACTOR}.clip_ratio_c")


def _temperatures(sheet: Sheet, mode: str) -> None:
    for name, path in (("tau_pos", "algorithm.tau_positive"), ("tau_neg", "algorithm.tau_negative")):
        key = f"{ACTOR}.{name}"
        if mode == "sapo":
            sheet.set(path, sheet.number(key), key)
        sheet.ignore(f"the loss {mode!r} does not use it", key)


def _reduction(sheet: Sheet) -> None:
    key, scale = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    mode = sheet.text(key)
    if mode not in _REDUCTIONS:
        sheet.refuse(key, f"the reduction {mode!r} has no counterpart here; use one of {', '.join(_REDUCTIONS)}")
        sheet.ignore(f"it belongs to {key}, which is refused", scale)
        return
    sheet.set("algorithm.reduction", mode, key)
    if mode == "seq-mean-token-sum-norm":
        constant = sheet.number(scale)
        longest = sheet.settings["rollout.max_response_tokens"].value
        keys = (scale,) if constant is not None else ("data.max_response_length", scale)
        sheet.set("algorithm.reduction_constant", float(constant or longest), *keys)
    else:
        sheet.ignore("seq-mean-token-sum-norm alone uses it", scale)


_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def divergence_rules(sheet: Sheet) -> None:
    """Where the divergence from the reference enters, its weight and its estimator."""
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    loss_keys = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    reward_keys = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    loss, reward = sheet.flag(in_loss), sheet.flag(in_reward)
    if loss and reward:
        sheet.refuse(
            in_reward, f"the divergence enters once, in the loss or in the reward; leave {in_loss} or this one"
        )
    place = "loss" if loss else "reward" if reward else "none"
    deciding = in_reward if place == "reward" else in_loss
    sheet.set("algorithm.kl", place, deciding, *(key for key in (in_loss, in_reward) if key != deciding))
    chosen = {"loss": loss_keys, "reward": reward_keys}.get(place, ())
    if chosen:
        sheet.set("algorithm.kl_coefficient", sheet.number(chosen[0]), chosen[0])
        _estimator(sheet, chosen[1])
    control, adaptive = "algorithm.kl_ctrl.type", {"kl_horizon": "horizon", "kl_target": "target_kl"}
    if place == "reward" and sheet.text(control) in ("fixed", "adaptive"):
        sheet.set("algorithm.kl_control", sheet.text(control), control)
        if sheet.text(control) == "adaptive":
            for name, key in adaptive.items():
                sheet.set(f"algorithm.{name}", sheet.number(f"algorithm.kl_ctrl.{key}"), f"algorithm.kl_ctrl.{key}")
    elif place == "reward":
        sheet.refuse(
            control, f"{sheet.text(control)!r} is no control of the divergence's weight; use fixed or adaptive"
        )
    sheet.ignore("use_kl_loss is false", *loss_keys)
    sheet.ignore("use_kl_in_reward is false", *reward_keys, control)
    sheet.ignore("an adaptive weight alone uses it", *(f"algorithm.kl_ctrl.{key}" for key in adaptive.values()))


def _estimator(sheet: Sheet, key: str) -> None:
    name = sheet.text(key)
    base = _ESTIMATORS.get(name.removesuffix("+"))
    if base is None:
        known = ", ".join(_ESTIMATORS)
        sheet.refuse(key, f"the estimator {name!r} has no counterpart here; use one of {known}, or one with +")
        return
    sheet.set("algorithm.kl_estimator", f"{base}+" if name.endswith("+") else base, key)


def precision_rules(sheet: Sheet, engine: str, block: str) -> None:
    """Arithmetic and recompute.

    Args:
        engine: ``fsdp``, ``megatron``, …
        block: the group of the engine's keys.
    """
    keys = [f"{block}.dtype", f"{block}.mixed_precision.param_dtype", f"{block}.mixed_precision"]
    given = [key for key in keys if isinstance(sheet.value(key), str)]
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
    sheet.set("model.dtype", "auto")
    for key in given:
        name = sheet.text(key)
        if name not in names:
            sheet.refuse(key, f"the arithmetic {name!r} is not offered; use bfloat16 or float32")
        elif key == given[0]:
            sheet.set("model.dtype", names[name], key)
    sheet.ignore("the first of the engine's keys for it decides", *keys)
    why = "master weights and gradients are always float32 here, which is at least as exact"
    more = ("model_dtype", "mixed_precision.reduce_dtype", "mixed_precision.buffer_dtype")
    sheet.ignore(why, *(f"{block}.{name}" for name in more))
    _recompute(sheet, engine, block)


def _recompute(sheet: Sheet, engine: str, block: str) -> None:
    key, granularity = "actor_rollout_ref.model.enable_gradient_checkpointing", "override_transformer_config.recompute"
    megatron = [name for name in sheet.given.entries if name.startswith(f"{block}.{granularity}_")]
    if engine != "megatron":
        sheet.set("model.gradient_checkpointing", sheet.flag(key), key)
        return
    chosen = sheet.value(f"{block}.{granularity}_granularity")
    value = {"full": True, "selective": "auto"}.get(str(chosen), False)
    sheet.set("model.gradient_checkpointing", value, f"{block}.{granularity}_granularity")
    sheet.ignore("every layer is recomputed, or none", *megatron)
    sheet.ignore("with Megatron override_transformer_config.recompute_granularity decides", key)
