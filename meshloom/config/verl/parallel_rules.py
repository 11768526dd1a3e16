"""verl's keys of devices: how many there are, how a role's model is cut, what is offloaded.

Owns: the training engines' different names for the same cuts. Always holds: training is FSDP2 with tensor, pipeline and
sequence parallelism here, whatever engine the command names; spreading experts is refused.
"""

from dataclasses import dataclass

from meshloom.config.verl.actor_rules import ACTOR, REFERENCE, num_devices
from meshloom.config.verl.sheet import Sheet

CRITIC = "critic"
ROLES = {"actor": ACTOR, "reference": REFERENCE, "critic": CRITIC}


@dataclass(frozen=True, kw_only=True)
class Names:
    """How an engine names its cuts, relative to the role; empty: it has no such cut."""

    block: str
    fsdp_size: str = ""
    tensor: str = ""
    pipeline: str = ""
    stages_per_device: str = ""
    sequence: str = ""
    experts: tuple[str, ...] = ()


_TURBO = "fsdp_config.turbo_config.distributed"
_FSDP = Names(
    block="fsdp_config",
    fsdp_size="fsdp_config.fsdp_size",
    sequence="fsdp_config.ulysses_sequence_parallel_size",
)
ENGINES = {
    "fsdp": _FSDP,
    "fsdp2": _FSDP,
    "fsdp_turbo": Names(
        block="fsdp_config",
        fsdp_size=f"{_TURBO}.fully_shard_parallel_size",
        tensor=f"{_TURBO}.tensor_parallel_size",
        sequence=f"{_TURBO}.ulysses_parallel_size",
        experts=(f"{_TURBO}.expert_parallel_size", f"{_TURBO}.expert_fully_shard_parallel_size"),
    ),
    "megatron": Names(
        block="megatron",
        tensor="megatron.tensor_model_parallel_size",
        pipeline="megatron.pipeline_model_parallel_size",
        stages_per_device="megatron.virtual_pipeline_model_parallel_size",
        sequence="megatron.context_parallel_size",
        experts=("megatron.expert_model_parallel_size", "megatron.expert_tensor_parallel_size"),
    ),
    "veomni": Names(
        block="veomni",
        fsdp_size="veomni.fsdp_size",
        sequence="veomni.ulysses_parallel_size",
        experts=("veomni.expert_parallel_size",),
    ),
    "automodel": Names(
        block="automodel",
        tensor="automodel.tp_size",
        pipeline="automodel.pp_size",
        sequence="automodel.cp_size",
        experts=("automodel.ep_size",),
    ),
    "torchtitan": Names(
        block="torchtitan",
        fsdp_size="torchtitan.data_parallel_shard_size",
        tensor="torchtitan.tensor_parallel_size",
        pipeline="torchtitan.pipeline_parallel_size",
        sequence="torchtitan.context_parallel_size",
        experts=("torchtitan.expert_parallel_size",),
    ),
}
"""verl's training engines."""

BLOCKS = ("fsdp_config", "megatron", "veomni", "torchtitan", "automodel")


def engine_of(sheet: Sheet, role: str) -> str:
    """The training engine of a role; an unknown one is refused and taken for FSDP."""
    keys = (f"{ROLES[role]}.strategy", f"{ACTOR}.strategy", "model_engine")
    for key in keys[:1] if role == "actor" else keys[:2]:
        if sheet.value(key):
            return _known_engine(sheet, key)
    return _known_engine(sheet, "model_engine")


def _known_engine(sheet: Sheet, key: str) -> str:
    name = {"dp": "fsdp", "": "fsdp", "mindspeed": "megatron"}.get(sheet.text(key), sheet.text(key))
    if name in ENGINES:
        return name
    sheet.refuse(key, f"the engine {name!r} is not known; training here is FSDP2: set it to fsdp")
    return "fsdp"


