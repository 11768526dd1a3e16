"""The kind of a run's devices, and the constants of the cost model: as the settings give them.

Owns: what follows of a kind for the settings, and what is wrong with either. Refuses to know: bytes and seconds of a run.
Always holds: what the settings give, and what was found on a device, count before what its kind says.

Codes: T004 an unknown kind of device, T005 a kind that nothing uses, T006 constants that cannot be read, T007 constants that
nothing uses or of another kind of device, T008 memory of a GPU where there is none.
"""

import difflib
from typing import TypeVar

from meshloom.config.errors import UserError
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.constants_file import GivenConstants, read_constants
from meshloom.plan.faults import with_values
from meshloom.plan.findings import Findings
from meshloom.plan.hardware import Device, find_device, names_of_devices
from meshloom.plan.memory import on_gpu

S = TypeVar("S", TrainSettings, SftSettings)
KIND = "cluster.device"


def with_device_kind(settings: S, device_memory: int | None) -> S:
    """The settings with what the kind of the devices says: that they are GPUs, and how much memory they have.

    Args:
        settings: of the run.
        device_memory: bytes that were found on the device, which count before what its kind has; none if it was not asked.
    """
    device = None if settings.cluster.device is None else find_device(settings.cluster.device)
    origin = f"{KIND}, {settings.provenance.of(KIND)}"
    if settings.cluster.device is not None and settings.device == "auto":
        settings = with_values(settings, {"device": "cuda"}, origin)
    if device is None:
        return settings
    origin = f"{device.name}: {origin}"
    if settings.device_memory_bytes is None and device_memory is None and on_gpu(settings.device):
        settings = with_values(settings, {"device_memory_bytes": device.memory_bytes}, origin)
    return settings


def check_device_kind(found: Findings, settings: TrainSettings | SftSettings) -> None:
    """Refuse a kind of device that is not known, and constants that cannot be read; warn of what nothing uses."""
    _check_constants(found, settings)
    name = settings.cluster.device
    if name is None:
        return
    if find_device(name) is None:
        known = names_of_devices()
        near = difflib.get_close_matches(name.lower(), known, n=1)
        fix = f"{f'did you mean {near[0]}? ' if near else ''}known: {', '.join(known)}"
        what = f"{KIND} knows no {name!r}"
        likely = tuple((f"{KIND}={each}",) for each in near)
        fix = f"{fix}; or leave it out and give device_memory_bytes"
        found.refuse("T004", KIND, what, fix=fix, suggestions=likely)
    elif not on_gpu(settings.device):
        found.warn("T005", KIND, f"{KIND} is not used, as device is {settings.device}", fix="set device=cuda")


def check_device_memory(found: Findings, settings: TrainSettings | SftSettings | EvalSettings) -> None:
    """Warn of memory that nothing counts with, as the run is on the processor."""
    path = "device_memory_bytes"
    if settings.device_memory_bytes is None or on_gpu(settings.device):
        return
    why = f"device is {settings.device} ({settings.provenance.of('device')})"
    if settings.device == "auto":
        why += ", and this machine has no GPU"
    what = f"{path} is not used: it is the memory of a GPU, and the run is on the processor"
    found.warn("T008", path, what, why=why, fix=f"set device=cuda, or leave {path} out")


def _check_constants(found: Findings, settings: TrainSettings | SftSettings) -> None:
    path, file, kind = "cluster.constants", settings.cluster.constants, settings.cluster.device
    if file is None:
        return
    try:
        given = read_constants(file)
    except UserError as error:
        found.refuse("T006", path, "the constants of the cost model cannot be read", why=str(error), fix=error.fix)
        return
    device = None if given.device is None else find_device(given.device)
    if kind is None:
        fix = f"set {KIND}, such as {(given.device or 'h200').lower().replace(' ', '-')}"
        found.warn("T007", path, f"{path} is not used: without the kind of the devices no time is estimated", fix=fix)
    elif device is not None and device is not find_device(kind):
        what = f"the constants of {file} were fitted to {device.name}, the plan is for {kind}"
        why = "shares of a maker's rate carry over to other devices only roughly"
        found.warn("T007", path, what, why=why, fix="meshloom calibrate a run on the same kind of device")


def given_constants(settings: TrainSettings | SftSettings) -> GivenConstants:
    """The constants that the settings give; those measured on one H200 where there are none, or none that can be read."""
    try:
        return (
            GivenConstants(origins={})
            if settings.cluster.constants is None
            else read_constants(settings.cluster.constants)
        )
    except UserError:
        return GivenConstants(origins={})


def device_of(settings: TrainSettings | SftSettings) -> Device | None:
    """What the devices are; none if that is not given, or they are no GPUs."""
    name = settings.cluster.device
    return find_device(name) if name is not None and on_gpu(settings.device) else None
