"""verl's keys of supervised fine-tuning.

Owns: their meaning here. Always holds: what changes which tokens are learned is translated, warned about or refused.
"""

from meshloom.config.verl.data_rules import model_rules, template_rules
from meshloom.config.verl.optimizer_rules import DEFAULT_SHAPES, OFFLOADS, optimizer_rules
from meshloom.config.verl.parallel_rules import ENGINES, Names, expert_rule
from meshloom.config.verl.sheet import Sheet
from meshloom.config.verl.trainer_rules import known_steps, steps_of_epoch, trainer_rules

_CUTS = ("fsdp_size", "tensor", "pipeline", "stages_per_device", "sequence")


def sft_rules(sheet: Sheet, num_rows: int | None, where: str) -> None:
    """Every key of ``verl.trainer.sft_trainer`` that decides something.

    Args:
        num_rows: rows of the training data; none if not known.
    """
    _data(sheet)
    model_rules(sheet, "model")
    key = "model.enable_gradient_checkpointing"
    sheet.set("model.gradient_checkpointing", sheet.flag(key), key)
    _precision(sheet)
    _batch(sheet)
    steps = known_steps(sheet, num_rows)
    engine = sheet.text("engine.strategy") or sheet.text("engine") or "fsdp"
    _optimizer_defaults(sheet, engine)
    optimizer_rules(sheet, "optim", engine, updates_per_step=1, steps=steps)
    _devices(sheet, where)
    sheet.set("seed", sheet.whole("trainer.seed"), "trainer.seed")
    trainer_rules(sheet, steps_of_epoch(sheet, num_rows))
    # verl's fine-tuning measures nothing before the first update.
    sheet.set("validation.before_training", False)


def _optimizer_defaults(sheet: Sheet, engine: str) -> None:
    """The defaults of the group that ``optim=…`` chooses, else of the engine's."""
    group = sheet.text("optim") if sheet.text("optim") in ENGINES else engine
    if group in DEFAULT_SHAPES:
        name, shape = DEFAULT_SHAPES[group]
        sheet.defaults = {**sheet.defaults, f"optim.{name}": shape}
    if group == "automodel":
        sheet.defaults = {**sheet.defaults, "optim.lr": 1e-5, "optim.min_lr_ratio": 0.01}
        if not sheet.has("optim.init_lr_ratio"):
            sheet.warn("optim.init_lr_ratio", "the rate rises from 0 here, and from a tenth of it there")


def _data(sheet: Sheet) -> None:
    sheet.set("data.train.files", sheet.texts("data.train_files"), "data.train_files")
    _most(sheet, "data.train.max_rows", "data.train_max_samples")
    if held_out := sheet.texts("data.val_files"):
        sheet.set("data.validation.files", held_out, "data.val_files")
        _most(sheet, "data.validation.max_rows", "data.val_max_samples")
    else:
        sheet.set("data.validation", None, "data.val_files")
        sheet.ignore("there are no such rows", "data.val_max_samples")
    if sheet.has("data.prompt_key") or "data.prompt_key" in sheet.defaults and not sheet.flag("data.multiturn.enable"):
        _single_turn(sheet)
    else:
        sheet.set("data.prompt_column", sheet.text("data.messages_key"), "data.messages_key", "data.multiturn.enable")
        text = "the last message of the assistant is learned; verl learns all of its messages"
        sheet.warn("data.messages_key", f"{text}, which is the same for chats of one answer")
    _unused_columns(sheet)
    longest = sheet.whole("data.max_length") or 1
    for path in ("data.max_prompt_tokens", "data.max_response_tokens"):
        sheet.set(path, longest, "data.max_length")
    cut = "data.truncation"
    sheet.set("data.overlong_prompts", "error", cut)
    if sheet.text(cut) != "error":
        sheet.warn(
            cut,
            "verl cuts longer rows; here a prompt or response longer than data.max_length is an error that names its row",
        )


def _most(sheet: Sheet, path: str, key: str) -> None:
    rows = sheet.whole(key)
    sheet.set(path, rows if rows and rows > 0 else None, key)


def _single_turn(sheet: Sheet) -> None:
    for path, name in (("data.prompt_column", "prompt"), ("data.response_column", "response")):
        key, parts = f"data.{name}_key", f"data.{name}_dict_keys"
        column = ".".join([sheet.text(key), *sheet.texts(parts)])
        sheet.set(path, column, key, *([parts] if sheet.texts(parts) else []))
        if name == "prompt":
            sheet.count(path, "data.multiturn.enable")
        sheet.ignore("the column holds the text itself", parts)
    sheet.ignore("rows are a prompt and a response", "data.messages_key")


def _unused_columns(sheet: Sheet) -> None:
    sheet.ignore("there are no tools", "data.tools_key", "data.multiturn.max_user_turns")
    template_rules(sheet)
    why = "rows give the chat template no arguments of their own"
    sheet.ignore(why, "data.enable_thinking_key", "data.enable_thinking_default", "data.response_key")
    sheet.ignore("chats are rendered whole", "data.ignore_input_ids_mismatch", "data.multiturn.enable")
    sheet.ignore("samples are never padded here", "data.pad_mode")
    template = "data.chat_template"
    if sheet.has(template):
        sheet.refuse(template, "put it as chat_template.jinja into the model's folder; set it to null")
    sheet.ignore("it is the tokenizer's", template)


