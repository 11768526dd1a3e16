"""verl's keys of the optimizer.

Owns: their meaning here. Always holds: lengths of the schedule are counted in optimizer updates here and in steps there.
"""

from meshloom.config.verl.sheet import Sheet

_SHAPES = {"megatron": "lr_decay_style", "torchtitan": "decay_type"}
_FLOORS = {"megatron": "min_lr", "torchtitan": "min_lr_factor", "veomni": "lr_min"}
DEFAULT_SHAPES = {
    "automodel": ("lr_scheduler_type", "cosine"),
    "veomni": ("lr_scheduler_type", "cosine"),
    "torchtitan": ("decay_type", "linear"),
}
"""Key and value of the schedule, for engines whose default is not a constant rate."""


def optimizer_rules(
    sheet: Sheet, group: str, engine: str, *, updates_per_step: int, steps: int | None, target: str = "optimizer"
) -> None:
    """AdamW, its rate and its schedule.

    Args:
        group: the group of the optimizer's keys.
        engine: ``fsdp``, ``megatron``, …; they name the schedule differently.
        updates_per_step: optimizer updates of one step of verl's schedule.
        steps: steps of the whole run, as far as known.
        target: our group of settings.
    """
    sheet.set(f"{target}.lr", sheet.number(f"{group}.lr"), f"{group}.lr")
    _betas(sheet, target, f"{group}.betas")
    sheet.set(f"{target}.eps", sheet.number(f"{group}.eps"), f"{group}.eps")
    sheet.set(f"{target}.weight_decay", sheet.number(f"{group}.weight_decay"), f"{group}.weight_decay")
    if f"{group}.weight_decay" in sheet.given.entries and sheet.number(f"{group}.weight_decay"):
        text = "weight decay acts on matrices only, not on biases, norms and embeddings; verl's acts on everything"
        sheet.warn(f"{group}.weight_decay", text)
    clip = sheet.number(f"{group}.clip_grad")
    sheet.set(f"{target}.max_grad_norm", clip if clip and clip > 0 else None, f"{group}.clip_grad")
    _kind(sheet, group)
    _schedule(sheet, target, group, engine)
    _warmup(sheet, target, group, updates_per_step, steps)
    _engine_details(sheet, target, group)


def _betas(sheet: Sheet, target: str, key: str) -> None:
    value = sheet.value(key)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value):
        sheet.set(f"{target}.betas", [float(one) for one in value], key)
    else:
        sheet.refuse(key, "two numbers in a list are expected, such as [0.9,0.999]")


def _kind(sheet: Sheet, group: str) -> None:
    for name in ("optimizer", "name"):
        kind = sheet.text(f"{group}.{name}", "AdamW")
        if kind.lower() not in ("adamw", "adam", "fusedadam"):
            sheet.refuse(f"{group}.{name}", f"the optimizer {kind!r} is not offered; AdamW is")
        sheet.ignore("AdamW, on float32 master weights", f"{group}.{name}")
    implementation = sheet.text(f"{group}.optimizer_impl", "torch.optim")
    if implementation != "torch.optim" and not implementation.endswith("fused_adam"):
        text = f"optimizers of {implementation} keep their moments in fewer bits; here they are float32"
        sheet.refuse(f"{group}.optimizer_impl", f"{text}; set it to torch.optim")
    sheet.ignore("AdamW, on float32 master weights", f"{group}.optimizer_impl")


def _schedule(sheet: Sheet, target: str, group: str, engine: str) -> None:
    deciding = f"{group}.{_SHAPES.get(engine, 'lr_scheduler_type')}"
    shape = sheet.text(deciding) or "constant"
    if shape not in ("constant", "linear", "cosine"):
        sheet.refuse(deciding, f"the schedule {shape!r} is not offered; use constant, linear or cosine")
        shape = "constant"
    sheet.set(f"{target}.schedule", shape, deciding)
    why = f"the engine {engine!r} does not read it"
    sheet.ignore(why, *(f"{group}.{name}" for name in ("lr_scheduler_type", *_SHAPES.values())))
    floors = [f"{group}.{name}" for name in ("min_lr_ratio", *_FLOORS.values())]
    if shape == "constant":
        sheet.ignore("a constant rate does not fall", *floors)
    else:
        _floor(sheet, target, group, _FLOORS.get(engine, "min_lr_ratio"))
        cycles = sheet.number(f"{group}.num_cycles", 0.5)
        if shape == "cosine" and cycles != 0.5:
            sheet.refuse(f"{group}.num_cycles", "the cosine falls once, which is half a cycle; set it to 0.5")
    sheet.ignore(why, *floors)
    sheet.ignore("half a cycle: the rate falls once", f"{group}.num_cycles")


