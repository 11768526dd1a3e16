"""A finished run as measurements: seconds of a usual step's parts, and the lengths of its samples.

Owns: which records count, and medians over them. Refuses to know: what the numbers are used for. Always holds: the first step
after a start is left out, as it compiles and captures; seconds of validations and checkpoints are no part of a step.
"""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.config.kinds import kind_of
from meshloom.config.load import load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.observe.records import read_metrics
from meshloom.observe.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, SETTINGS_FILE
from meshloom.plan.calibration import BESIDE, MeasuredRun, Seen
from meshloom.plan.constants import Cluster
from meshloom.plan.device_checks import lay_out
from meshloom.plan.faults import with_values
from meshloom.plan.forecast import Lengths
from meshloom.plan.hardware import Device, find_device, names_of_devices
from meshloom.plan.memory import GPU, trainable_parameters
from meshloom.plan.meshes import Divisible
from meshloom.plan.model_folder import ModelFolder, read_model_folder
from meshloom.plan.parameters import UnknownFamily, count_parameters
from meshloom.plan.placement import Role, devices_of_machine
from meshloom.plan.reward_time import scores_meanwhile
from meshloom.plan.sft_devices import lay_out_sft

MACHINE_KEY = "machine"
"""In the plan's file: what device the run had, ``type`` and ``name``."""
_APART = ("validate", "save")
"""Measured phases that are no part of a usual step."""
_ONCE = 0.05
"""Spread of what was seen in one step only."""
_PEAK = "peak_memory_bytes/"
_NORMAL = 1.4826
"""Standard deviations of a normal distribution in a median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step that counts: seconds by part, of the whole, lengths in tokens, and peaks of memory by phase in bytes."""

    parts: Mapping[str, float]
    seconds: float
    lengths: Lengths
    peaks: Mapping[str, int]


def read_measured_run(path: str | os.PathLike[str], *, device_kind: str | None = None, skip: int = 1) -> MeasuredRun:
    """Measurements of a run's folder.

    Args:
        path: of the folder.
        device_kind: what its devices were, such as ``h200``; none for what the run noted.
        skip: steps left out after each start of the run.

    Raises:
        UserError: if the folder is no run of ``meshloom train`` or ``meshloom sft``, has too few steps, its model is gone, or
            its devices are not known.
    """
    folder = Path(path)
    settings, plan = _settings(folder), _plan(folder)
    device = _device(folder, settings, plan, device_kind)
    if settings.device == "auto":
        settings = with_values(settings, {"device": plan.get(MACHINE_KEY, {}).get("type", "cuda")})
    model_folder = _model(folder, settings)
    try:
        model, divisible = count_parameters(model_folder.config), Divisible.of(model_folder.text_config)
    except UnknownFamily as error:
        raise UserError(f"the cost model does not know this model: {error}", where=str(model_folder.path)) from error
    lay = lay_out_sft if isinstance(settings, SftSettings) else lay_out
    layout = lay(settings, divisible, devices_of_machine()).layout
    # Where reward models share devices with the engine, scoring is work of theirs; elsewhere it is a wait.
    scored = layout.role(Role.REWARD) is not None and not scores_meanwhile(layout)
    steps = list(_steps(read_metrics(folder), skip, scored))
    if not steps:
        what = f"the run has no step to be measured: the first {skip} after each start do not count"
        raise UserError(what, where=str(folder), fix="let it make three steps or more")
    return MeasuredRun(
        name=folder.name if folder.name not in ("run", "") else f"{folder.resolve().parent.name}/{folder.name}",
        settings=settings,
        model=model,
        adapters=None if settings.model.lora is None else trainable_parameters(settings, model_folder),
        layout=layout,
        cluster=Cluster(device=device, devices_per_node=layout.topology.devices_per_node),
        recompute=settings.model.gradient_checkpointing is True or plan.get("recompute") is True,
        lengths=_usual_lengths(steps),
        parts={name: _seen([step.parts[name] for step in steps if name in step.parts]) for name in _names(steps)},
        step_s=statistics.median(step.seconds for step in steps),
        steps=len(steps),
        device_memory=_found_free(plan),
        peaks={name: max(step.peaks.get(name, 0) for step in steps) for step in steps[:1] for name in step.peaks},
    )