def cluster_rules(sheet: Sheet) -> None:
    """Nodes and devices, and how each role's model is cut over them."""
    sheet.set("cluster.nodes", sheet.whole("trainer.nnodes"), "trainer.nnodes")
    sheet.set("cluster.devices_per_node", sheet.whole("trainer.n_gpus_per_node"), "trainer.n_gpus_per_node")
    tensor = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    sheet.set("parallel.rollout.tensor", sheet.whole(tensor), tensor)
    if sheet.text("trainer.device", "cuda") not in ("cuda", "npu"):
        sheet.set("device", sheet.text("trainer.device"), "trainer.device")
    sheet.ignore("the first GPU there is, or the processor", "trainer.device")
    if sheet.value("actor_rollout_ref.hybrid_engine", True) is False:
        text = "roles share all devices here; with native settings placement.rollout gives generation its own"
        sheet.refuse("actor_rollout_ref.hybrid_engine", f"{text}; set it to True")
    sheet.ignore("roles share all devices", "actor_rollout_ref.hybrid_engine")


def role_rules(sheet: Sheet, role: str, where: str) -> None:
    """Cut and offload of one role.

    Args:
        role: ``actor``, ``reference`` or ``critic``.
        where: folder for what is offloaded; empty: into the host's memory.
    """
    engine = engine_of(sheet, role)
    names, prefix = ENGINES[engine], ROLES[role]
    strategy = f"{prefix}.strategy"
    sheet.count(f"parallel.{role}", strategy, *(("model_engine",) if role == "actor" else ()))
    _size(sheet, role, names)
    for cut in ("tensor", "pipeline", "stages_per_device", "sequence"):
        _cut(sheet, role, cut, getattr(names, cut), engine)
    for name in names.experts:
        expert_rule(sheet, f"{prefix}.{name}")
    _offload(sheet, role, names.block, where)
    sequence = "ulysses_sequence_parallel_size"
    unread = [f"{prefix}.{name}" for name in (sequence, f"{names.block}.{sequence}", f"{names.block}.fsdp_size")]
    sheet.ignore(f"the engine {engine!r} does not read it", *sheet.open(unread))
    if role == "reference":
        names_of_dtype = ("dtype", "model_dtype", "mixed_precision")
        kinds = tuple(f"{prefix}.{names.block}.{name}" for name in names_of_dtype)
        dtypes = [key for key in sheet.open() if key.startswith(kinds)]
        sheet.ignore("the reference computes in the actor's arithmetic (model.dtype)", *dtypes)
    for block in (block for block in BLOCKS if block != names.block):
        keys = [key for key in sheet.open() if key.startswith(f"{prefix}.{block}.")]
        sheet.ignore(f"the engine {engine!r} does not read it", *keys)


def _inherited(sheet: Sheet, role: str, name: str) -> str:
    """A role's key, or the actor's where verl's default refers to it."""
    own = f"{ROLES[role]}.{name}"
    actor = f"{ACTOR}.{name}"
    inherits = role == "reference" and not name.startswith("fsdp_config.")
    return actor if inherits and own not in sheet.given.entries else own


def _size(sheet: Sheet, role: str, names: Names) -> None:
    if not names.fsdp_size:
        sheet.set(f"parallel.{role}.fsdp_size", None, f"{ROLES[role]}.strategy", "model_engine")
        return
    key = _inherited(sheet, role, names.fsdp_size)
    size, world = sheet.whole(key, -1), num_devices(sheet)
    if size and size > world:
        text = f"{size} is more than the {world} devices there are, so the weights are cut over all of them, as in verl"
        sheet.warn(key, text)
    sheet.set(f"parallel.{role}.fsdp_size", size if size and 0 < size <= world else None, key)


def _cut(sheet: Sheet, role: str, cut: str, name: str, engine: str) -> None:
    keys = _cut_keys(sheet, role, cut, name, engine)
    sheet.set(f"parallel.{role}.{cut}", (sheet.whole(keys[0], 1) or 1) if keys else 1, *keys)


def _cut_keys(sheet: Sheet, role: str, cut: str, name: str, engine: str) -> list[str]:
    """The keys of a cut, the deciding one first."""
    keys = [_inherited(sheet, role, name)] if name else []
    if cut == "sequence" and engine in ("fsdp", "fsdp2"):
        own = _inherited(sheet, role, "ulysses_sequence_parallel_size")
        return [own, *keys] if (sheet.whole(own, 1) or 1) > 1 else [*keys, own]
    return keys


