"""verl's keys of the penalty for overlong responses and of reward models.

Owns: their meaning here. Always holds: a key that would change a reward and has no counterpart is refused, never dropped.
"""

from meshloom.config.verl.sheet import Sheet

BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
_LONGEST = "reward.reward_kwargs.max_resp_len"
_MODEL, _BEFORE = "reward.reward_model", "reward_model"
_COMPONENT = "reward.components.reward_model"


def overlong_rules(sheet: Sheet) -> bool:
    """The ``dapo`` manager's penalty, if it is on; whether it is."""
    if not sheet.flag(f"{BUFFER}.enable"):
        return False
    length = sheet.whole(f"{BUFFER}.len")
    if not length or length < 1:
        sheet.refuse(f"{BUFFER}.len", "the penalty needs a buffer of 1 token or more; set it, or set enable to False")
        return True
    sheet.set("reward.overlong.buffer_tokens", length, f"{BUFFER}.len", f"{BUFFER}.enable")
    factor = sheet.number(f"{BUFFER}.penalty_factor", 1.0)
    sheet.set("reward.overlong.factor", factor, f"{BUFFER}.penalty_factor")
    if sheet.has(_LONGEST):
        sheet.set("reward.overlong.max_tokens", sheet.whole(_LONGEST), _LONGEST)
    sheet.set("validation.success_component", "function", f"{BUFFER}.enable")
    sheet.ignore("it is logged always, as reward/overlong", f"{BUFFER}.log")
    return True


def scorer_rules(sheet: Sheet, function: str) -> None:
    """A reward model, whose score is then the reward.

    Args:
        sheet: of the command.
        function: key that names a function of the user.
    """
    enable, path = f"{_MODEL}.enable", f"{_MODEL}.model_path"
    names = [key for key in sheet.given.entries if key.startswith((f"{_MODEL}.", f"{_BEFORE}."))]
    if not sheet.flag(enable):
        sheet.ignore("no reward model is used", *names)
        return
    if not sheet.has(path):
        sheet.refuse(path, "name the folder of the reward model, a sequence classifier with one label")
        sheet.ignore(f"it belongs to {path}, which is missing", *(key for key in names if key != path))
        return
    if sheet.has(function):
        text = "a function that asks a reward model is not called; leave one of both out, or weigh them as reward.components"
        sheet.refuse(function, text)
    sheet.set(f"{_COMPONENT}.model.path", sheet.value(path), path, enable)
    budget, longest = f"{_BEFORE}.forward_max_token_len_per_gpu", f"{_BEFORE}.max_length"
    if sheet.has(budget):
        sheet.set(f"{_COMPONENT}.model.tokens_per_batch", sheet.whole(budget), budget)
    if sheet.has(longest):
        sheet.set(f"{_COMPONENT}.model.max_tokens", sheet.whole(longest), longest)
        sheet.set(f"{_COMPONENT}.model.too_long", "truncate", longest)
    offload = f"{_BEFORE}.model.fsdp_config.param_offload"
    if sheet.flag(offload):
        sheet.set("offload.reward.parameters", "host", offload)
    _pool(sheet)
    quiet = "the model is asked in batches of like length, by transformers' own pass, with its own tokenizer"
    sheet.ignore(quiet, *sheet.open(names))


def _pool(sheet: Sheet) -> None:
    """Devices of its own, which verl counts and we name."""
    pool = f"{_MODEL}.enable_resource_pool"
    if sheet.flag(pool):
        sheet.refuse(pool, "name the model's devices: placement.reward=[node1:0] in front of --, and set this to False")
    why = f"it belongs to {pool}, which is refused" if pool in sheet.refused else "the model shares the run's devices"
    sheet.ignore(why, f"{_MODEL}.n_gpus_per_node", f"{_MODEL}.nnodes")
