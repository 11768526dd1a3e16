"""Device map files: devices and parallelism of each role, said outright.

Owns: their form, and what they come to as settings. Refuses to know: which devices exist. Always holds: a map only sets values
that settings have, so a run with a map is the run of the settings that ``with_device_map`` returns.

Codes: P007 a file that cannot be read, P008 a key or a value in it.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshloom.config import yaml_text
from meshloom.config.reward_settings import reward_models
from meshloom.config.settings import TrainSettings
from meshloom.plan.faults import Fault, with_values
from meshloom.plan.host_names import expand
from meshloom.plan.placement import Role

_ENGINES = {"vllm": "vllm", "torch": "torch", "hf": "torch"}
_DTYPES = ("float32", "bfloat16")
_CUTS = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "virtual_pipeline_parallel_size": "stages_per_device",
    "sequence_parallel_size": "sequence",
    "ulysses_sequence_parallel_size": "sequence",
    "fsdp_size": "fsdp_size",
}
_DTYPE_OF_SCORERS = "dtype of all reward models"
_EXAMPLE = 'actor: {devices: ["node1:0", "node1:1"]}'


def with_device_map(settings: TrainSettings) -> tuple[TrainSettings, list[Fault]]:
    """The settings that a run's device map comes to, and what is wrong with the map.

    An override beats the map, the map beats the settings file. Roles that the map leaves out are where the actor is. Unless
    ``cluster`` says which nodes there are, they are those that the map names.

    Args:
        settings: of the run; without a map they are returned as they are.
    """
    if settings.placement.map is None:
        return settings, []
    file = Path(settings.placement.map)
    try:
        document = _document(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else "it is not UTF-8 text"
        near = sorted(str(path) for path in file.parent.glob("*.yaml"))[:6]
        nearby = f"; files nearby: {', '.join(near)}" if near else ""
        return _unread(settings, [f"the device map {file} cannot be read: {why}{nearby}"])
    if document.faults or not isinstance(document.data, dict):
        what = [f"{file}:{line}: {fault}" for line, fault in document.faults]
        return _unread(settings, what or [f"the device map {file} holds no roles, such as {_EXAMPLE}"])
    reader = _Reader(file, document)
    reader.roles(settings)
    given = {path: value for path, value in reader.values.items() if not _overridden(settings, path)}
    return with_values(
        settings, {**given, "placement.map": None}, {**reader.origins, "placement.map": str(file)}
    ), reader.faults


@lru_cache(maxsize=2)
def _document(text: str) -> yaml_text.Document:
    """A map's text, read once for all changes that are tried."""
    return yaml_text.read(text)


def _unread(settings: TrainSettings, faults: Iterable[str]) -> tuple[TrainSettings, list[Fault]]:
    without = {"placement.map": None}
    found = [Fault(code="P007", path="placement.map", what=what, changes=lambda: (without,)) for what in faults]
    return with_values(settings, without, settings.provenance.of("placement.map")), found


def _overridden(settings: TrainSettings, path: str) -> bool:
    return settings.provenance.of(path).startswith("override ")


@dataclass(frozen=True)
class _Key:
    """A key of a role in a map: how its value is read, and what is expected."""

    read: Callable[[Any], Any]
    expected: str


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


