"""Hardware that is planned for but is not here, from options of the command line.

Owns: what the options mean as overrides, and how values that they gave are told. Refuses to know: the command line itself.
Always holds: a value that an option gave is told as that option; memory of devices asks for GPUs, be it an option or a setting.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from meshloom.config.errors import UserError
from meshloom.config.provenance import Provenance
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.faults import with_values
from meshloom.plan.memory import on_gpu

S = TypeVar("S", TrainSettings, SftSettings, EvalSettings)
_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


_MANY = 2**60
_MEMORY = "device_memory_bytes"


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """Options of ``meshloom plan``; what is none is left to the settings."""

    nodes: int | None = None
    devices_per_node: int | None = None
    device_memory: str | None = None
    device_kind: str | None = None
    device_map: str | None = None
    constants: str | None = None

    def overrides(self) -> list[str]:
        """The options as overrides; those of the command line that come after them win.

        Raises:
            UserError: if an amount of memory cannot be read.
        """
        return [_override(path, value) for path, (_, value) in self._values().items()]

    def told(self, settings: S) -> S:
        """The settings that these overrides were loaded into, with the options as origins; on GPUs, where their memory is given
        and nothing else says what the devices are."""
        origins = dict(settings.provenance.origins)
        for path, (option, value) in self._values().items():
            if origins.get(path) == f"override {_override(path, value)}":
                origins[path] = f"option {option}"
        settings = settings.model_copy()
        settings._provenance = Provenance(origins)
        if settings.device_memory_bytes is not None and settings.device == "auto":
            origin = settings.provenance.of(_MEMORY)
            return with_values(settings, {"device": "cuda"}, origin if origin.startswith("option") else _MEMORY)
        return settings

    def _values(self) -> dict[str, tuple[str, Any]]:
        """Each option that is given, as it was written, and its value, by the setting that it is for."""
        memory = None if self.device_memory is None else parse_bytes(self.device_memory)
        values = {
            "cluster.nodes": ("--nodes", self.nodes, self.nodes),
            "cluster.devices_per_node": ("--devices-per-node", self.devices_per_node, self.devices_per_node),
            _MEMORY: ("--device-memory", self.device_memory, memory),
            "cluster.device": ("--device-kind", self.device_kind, self.device_kind),
            "placement.map": ("--device-map", self.device_map, self.device_map),
            "cluster.constants": ("--constants", self.constants, self.constants),
        }
        return {path: (f"{name} {text}", value) for path, (name, text, value) in values.items() if value is not None}


def _override(path: str, value: Any) -> str:
    return f"{path}={json.dumps(value)}"


def notes_on_hardware(settings: TrainSettings | SftSettings | EvalSettings) -> tuple[str, ...]:
    """What is to be known of a plan whose hardware is not here."""
    kind = None if isinstance(settings, EvalSettings) else settings.cluster.device
    asks = settings.device.startswith("cuda") or (kind is not None and settings.device == "auto")
    if not asks or on_gpu("auto"):
        return ()
    path, value = ("cluster.device", kind) if settings.device == "auto" else ("device", settings.device)
    origin = settings.provenance.of(path)
    if origin == _MEMORY:
        asking = f"{_MEMORY} ({settings.provenance.of(_MEMORY)})"
    else:
        asking = origin.removeprefix("option ") if origin.startswith("option") else f"{path}={value}"
    note = f"{asking}, and this machine has no GPU: planned for one elsewhere (meshloom doctor tells what is here)"
    return (note,)


def parse_bytes(text: str) -> int:
    """Bytes from a text such as ``80GiB``, ``80G`` or ``85899345920``; K, M, G, T are powers of 1000, Ki to Ti of 1024.

    Raises:
        UserError: if it is no amount.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise UserError(f"{text!r} is no amount of memory", fix="write for example 80GiB")
    count = float(found[1]) * _UNITS[found[2]]
    if not 1 <= count < _MANY:
        raise UserError(f"{text[:40]!r} is no amount of memory that a device has", fix="write for example 80GiB")
    return int(count)
