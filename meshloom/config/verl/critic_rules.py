"""verl's ``critic`` keys.

Owns: their meaning here. Always holds: the critic learns in the actor's updates, with its reduction and in its arithmetic; a
key that would have it otherwise is refused.
"""

from meshloom.config.verl import parallel_rules
from meshloom.config.verl.actor_rules import ACTOR, longest_tokens
from meshloom.config.verl.optimizer_rules import DEFAULT_SHAPES, optimizer_rules
from meshloom.config.verl.sheet import Sheet

CRITIC = parallel_rules.CRITIC
_SAME = ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode", "loss_scale_factor")
"""Keys that are the actor's where they are not given."""


def critic_rules(sheet: Sheet, where: str, *, updates_per_step: int, steps: int | None) -> None:
    """The critic of ``gae``: its folder, optimizer, loss, microbatches, cut and offload.

    Args:
        sheet: of the translation.
        where: folder for what is offloaded; empty: into the host's memory.
        updates_per_step: optimizer updates of a step.
        steps: of the whole run, as far as known.
    """
    warmup, enable = "trainer.critic_warmup", f"{CRITIC}.enable"
    gae, asked = sheet.text("algorithm.adv_estimator") == "gae", sheet.value(enable)
    if gae and asked is False:
        sheet.refuse(enable, "gae asks a critic for values; set it to null, or choose another algorithm.adv_estimator")
    if not gae:
        if sheet.flag(enable):
            sheet.refuse(enable, "the estimator asks no critic for values; set it to null, or the estimator to gae")
        names = [key for key in sheet.open() if key.startswith((f"{CRITIC}.", "trainer.max_critic_ckpt"))]
        sheet.ignore("the estimator needs no critic", *names)
        if (sheet.whole(warmup, 0) or 0) > 1:
            sheet.refuse(
                warmup, "every step updates the policy, as there is no critic that learns before it; set it to 0"
            )
        sheet.ignore("every step updates the policy, as the estimator needs no critic", warmup)
        return
    sheet.ignore("gae has a critic", enable)
    sheet.set("algorithm.lam", sheet.number("algorithm.lam", 1.0), "algorithm.lam")
    _warmup(sheet, warmup)
    engine = parallel_rules.engine_of(sheet, "critic")
    _model(sheet)
    _same_as_actor(sheet)
    if engine in DEFAULT_SHAPES:
        name, shape = DEFAULT_SHAPES[engine]
        sheet.defaults = {**sheet.defaults, f"{CRITIC}.optim.{name}": shape}
    optimizer_rules(
        sheet,
        f"{CRITIC}.optim",
        engine,
        updates_per_step=updates_per_step,
        steps=steps,
        target="critic.optimizer",
    )
    clip = f"{CRITIC}.cliprange_value"
    bound = sheet.number(clip)
    sheet.set("critic.value_clip", bound if bound and bound > 0 else None, clip)
    _microbatch(sheet)
    parallel_rules.role_rules(sheet, "critic", where)
    _rest(sheet)


def _warmup(sheet: Sheet, key: str) -> None:
    """Steps are counted from 1 there, and the policy is updated from the step of this number on."""
    first = sheet.whole(key, 0) or 0
    sheet.set("critic.warmup_steps", max(0, first - 1), key)
    if first > 0:
        text = (
            f"verl updates the policy from step {max(1, first)} on, so the critic learns alone for {max(0, first - 1)}"
        )
        sheet.warn(key, text)