def devices_of_replica(sheet: Sheet, role: str) -> int:
    """Devices of a role that work on the same samples."""
    engine, count = engine_of(sheet, role), 1
    for cut in ("tensor", "pipeline", "sequence"):
        keys = _cut_keys(sheet, role, cut, getattr(ENGINES[engine], cut), engine)
        count *= max(1, (sheet.whole(keys[0], 1) or 1) if keys else 1)
    return count


def expert_rule(sheet: Sheet, key: str) -> None:
    """A number of devices that experts would be spread over: refused above one."""
    count = sheet.whole(key, 1)
    if count and count > 1:
        text = "experts are cut with their layers and not spread over devices (no expert parallelism)"
        sheet.refuse(key, f"{text}; set it to 1, and let fsdp_size, tensor or pipeline parallelism hold the model")
    sheet.ignore("experts are not spread over devices", key)


def _offload(sheet: Sheet, role: str, block: str, where: str) -> None:
    prefix, place = ROLES[role], "disk" if where else "host"
    everything = [f"{prefix}.{block}.offload_policy", f"{prefix}.{block}.enable_fsdp_offload"]
    everything = [key for key in everything if sheet.flag(key)]
    states = {"parameters": ["param_offload", "offload_params"], "optimizer": ["optimizer_offload"]}
    for state, names in states.items():
        keys = [f"{prefix}.{block}.{name}" for name in names]
        if sheet.has(target := f"{prefix}.{block}.offload.{_STATES[state]}.target"):
            _offload_to(sheet, f"offload.{role}.{state}", target, f"{prefix}.{block}.offload.disk.path", where)
            sheet.ignore(f"{target} decides", *keys)
            continue
        if state == "parameters" and role == "reference" and block in ("megatron", "veomni"):
            keys = [_inherited(sheet, role, f"{block}.param_offload")]
        if state == "optimizer" and role == "reference":
            sheet.ignore("the reference has no optimizer", *keys)
            continue
        if state == "optimizer":
            keys += _optimizer_arguments(sheet, prefix)
        deciding = [key for key in (*everything, *keys) if sheet.flag(key)]
        rest = [key for key in keys if key not in deciding]
        sheet.set(f"offload.{role}.{state}", place if deciding else "none", *deciding, *rest)
    if sheet.settings[f"offload.{role}.parameters"].value == "disk":
        sheet.count("offload.folder", *everything)
    reason = "gradients are where the optimizer's state is"
    sheet.ignore(reason, f"{prefix}.{block}.grad_offload", f"{prefix}.{block}.offload.grad.target")
    sheet.ignore("nothing goes to a disk", f"{prefix}.{block}.offload.disk.path")
    sheet.ignore("how much is copied at once is not set", f"{prefix}.{block}.offload.disk.chunk_size_mb")
    sheet.ignore(
        "nothing is offloaded all the time", f"{prefix}.{block}.offload_policy", f"{prefix}.{block}.cpu_offload"
    )


_STATES = {"parameters": "param", "optimizer": "optimizer"}
_PLACES = {"none": "none", "null": "none", "cpu": "host", "disk": "disk"}


def _offload_to(sheet: Sheet, path: str, target: str, folder: str, where: str) -> None:
    """A state's place by its name, and the folder of a disk."""
    place = _PLACES.get(sheet.text(target), "")
    if not place:
        sheet.refuse(target, f"{sheet.text(target)!r} is none of none, cpu, disk")
    sheet.set(path, place or "none", target)
    if place == "disk" and not where:
        if not sheet.has(folder):
            sheet.refuse(target, f"a disk needs a folder; set {folder}")
        else:
            sheet.set("offload.folder", sheet.text(folder), folder)


def _optimizer_arguments(sheet: Sheet, prefix: str) -> list[str]:
    group = f"{prefix}.optim.override_optimizer_config"
    share = sheet.number(f"{group}.optimizer_offload_fraction", 1.0)
    if share not in (None, 0.0, 1.0) and sheet.flag(f"{group}.optimizer_cpu_offload"):
        text = f"the whole state of the optimizer is offloaded, not {share} of it"
        sheet.warn(f"{group}.optimizer_offload_fraction", text)
    sheet.ignore("the optimizer's state is offloaded whole or not at all", f"{group}.optimizer_offload_fraction")
    return [f"{group}.optimizer_cpu_offload"]