def _floor(sheet: Sheet, target: str, group: str, name: str) -> None:
    key = f"{group}.{name}"
    value = sheet.number(key, 0.0) or 0.0
    if name in ("min_lr", "lr_min"):
        value = value / (sheet.number(f"{group}.lr") or 1.0)
    sheet.set(f"{target}.min_lr_ratio", value, key)


def _warmup(sheet: Sheet, target: str, group: str, updates_per_step: int, steps: int | None) -> None:
    count, ratio = f"{group}.lr_warmup_steps", f"{group}.lr_warmup_steps_ratio"
    given, share = sheet.whole(count), sheet.number(ratio) or 0.0
    if given is not None and given > 0:
        sheet.set(f"{target}.warmup_updates", given * updates_per_step, count)
        if updates_per_step > 1:
            text = f"{given} steps of {updates_per_step} updates: the rate moves once a step there, once an update here"
            sheet.warn(count, text)
        sheet.ignore(f"{count} decides", ratio)
        return
    keys = (ratio, count) if share else (count, ratio)
    if share and steps is None:
        text = "how many steps the run has is not known, so neither is its share; give trainer.total_training_steps"
        sheet.refuse(ratio, f"{text}, or {count}")
        sheet.ignore(f"{ratio} decides", count)
        return
    sheet.set(f"{target}.warmup_updates", int(share * (steps or 0)) * updates_per_step, *keys)


_DETAILS = {
    "total_training_steps": "the schedule spreads over the run's own updates",
    "zero_indexed_step": "the rate of the first update follows from optimizer.warmup_updates",
    "use_precision_aware_optimizer": "moments are float32, which is at least as exact",
    "use_layer_wise_distributed_optimizer": "it is about where moments are",
    "use_checkpoint_opt_param_scheduler": "a resumed run goes on with its own schedule",
    "main_grads_dtype": "gradients are float32, which is at least as exact",
    "exp_avg_dtype": "moments are float32, which is at least as exact",
    "exp_avg_sq_dtype": "moments are float32, which is at least as exact",
    "master_weights": "master weights are always float32",
    "master_weight_dtype": "master weights are always float32",
    "store_param_remainders": "master weights are always float32",
    "lr_wsd_decay_style": "the schedule has no such part",
    "lr_wsd_decay_steps": "the schedule has no such part",
}
_MUST_BE = {
    "lr_warmup_init": (0, "the rate rises from 0"),
    "lr_start": (0, "the rate rises from 0"),
    "init_lr_ratio": (0, "the rate rises from 0"),
    "lr_decay_steps": (None, "the rate falls over the whole run"),
    "lr_decay_ratio": (1, "the rate falls over the whole run"),
    "weight_decay_incr_style": ("constant", "weight decay is constant"),
    "wd_incr_style": ("constant", "weight decay is constant"),
}
OFFLOADS = ("optimizer_cpu_offload", "optimizer_offload_fraction")
"""Arguments of Megatron's optimizer that the rules of offload read."""
_ARGUMENTS = {
    "overlap_cpu_optimizer_d2h_h2d": "it hides the time of copies",
    "use_precision_aware_optimizer": "moments are float32, which is at least as exact",
    "fused": "it is about speed",
    "foreach": "it is about speed",
}


def _engine_details(sheet: Sheet, target: str, group: str) -> None:
    for name, reason in _DETAILS.items():
        sheet.ignore(reason, f"{group}.{name}")
    for name, (allowed, reason) in _MUST_BE.items():
        key = f"{group}.{name}"
        flat = name.startswith("lr_decay") and sheet.settings[f"{target}.schedule"].value == "constant"
        if sheet.has(key) and sheet.value(key) != allowed and not flat:
            sheet.refuse(key, f"{reason} here; set it to {'null' if allowed is None else allowed}")
        sheet.ignore(reason, key)
    for key in sheet.open():
        if key.startswith(f"{group}.muon_"):
            sheet.ignore("the optimizer Muon alone uses it", key)
        elif key.startswith(f"{group}.override_optimizer_config"):
            _argument(sheet, target, key)


def _argument(sheet: Sheet, target: str, key: str) -> None:
    name = key.rpartition(".")[2]
    if name in OFFLOADS:
        return
    if name == "eps" and sheet.has(key):
        sheet.set(f"{target}.eps", sheet.number(key), key)
    elif name in _ARGUMENTS or not sheet.value(key):
        sheet.ignore(_ARGUMENTS.get(name, "it changes nothing"), key)
    else:
        sheet.refuse(key, "further arguments of the optimizer are not passed on; leave it out")
