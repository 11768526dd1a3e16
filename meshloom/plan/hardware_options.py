"""Hardware that is planned for but is not here, from options of the command line.

Owns: what the options mean as overrides. Refuses to know: the command line itself.
"""

import json
import re
from dataclasses import dataclass

from meshloom.config.errors import UserError
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.memory import on_gpu

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
        """The options as overrides.

        Raises:
            UserError: if an amount of memory cannot be read.
        """
        values = {
            "cluster.nodes": self.nodes,
            "cluster.devices_per_node": self.devices_per_node,
            "device_memory_bytes": None if self.device_memory is None else parse_bytes(self.device_memory),
            "cluster.device": self.device_kind,
            "placement.map": self.device_map,
            "cluster.constants": self.constants,
        }
        return [f"{path}={json.dumps(value)}" for path, value in values.items() if value is not None]


def notes_on_hardware(settings: TrainSettings | SftSettings | EvalSettings) -> tuple[str, ...]:
    """What is to be known of a plan whose hardware is not here."""
    kind = None if isinstance(settings, EvalSettings) else settings.cluster.device
    asks = settings.device.startswith("cuda") or (kind is not None and settings.device == "auto")
    if not asks or on_gpu("auto"):
        return ()
    origin = "cluster.device" if not settings.device.startswith("cuda") else "device"
    given = kind if origin == "cluster.device" else settings.device
    note = (
        f"{origin}={given}, and this machine has no GPU: planned for one elsewhere (meshloom doctor tells what is here)"
    )
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
