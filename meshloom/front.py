"""Settings for those who write Python: a few sizes instead of a file.

Owns: how the usual words of a trainer (data, tensor and pipeline parallelism, hybrid engine, recompute, mixed precision) become
settings. Refuses to know: devices that are there, what a run does. Always holds: what it gives is what ``load_settings`` gives
for the same values; nothing is checked against this machine.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings

_PRECISIONS = {
    True: "bfloat16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    False: "float32",
    "no": "float32",
    "fp32": "float32",
    "float32": "float32",
    "auto": "auto",
    None: "auto",
}


def get_trainer_config(
    *,
    dp_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    sp_size: int = 1,
    nodes: int = 1,
    hybrid_engine: bool = True,
    enable_recompute: bool | None = None,
    mixed_precision: bool | str | None = None,
    model: str | Path = "model",
    data: str | Path | Sequence[str | Path] = "train.jsonl",
    run_dir: str | Path = "runs/run",
    overrides: Sequence[str] = (),
) -> TrainSettings:
    """Settings of a run, as ``load_settings`` returns them.

    Args:
        dp_size: devices that the trained model is sharded over (FSDP), for each part that the other sizes make.
        tp_size: devices that a layer is split over, in training and in generation.
        pp_size: stages that the layers are split into, in training.
        sp_size: devices that a sequence is split over, in training.
        nodes: machines; they share the devices evenly.
        hybrid_engine: generate on the devices that train; otherwise on as many others.
        enable_recompute: recompute layers in the backward pass; none: where memory asks for it.
        mixed_precision: ``bf16`` or true, ``fp32`` or false; none: bfloat16 on a GPU.
        model: folder of the model.
        data: files of rows.
        run_dir: folder of the run.
        overrides: further settings, each ``a.b=value``; they win.

    Raises:
        UserError: if a size is below 1, the nodes do not share the devices evenly, the precision is unknown, or an override is
            wrong.
    """
    _check_sizes(dp_size=dp_size, tp_size=tp_size, pp_size=pp_size, sp_size=sp_size, nodes=nodes)
    trained = dp_size * tp_size * pp_size * sp_size
    devices = trained if hybrid_engine else 2 * trained
    each = _devices_of_a_node(devices, nodes)
    values = {
        "run_dir": str(run_dir),
        "model.path": str(model),
        "data.train.files": [str(name) for name in ([data] if isinstance(data, str | Path) else data)],
        "cluster.nodes": nodes,
        "cluster.devices_per_node": each,
        "model.dtype": _dtype(mixed_precision),
        "model.gradient_checkpointing": "auto" if enable_recompute is None else enable_recompute,
        "parallel.rollout.tensor": tp_size,
    }
    for role in ("actor", "reference", "critic"):
        values |= {
            f"parallel.{role}.tensor": tp_size,
            f"parallel.{role}.pipeline": pp_size,
            f"parallel.{role}.sequence": sp_size,
        }
    if not hybrid_engine:
        values |= _split_placement(trained, each, nodes)
    return load_settings(
        TrainSettings, None, [*(f"{path}={json.dumps(it)}" for path, it in values.items()), *overrides]
    )


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UserError(f"{name} is {size!r}", where="get_trainer_config", fix="give a whole number, 1 or more")


def _devices_of_a_node(devices: int, nodes: int) -> int:
    if devices % nodes:
        what = f"{devices} devices cannot be shared evenly by {nodes} nodes"
        near = " or ".join(str(count) for count in (devices // nodes * nodes, -(-devices // nodes) * nodes) if count)
        raise UserError(what, where="get_trainer_config", fix=f"choose sizes that need {near} devices, or other nodes")
    return devices // nodes


def _dtype(precision: bool | str | None) -> str:
    if precision in _PRECISIONS:
        return _PRECISIONS[precision]
    known = "bf16, fp32, true, false"
    raise UserError(f"the precision {precision!r} is not offered", where="mixed_precision", fix=f"use one of {known}")


def _split_placement(trained: int, each: int, nodes: int) -> dict[str, list[int | str]]:
    """The first devices train, the others generate."""
    names: list[int | str] = [
        index if nodes == 1 else f"node{node}:{index}" for node in range(1, nodes + 1) for index in range(each)
    ]
    roles = ("actor", "reference", "critic")
    return {f"placement.{role}": names[:trained] for role in roles} | {"placement.rollout": names[trained:]}