def _settings(folder: Path) -> TrainSettings | SftSettings:
    file = folder / SETTINGS_FILE
    if not file.is_file():
        raise UserError(
            f"{folder} is no run folder: it has no {SETTINGS_FILE}", fix="name the folder of a finished run"
        )
    kind = kind_of(file, ())
    if kind is EvalSettings:
        what = f"{folder} is no run of `meshloom train` or `meshloom sft`: no other runs can be fitted"
        raise UserError(what, where=str(file))
    return load_settings(kind, file)


def _plan(folder: Path) -> dict[str, Any]:
    file = folder / PLAN_FILE
    return json.loads(file.read_bytes()) if file.is_file() else {}


def _found_free(plan: Mapping[str, Any]) -> int | None:
    """Bytes that the run found free on its GPU, as its plan says; none if it does not."""
    return next((line["value"] for line in plan.get("lines", ()) if line["name"] == GPU), None)


def _device(folder: Path, settings: TrainSettings | SftSettings, plan: Mapping[str, Any], given: str | None) -> Device:
    """What the run's devices were: as given, as its settings say, or as it noted."""
    noted = plan.get(MACHINE_KEY, {}).get("name")
    name = given or settings.cluster.device or noted
    device = None if name is None else find_device(name)
    if device is None:
        what = "the run does not say what its devices were" if name is None else f"no device {name!r} is known"
        fix = f"--device-kind, one of {', '.join(names_of_devices())}"
        raise UserError(what, where=str(folder), fix=fix)
    return device


def _model(folder: Path, settings: TrainSettings | SftSettings) -> ModelFolder:
    """The run's model, or that of its newest checkpoint if the model is gone."""
    saved = sorted((folder / CHECKPOINTS_FOLDER).glob("*/model/config.json"))
    try:
        return read_model_folder(Path(settings.model.path))
    except UserError:
        if not saved or settings.model.lora is not None:
            raise
    return read_model_folder(saved[-1].parent)


def _steps(records: Sequence[Mapping[str, Any]], skip: int, scored: bool) -> Iterator[_Step]:
    """Steps that count, each from the record before it to its own.

    A run that was resumed starts anew: its steps cannot be told from the others by their records, but medians pass over them.
    """
    before: float | None = None
    number = 0
    for record in records:
        metrics, phases = record["metrics"], record.get("phases", {})
        if record["kind"] in ("train", "sft"):
            number += 1
            if number > skip and before is not None and "response_tokens_mean" in metrics:
                yield _step(metrics, phases, record["time"] - before, scored)
        before = record["time"]


def _step(metrics: Mapping[str, float], phases: Mapping[str, float], seconds: float, scored: bool) -> _Step:
    # Waiting for rewards is among what the cost model counts beside the phases, but for those of reward models.
    left_out = _APART if scored else (*_APART, "score")
    parts = {name: taken for name, taken in phases.items() if name not in left_out}
    own = seconds - sum(phases.get(name, 0.0) for name in _APART)
    beside = max(0.0, own - sum(parts.values()))
    lengths = Lengths(
        prompt=metrics["prompt_tokens_mean"],
        response=metrics["response_tokens_mean"],
        longest=round(metrics["response_tokens_max"]),
    )
    peaks = {name.removeprefix(_PEAK): round(peak) for name, peak in metrics.items() if name.startswith(_PEAK)}
    return _Step(parts={**parts, BESIDE: beside}, seconds=own, lengths=lengths, peaks=peaks)


def _names(steps: Sequence[_Step]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step.parts))


def _usual_lengths(steps: Sequence[_Step]) -> Lengths:
    return Lengths(
        prompt=statistics.median(step.lengths.prompt for step in steps),
        response=statistics.median(step.lengths.response for step in steps),
        longest=round(statistics.median(step.lengths.longest for step in steps)),
    )


def _seen(seconds: Sequence[float]) -> Seen:
    """The median, and how far it is off by chance."""
    middle = statistics.median(seconds)
    if middle <= 0 or len(seconds) < 2:
        return Seen(seconds=middle, spread=_ONCE)
    deviation = _NORMAL * statistics.median(abs(each - middle) for each in seconds)
    return Seen(seconds=middle, spread=deviation / middle / len(seconds) ** 0.5)