class _Reader:
    """Turns a map into values of settings, with their origins."""

    def __init__(self, file: Path, document: yaml_text.Document) -> None:
        self.file, self.document = file, document
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.scorers: tuple[str, ...] = ()

    def place(self, *path: str) -> str:
        return f"{self.file}:{self.document.lines.get(path, 1)}"

    def fault(self, what: str, *path: str) -> None:
        text = f"{what} ({self.place(*path)})"
        without = {"placement.map": None}
        self.faults.append(Fault(code="P008", path="placement.map", what=text, changes=lambda: (without,)))

    def set(self, setting: str, value: Any, *path: str) -> None:
        self.values[setting] = value
        self.origins[setting] = self.place(*path)

    def roles(self, settings: TrainSettings) -> None:
        known = [str(role) for role in Role]
        self.scorers = tuple(reward_models(settings.reward))
        for name, group in self.document.data.items():
            if name not in known:
                self.fault(f"there is no role {name!r}: {_near(name, known)}", name)
            elif not isinstance(group, Mapping) or "devices" not in group:
                self.fault(f"{name} has no devices: write {_EXAMPLE}", name)
            else:
                self.role(name, group)
        others = (Role.ROLLOUT, Role.REFERENCE, *([Role.REWARD] if self.scorers else []))
        for role in others:
            if (path := f"placement.{role}") not in self.values:
                self.with_actor(path, settings)
        self.nodes(settings)

    def with_actor(self, path: str, settings: TrainSettings) -> None:
        """Where the actor is, and for the same reason."""
        actor = "placement.actor"
        if _overridden(settings, actor) or actor not in self.values:
            self.values[path], self.origins[path] = settings.placement.actor, settings.provenance.of(actor)
        else:
            self.values[path], self.origins[path] = self.values[actor], self.origins[actor]

    def role(self, name: str, group: Mapping[str, Any]) -> None:
        for key, value in group.items():
            if key == "devices":
                self.devices(name, value)
            elif key == "parallelism":
                self.parallelism(name, value)
            else:
                self.key(name, key, value, (name, key))

    def devices(self, name: str, value: Any) -> None:
        entries = tuple(value) if isinstance(value, list) else value
        if isinstance(entries, int | str) and not isinstance(entries, bool) and entries != "all":
            entries = (entries,)
        each = () if entries == "all" else entries
        if not isinstance(each, tuple) or not all(
            isinstance(one, int | str) and not isinstance(one, bool) for one in each
        ):
            return self.fault(f"{name}.devices is no list of devices: write {_EXAMPLE}", name, "devices")
        return self.set(f"placement.{name}", entries, name, "devices")

    def parallelism(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            return self.fault(f"{name}.parallelism has no keys, such as tensor_parallel_size: 2", name, "parallelism")
        for key, size in value.items():
            self.key(name, key, size, (name, "parallelism", key))
        return None

    def key(self, name: str, key: str, value: Any, path: tuple[str, ...]) -> None:
        keys = self.keys(name)
        if key not in keys:
            return self.fault(f"{name} has no key {key!r} in a map: {_near(key, list(keys))}", *path)
        setting, known = keys[key]
        read = known.read(value)
        if read is None:
            return self.fault(f"{'.'.join(path)} cannot be {value!r}: expected {known.expected}", *path)
        if setting == _DTYPE_OF_SCORERS:
            for scorer in self.scorers:
                self.set(f"reward.components.{scorer}.model.dtype", read, *path)
        elif read != "sharded":
            self.set(setting, read, *path)
        return None

    def keys(self, name: str) -> dict[str, tuple[str, _Key]]:
        """Keys that a role has, the setting that each is, and how it is read."""
        size = _Key(_whole, "a whole number ≥ 1")
        dtype = _Key(lambda value: value if value in _DTYPES else None, f"one of {', '.join(_DTYPES)}")
        if name == Role.ROLLOUT:
            engine = _Key(lambda value: _ENGINES.get(str(value)), f"one of {', '.join(_ENGINES)}")
            return {
                "tensor_parallel_size": ("parallel.rollout.tensor", size),
                "backend": ("rollout.engine", engine),
                "max_num_seqs": ("rollout.max_sequences", size),
            }
        if name == Role.REWARD:
            return {"dtype": (_DTYPE_OF_SCORERS, dtype)}
        cuts = {key: (f"parallel.{name}.{cut}", size) for key, cut in _CUTS.items()}
        sharding = _Key(
            lambda value: {True: "sharded", False: 1}.get(value) if isinstance(value, bool) else None, "true or false"
        )
        more = {"dtype": ("model.dtype", dtype)} if name == Role.ACTOR else {}
        return {**cuts, "fsdp": (f"parallel.{name}.fsdp_size", sharding), **more}

    def nodes(self, settings: TrainSettings) -> None:
        """The nodes that a map names, where the settings do not say which there are."""
        said = settings.provenance.of("cluster.nodes") != "default" or settings.cluster.nodes > 1
        if said or settings.cluster.node_names:
            return
        names: dict[str, str] = {}
        for path, entries in self.values.items():
            for entry in entries if path.startswith("placement.") and isinstance(entries, tuple) else ():
                names |= dict.fromkeys(_nodes_in(str(entry)), self.origins[path])
        if not names:
            return
        origin = next(iter(names.values()))
        numbers = [re.fullmatch(r"node([1-9]\d{0,5})", name) for name in names]
        if all(numbers):
            change: dict[str, Any] = {"cluster.nodes": max(int(number[1]) for number in numbers if number)}
        else:
            change = {"cluster.nodes": len(names), "cluster.node_names": tuple(names)}
        self.values |= change
        self.origins |= dict.fromkeys(change, origin)


def _nodes_in(entry: str) -> tuple[str, ...]:
    """Names of nodes in an entry; none where it names no node, or a kind of device as if it were one."""
    name, colon, index = entry.partition(":")
    if not colon or not re.fullmatch(r"\d+(-\d+)?|all|\*", index) or name.lower() in ("cuda", "gpu", "cpu"):
        return ()
    try:
        return expand(name)
    except ValueError:
        return ()


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
