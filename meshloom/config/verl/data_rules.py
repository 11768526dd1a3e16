"""verl's ``data`` and ``reward`` keys, and the model's folder.

Owns: their meaning here. Always holds: what changes the prompts, the answers or the score is translated or refused.
"""

from meshloom.config.names import RewardForm
from meshloom.config.verl.reward_rules import BUFFER, overlong_rules, scorer_rules
from meshloom.config.verl.sheet import Native, Sheet

MODEL = "actor_rollout_ref.model"
_FUNCTION = "reward.custom_reward_function"
_REWARD_DEADLINE_S = 300.0
"""verl's own functions may take any time; one that asks a model takes more than our default."""


def data_rules(sheet: Sheet) -> None:
    """Files, columns, lengths and order of the prompts."""
    _files(sheet)
    template_rules(sheet)
    sheet.set("data.prompt_column", sheet.text("data.prompt_key"), "data.prompt_key")
    sheet.set("batch.prompts_per_step", sheet.whole("data.train_batch_size"), "data.train_batch_size")
    _gen_batch(sheet)
    _lengths(sheet)
    _overlong(sheet)
    sheet.set("data.shuffle", sheet.flag("data.shuffle"), "data.shuffle")
    if sheet.has("data.seed"):
        sheet.set("seed", sheet.whole("data.seed"), "data.seed")
    sheet.ignore("verl then draws its order by chance; here it follows from the setting seed", "data.seed")


def _files(sheet: Sheet) -> None:
    for name, short in (("train", "train"), ("validation", "val")):
        files, rows = f"data.{short}_files", f"data.{short}_max_samples"
        if not sheet.texts(files):
            sheet.set(f"data.{name}", None, files)
            sheet.ignore("there are no such rows", rows)
            continue
        sheet.set(f"data.{name}.files", sheet.texts(files), files)
        most = sheet.whole(rows)
        sheet.set(f"data.{name}.max_rows", most if most and most > 0 else None, rows)
        if most and most > 0 and (name == "validation" or sheet.flag("data.shuffle")):
            sheet.warn(rows, f"the first {most} rows are used; verl draws {most} of them when it shuffles")


def template_rules(sheet: Sheet) -> None:
    """Arguments of the chat template."""
    group = "data.apply_chat_template_kwargs"
    for key in _keys(sheet, group):
        name, value = key.removeprefix(group).lstrip("."), sheet.value(key)
        if isinstance(value, str | int | float) and name and "." not in name:
            sheet.set(f"data.chat_template_arguments.{name}", value, key)
        elif sheet.value(key) not in (None, {}):
            sheet.refuse(key, "an argument of the chat template is one text, number, true or false here; leave it out")
        sheet.ignore("it gives the template nothing", key)


def _gen_batch(sheet: Sheet) -> None:
    key = "data.gen_batch_size"
    if sheet.has(key) and sheet.flag("algorithm.filter_groups.enable"):
        sheet.set("algorithm.filter_groups.prompts_per_round", sheet.whole(key), key)
    elif sheet.has(key) and sheet.value(key) != sheet.value("data.train_batch_size"):
        why = "without algorithm.filter_groups.enable a step generates its own prompts only"
        sheet.refuse(key, f"{why}; leave it out, or set it to data.train_batch_size")
    sheet.ignore("a step generates data.train_batch_size prompts", key)


def _lengths(sheet: Sheet) -> None:
    """Longest prompt and response; the rollout's own keys win over those of the data, as they do for verl's engine."""
    pairs = (
        ("data.max_prompt_tokens", "data.max_prompt_length", "actor_rollout_ref.rollout.prompt_length"),
        ("rollout.max_response_tokens", "data.max_response_length", "actor_rollout_ref.rollout.response_length"),
    )
    for path, key, own in pairs:
        if sheet.has(own) and sheet.value(own) != sheet.value(key):
            sheet.set(path, sheet.whole(own), own)
            sheet.ignore(f"{own}={sheet.value(own)} wins in generation", key)
        else:
            sheet.set(path, sheet.whole(key), key, own)