def _model(sheet: Sheet) -> None:
    path = f"{CRITIC}.model.path"
    given = sheet.has(path)
    sheet.set("critic.model", sheet.text(path) if given else None, path)
    if not given:
        sheet.warn(path, "verl's default is a folder of its authors; here the critic begins as the actor does")
    for name in ("hf_config_path", "tokenizer_path"):
        key = f"{CRITIC}.model.{name}"
        if sheet.has(key) and sheet.text(key) not in (sheet.text(path), sheet.text("actor_rollout_ref.model.path")):
            sheet.refuse(key, "configuration and tokenizer are read from the models' folders; put those files there")
        sheet.ignore("it is the model's folder", key)
    for name in ("lora_rank", "lora.rank"):
        if (sheet.whole(f"{CRITIC}.model.{name}", 0) or 0) > 0:
            sheet.refuse(f"{CRITIC}.model.{name}", "a critic is trained whole, without adapters; set it to 0")
    names = [key for key in sheet.open() if key.startswith((f"{CRITIC}.model.lora", f"{CRITIC}.model.target_modules"))]
    sheet.ignore("the whole critic is trained", *names, f"{CRITIC}.model.exclude_modules")
    recompute = f"{CRITIC}.model.enable_gradient_checkpointing"
    sheet.ignore("layers are recomputed as the actor's are (model.gradient_checkpointing)", recompute)
    sheet.ignore("rows are rendered with the actor's tokenizer", f"{CRITIC}.model.custom_chat_template")
    for key in [key for key in sheet.open() if key.startswith(f"{CRITIC}.model.override_config.")]:
        if key.endswith((".attn_implementation", "freeze_moe_router")) or "dropout" in key or not sheet.has(key):
            sheet.ignore("the actor's choice holds for the critic; there is no dropout", key)
        else:
            sheet.refuse(key, "config.json of the critic's folder decides; change it there and leave this out")


def _same_as_actor(sheet: Sheet) -> None:
    for name in _SAME:
        key, actors = f"{CRITIC}.{name}", f"{ACTOR}.{name}"
        if sheet.has(key) and sheet.value(key) != sheet.value(actors):
            text = f"the critic learns in the actor's updates, whose {name} is {sheet.text(actors) or 'not set'}"
            sheet.refuse(key, f"{text}; give it that value, or leave it out")
        sheet.ignore(f"it is {actors}", key)


def _microbatch(sheet: Sheet) -> None:
    """A bound on memory alone: in tokens, or in samples as tokens of the longest ones."""
    path, dynamic, tokens = (
        "critic.tokens_per_microbatch",
        f"{CRITIC}.use_dynamic_bsz",
        f"{CRITIC}.ppo_max_token_len_per_gpu",
    )
    each, all_devices = f"{CRITIC}.ppo_micro_batch_size_per_gpu", f"{CRITIC}.ppo_micro_batch_size"
    is_dynamic = sheet.flag(dynamic) if dynamic in sheet.given.entries else sheet.flag(f"{ACTOR}.use_dynamic_bsz")
    samples = sheet.whole(each)
    if is_dynamic:
        sheet.set(path, sheet.whole(tokens, 32768), tokens, dynamic)
    elif samples is not None:
        sheet.set(path, samples * longest_tokens(sheet), each, dynamic)
    else:
        sheet.set(path, None, dynamic)
    sheet.ignore("it bounds memory alone; critic.tokens_per_microbatch does so here", tokens, each, all_devices)
    forward = ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
    why = "passes for values are bounded as the critic's updates are; it never changes the result"
    sheet.ignore(why, *(f"{CRITIC}.forward_{name}" for name in forward))


def _rest(sheet: Sheet) -> None:
    why = "which prompts of a step share an update is as for the actor"
    sheet.ignore(why, f"{CRITIC}.shuffle", f"{CRITIC}.data_loader_seed", f"{CRITIC}.rollout_n")
    quiet = ("profiler", "checkpoint.", "nccl_timeout", "use_remove_padding", "load_weight", "kl_ctrl")
    names = [key for key in sheet.open() if key.startswith(f"{CRITIC}.") and any(part in key for part in quiet)]
    sheet.ignore("it decides nothing that is learned", *names)
    sheet.ignore("a checkpoint holds actor and critic together", "trainer.max_critic_ckpt_to_keep")
    blocks = [key for key in sheet.open() if key.startswith(f"{CRITIC}.") and key.endswith((".dtype", ".param_dtype"))]
    sheet.ignore("the critic computes in the actor's arithmetic (model.dtype)", *blocks)
    more = [key for key in sheet.open() if key.startswith(f"{CRITIC}.") and key.endswith((".model_dtype", "_dtype"))]
    sheet.ignore("master weights and gradients are always float32 here, which is at least as exact", *more)