def _precision(sheet: Sheet) -> None:
    keys = ("engine.dtype", "engine.mixed_precision.param_dtype", "engine.mp_param_dtype")
    given = [key for key in keys if sheet.has(key)]
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
    sheet.set("model.dtype", "auto")
    for key in given:
        name = names.get(sheet.text(key))
        if name is None:
            sheet.refuse(key, f"the arithmetic {sheet.text(key)!r} is not offered; use bfloat16 or float32")
        else:
            sheet.set("model.dtype", name, key)
    why = "master weights and gradients are always float32 here, which is at least as exact"
    sheet.ignore(why, "engine.model_dtype", "engine.mixed_precision", "engine.mixed_precision.reduce_dtype")


def _batch(sheet: Sheet) -> None:
    sheet.set("batch.samples_per_update", sheet.whole("data.train_batch_size"), "data.train_batch_size")
    dynamic, tokens = "data.use_dynamic_bsz", "data.max_token_len_per_gpu"
    each = "data.micro_batch_size_per_gpu" if not sheet.has("data.micro_batch_size") else "data.micro_batch_size"
    longest = 2 * int(sheet.settings["data.max_prompt_tokens"].value)
    if sheet.flag(dynamic):
        sheet.set("batch.tokens_per_microbatch", max(sheet.whole(tokens) or 1, longest), tokens, dynamic)
        sheet.ignore("microbatches are bounded in tokens, as use_dynamic_bsz is true", "data.micro_batch_size")
        sheet.ignore("microbatches are bounded in tokens, as use_dynamic_bsz is true", "data.micro_batch_size_per_gpu")
        return
    samples = sheet.whole(each) or 1
    sheet.set("batch.samples_per_microbatch", samples, each, dynamic)
    sheet.set("batch.tokens_per_microbatch", samples * longest, each)
    sheet.ignore(f"{each} decides", "data.micro_batch_size_per_gpu")
    sheet.ignore("microbatches are bounded in samples, as use_dynamic_bsz is false", tokens)


_ALL_DEVICES = "the weights are sharded over all devices; it changes no number of the result"


def _devices(sheet: Sheet, where: str) -> None:
    """Nodes and devices, and how the model is cut over them: the engine's own block, without the engine's name."""
    sheet.set("cluster.nodes", sheet.whole("trainer.nnodes"), "trainer.nnodes")
    sheet.set("cluster.devices_per_node", sheet.whole("trainer.n_gpus_per_node"), "trainer.n_gpus_per_node")
    engine = sheet.text("engine.strategy") or {"dp": "fsdp", "": "fsdp"}.get(sheet.text("engine"), sheet.text("engine"))
    if engine not in ENGINES:
        key = "engine.strategy" if sheet.has("engine.strategy") else "engine"
        sheet.refuse(key, f"the engine {engine!r} is not known; set it to fsdp")
    everything = ("engine.offload_policy", "engine.cpu_offload")
    for key in (*everything, "engine.param_offload"):
        if sheet.flag(key):
            sheet.warn(key, "fine-tuning keeps its weights on the device; adapters or smaller microbatches need less")
    argument, share = (f"optim.override_optimizer_config.{name}" for name in OFFLOADS)
    away = [key for key in (*everything, "engine.optimizer_offload", argument) if sheet.flag(key)]
    sheet.set(
        "offload.actor.optimizer",
        ("disk" if where else "host") if away else "none",
        *(away or ["engine.optimizer_offload"]),
    )
    sheet.ignore("the optimizer's state is offloaded whole or not at all", argument, share)
    _cuts(sheet, ENGINES.get(engine, ENGINES["fsdp"]))
    sizes = {
        getattr(names, cut).rpartition(".")[2] for names in ENGINES.values() for cut in _CUTS if getattr(names, cut)
    }
    experts = {name.rpartition(".")[2] for names in ENGINES.values() for name in names.experts}
    offload = ("offload_policy", "cpu_offload", "param_offload", "offload_params", "optimizer_offload", "grad_offload")
    names = (*sizes, *experts, *offload, "data_parallel_size", "data_parallel_replicate_size", "strategy")
    sheet.ignore(_ALL_DEVICES, *(f"engine.{name}" for name in sorted(names)), "engine")
    sheet.ignore("the GPUs there are, or the processor", "trainer.device")


def _cuts(sheet: Sheet, names: Names) -> None:
    for cut in _CUTS:
        if not (name := getattr(names, cut).rpartition(".")[2]):
            continue
        size, whole = sheet.whole(f"engine.{name}"), cut == "fsdp_size"
        value = (size if size and size > 0 else None) if whole else size or 1
        sheet.set(f"parallel.actor.{cut}", value, f"engine.{name}")
    for name in names.experts:
        expert_rule(sheet, f"engine.{name.rpartition('.')[2]}")