def _overlong(sheet: Sheet) -> None:
    drop, cut = "data.filter_overlong_prompts", "data.truncation"
    if sheet.flag(drop):
        sheet.set("data.overlong_prompts", "drop", drop)
        sheet.ignore("longer prompts are left out, so there is nothing to cut", cut)
        return
    sheet.set("data.overlong_prompts", "error", cut, drop)
    if sheet.text(cut) not in ("error", "left", "right", "middle"):
        sheet.refuse(cut, f"{sheet.text(cut)!r} is none of error, left, right, middle")
    elif sheet.text(cut) != "error":
        text = f"verl cuts longer prompts ({sheet.text(cut)}); here a longer prompt is an error that names its row"
        sheet.warn(cut, f"{text}; data.filter_overlong_prompts=True leaves such rows out")


def model_rules(sheet: Sheet, model: str = MODEL) -> None:
    """The model's folder, its adapters, its attention kernel."""
    sheet.set("model.path", sheet.text(f"{model}.path"), f"{model}.path")
    for name in ("hf_config_path", "tokenizer_path"):
        key = f"{model}.{name}"
        if sheet.has(key) and sheet.text(key) != sheet.text(f"{model}.path"):
            sheet.refuse(key, "configuration and tokenizer are read from the model's folder; put those files there")
        sheet.ignore("it is the model's folder", key)
    _adapters(sheet, model)
    _overrides(sheet, f"{model}.override_config")


_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
"""Megatron's names of layers, in those of a Hugging Face folder."""
_ADAPTERS = {
    "type": ("lora", "canonical_lora", "vlm_lora"),
    "lora_A_init_method": ("kaiming", "xavier"),
    "lora_B_init_method": ("zero",),
}
"""How adapters begin: peft's own way, which is near each of these."""


def _layers_of_megatron(names: list[str]) -> list[str]:
    """The layers that Megatron's names mean, all of them being every linear layer; empty if a name is another."""
    if set(names) == set(_LAYERS):
        return ["all-linear"]
    known = all(name in _LAYERS for name in names)
    return [layer for name in names for layer in _LAYERS[name]] if known else []


def _adapters(sheet: Sheet, model: str) -> None:
    rank_key, alpha_key, modules_key = (f"{model}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules"))
    more = [key for key in sheet.given.entries if key.startswith(f"{model}.lora.")]
    rank = sheet.whole(rank_key)
    if not rank or rank < 0:
        sheet.set("model.lora", None, rank_key)
        why = f"the whole model is trained, as {rank_key} is 0"
        sheet.ignore(why, alpha_key, modules_key, f"{model}.exclude_modules", *more)
        return
    sheet.set("model.lora.rank", rank, rank_key)
    sheet.set("model.lora.alpha", sheet.number(alpha_key), alpha_key)
    own = f"{model}.lora.target_modules"
    if sheet.has(own) and (layers := _layers_of_megatron(sheet.texts(own))):
        sheet.set("model.lora.target_modules", layers, own)
        sheet.ignore(f"{own} decides", modules_key)
    else:
        sheet.set("model.lora.target_modules", sheet.texts(modules_key), modules_key)
    sheet.set("model.lora.dropout", sheet.number(f"{model}.lora.dropout", 0.0), f"{model}.lora.dropout")
    harmless = ("merge", "dtype", "dropout_position", "a2a_experimental", "fully_sharded_loras")
    for key in sheet.open(more):
        name = key.rpartition(".")[2]
        if name in harmless or name.startswith("freeze_") or not sheet.has(key):
            sheet.ignore("the base is frozen and adapters are peft's own", key)
        elif name != "dropout" and sheet.value(key) not in _ADAPTERS.get(name, ([],)):
            sheet.refuse(key, f"adapters have no such choice here; use {modules_key} and {rank_key}")
        sheet.ignore("as adapters are made here", key) if name != "dropout" else None
    if sheet.value(f"{model}.exclude_modules"):
        sheet.refuse(f"{model}.exclude_modules", f"name the layers that get an adapter in {modules_key} instead")
    sheet.ignore("no layer is left out", f"{model}.exclude_modules")


_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "auto", "sdpa": "sdpa", "flex_attention": "auto"}


def _overrides(sheet: Sheet, group: str) -> None:
    attention = f"{group}.attn_implementation"
    if sheet.has(attention):
        kernel = _ATTENTION.get(sheet.text(attention), "auto")
        sheet.set("model.attention", kernel, attention)
    for key in [key for key in sheet.given.entries if key.startswith(f"{group}.") and key != attention]:
        if key.endswith("freeze_moe_router"):
            continue
        if sheet.has(key) and not ("drop" in key and sheet.value(key) == 0):
            name = key.removeprefix(f"{group}.")
            sheet.refuse(key, f"config.json is read as it is; write {name} into a copy of the model's folder")
        sheet.ignore("it changes nothing", key)


def reward_rules(sheet: Sheet) -> None:
    """The function that scores; what the default of a data source is, is known only with the rows."""
    path, name = f"{_FUNCTION}.path", f"{_FUNCTION}.name"
    if sheet.has(path):
        function = sheet.text(name) or "compute_score"
        sheet.set("reward.function", f"{sheet.text(path)}:{function}", path, name)
        sheet.settings["reward.deadline_s"] = Native(value=_REWARD_DEADLINE_S, origin="verl's default is none")
        _function_arguments(sheet)
    else:
        why = "it is read only with reward.custom_reward_function.path"
        sheet.ignore(why, name, path, *_keys(sheet, f"{_FUNCTION}.reward_kwargs"))
    if "reward.num_workers" in sheet.given.entries and sheet.whole("reward.num_workers"):
        sheet.set("reward.workers", sheet.whole("reward.num_workers"), "reward.num_workers")
    sheet.ignore("as many as there are processors", "reward.num_workers")
    _manager(sheet)
    _judges(sheet)


def _keys(sheet: Sheet, group: str) -> list[str]:
    return [key for key in sheet.given.entries if key == group or key.startswith(f"{group}.")]


def _function_arguments(sheet: Sheet) -> None:
    for key in _keys(sheet, f"{_FUNCTION}.reward_kwargs"):
        name = key.removeprefix(f"{_FUNCTION}.reward_kwargs").lstrip(".")
        if isinstance(sheet.value(key), (list, dict)) or "." in name or not name:
            sheet.refuse(key, "an argument of the function is one text or number here; read others from a file there")
        else:
            sheet.set(f"reward.kwargs.{name}", sheet.value(key), key)


_MANAGERS = {
    "naive": "each response is scored by its function",
    "prime": "responses are scored side by side, each by its function",
    "dapo": "without its length penalty it scores as the naive one does",
    "batch": "without a function of the user's responses are scored one by one",
    "rate_limited": "responses are scored side by side, each by its function; a limit of calls is the function's own",
}


def _manager(sheet: Sheet) -> None:
    key = "reward.reward_manager.name"
    manager = sheet.text(key) or "naive"
    if manager == "batch" and sheet.has(f"{_FUNCTION}.path"):
        sheet.set("reward.form", str(RewardForm.VERL_BATCH), key)
        sheet.warn(
            key, "the function is called with the samples of one prompt at a time, not with those of a whole batch"
        )
    else:
        sheet.ignore(_MANAGERS.get(manager, ""), key)
    extra = _keys(sheet, "reward.reward_kwargs")
    if manager not in _MANAGERS:
        forms = f"managers that are understood: {', '.join(_MANAGERS)}"
        sheet.refuse(key, f"the manager {manager!r} has no counterpart; score responses in a function; {forms}")
    used = overlong_rules(sheet) if manager == "dapo" else False
    why = (
        "the manager's length penalty is off" if manager == "dapo" else f"the manager {manager!r} has no such argument"
    )
    if used:
        why = "it is not part of the penalty"
    harmless = {f"{BUFFER}.{name}" for name in ("enable", "len", "penalty_factor", "log")}
    extra = sheet.open(extra)
    for name in extra:
        if name in harmless or name == "reward.reward_kwargs.max_resp_len" or not sheet.has(name):
            sheet.ignore(why, name)
        else:
            sheet.refuse(name, "arguments of verl's reward managers are not read; put it into a reward function")
    if sheet.text("reward.reward_manager.source", "register") != "register":
        sheet.refuse("reward.reward_manager.source", "managers of your own are not run; write a reward function")
    sheet.ignore("reward managers are not looked up", *_keys(sheet, "reward.reward_manager"))


def _judges(sheet: Sheet) -> None:
    """Models and services that score."""
    url = "reward.sandbox_fusion.url"
    scorer_rules(sheet, f"{_FUNCTION}.path")
    if sheet.has(url):
        what = "programs are run on this machine, not sent to a service"
        fix = "leave it out and set reward.function=code reward.code.enabled=true in front of --"
        sheet.refuse(url, f"{what}; {fix}, or call the service from a reward function of your own")
    sheet.ignore("no sandbox is called", *_keys(sheet, "reward.sandbox_fusion"))
