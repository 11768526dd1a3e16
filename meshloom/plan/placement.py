"""Which role is on which devices.

Owns: reading lists of devices, the roles of a run, and what shares a device. Refuses to know: batches, models' sizes. Always
holds: a list that cannot be read is told with the list that was likely meant; no list of all devices is made.

Codes: T nodes, P placement.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from meshloom.config.cluster_settings import MOST_DEVICES, ClusterSettings, ParallelSettings
from meshloom.config.environment import visible_gpus
from meshloom.config.names import VALUE_ADVANTAGES
from meshloom.config.reward_settings import reward_models
from meshloom.config.settings import TrainSettings
from meshloom.plan.faults import Change, Fault
from meshloom.plan.host_names import expand
from meshloom.plan.reference import has_own_reference
from meshloom.plan.topology import DeviceSet, Topology

FORM = "devices are integers (as this process sees them) or node:index"
_ENTRY = re.compile(r"(?:(?P<node>[^:]+):)?(?P<index>\d{1,18}|\d{1,18}-\d{1,18}|all|\*)")
_DEVICE_WORDS = ("cuda", "gpu", "cpu", "rocm", "hip", "xpu", "npu", "mps")


class Role(StrEnum):
    """What a model is for."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    CRITIC = "critic"
    REWARD = "reward"


PHASES: Mapping[Role, tuple[str, ...]] = {
    Role.ACTOR: ("log-prob", "update", "sync"),
    Role.ROLLOUT: ("generate", "sync"),
    Role.REFERENCE: ("log-prob",),
    Role.CRITIC: ("values", "update"),
    Role.REWARD: ("score",),
}
"""Phases of a step in which a role is busy."""


def placements(settings: TrainSettings) -> dict[Role, tuple[int | str, ...] | str]:
    """What the settings say of each role's devices."""
    given = settings.placement
    return {
        Role.ACTOR: given.actor,
        Role.ROLLOUT: given.rollout,
        Role.REFERENCE: given.reference,
        Role.CRITIC: given.critic,
        Role.REWARD: given.reward,
    }


def roles_of(settings: TrainSettings) -> tuple[Role, ...]:
    """Roles that need devices: a reference of its own, a critic and a reward model only where there is one."""
    needed = {
        Role.ACTOR: True,
        Role.ROLLOUT: True,
        Role.REFERENCE: has_own_reference(settings),
        Role.CRITIC: has_critic(settings) or settings.placement.critic != "all",
        Role.REWARD: bool(reward_models(settings.reward)) or settings.placement.reward != "all",
    }
    return tuple(role for role, is_needed in needed.items() if is_needed)


def has_critic(settings: TrainSettings) -> bool:
    """Whether a run has a critic: its advantage estimator asks for values."""
    return settings.algorithm.advantage in VALUE_ADVANTAGES


def sequence_parts(settings: TrainSettings) -> int:
    """Parts that every model which sees whole samples in microbatches of ``batch.tokens_per_microbatch`` splits a sequence
    into; 1 if one of them does not."""
    parallel, roles = settings.parallel, roles_of(settings)
    parts = {Role.ACTOR: parallel.actor, Role.REFERENCE: parallel.reference}
    if settings.critic.tokens_per_microbatch is None:
        parts[Role.CRITIC] = parallel.critic
    return min(group.sequence for role, group in parts.items() if role in roles)


def asks_for_devices(settings: TrainSettings) -> bool:
    """Whether anything is said of nodes, placement or parallelism; a run of which nothing is said is on one device."""
    said = settings.cluster.model_copy(update={"device": None, "ray_address": None}) != ClusterSettings()
    said = said or settings.parallel != ParallelSettings()
    said = said or settings.placement.auto
    return said or settings.placement.map is not None or any(value != "all" for value in placements(settings).values())


def devices_of_machine() -> int:
    """GPUs that this process may see, without touching one."""
    found = sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in Path("/dev").glob("nvidia*"))
    visible = visible_gpus()
    return found if visible is None else min(found, visible)


def topology_of(settings: TrainSettings, machine: int) -> tuple[Topology, list[Fault]]:
    """The devices of a run, and what is wrong with the names of its nodes.

    Args:
        settings: of the run.
        machine: devices that this machine has.
    """
    cluster, faults = settings.cluster, []
    size = cluster.devices_per_node or (machine or _named(settings) if asks_for_devices(settings) else 1)
    names: list[str] = []
    for text in cluster.node_names:
        try:
            names += expand(text)
        except ValueError as error:
            faults.append(Fault(code="T003", path="cluster.node_names", what=str(error), changes=_without_names))
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        what = f"the node {twice} is named twice"
        faults.append(Fault(code="T002", path="cluster.node_names", what=what, changes=_without_names))
    elif names and len(names) != cluster.nodes and not faults:
        what = f"cluster.node_names has {len(names)} names for cluster.nodes={cluster.nodes}"
        change = {"cluster.nodes": len(names)}
        faults.append(
            Fault(code="T001", path="cluster.node_names", what=what, changes=lambda: (change, *_without_names()))
        )
    known = () if faults else tuple(names)
    return Topology(num_nodes=cluster.nodes, devices_per_node=size, names=known), faults


def _without_names() -> tuple[Change, ...]:
    return ({"cluster.node_names": ()},)


def _named(settings: TrainSettings) -> int:
    """Devices of a node as far as the placement names them, at least one."""
    lists = (value for value in placements(settings).values() if not isinstance(value, str))
    ends = (re.search(r"(\d{1,18})$", str(entry)) for entries in lists for entry in entries)
    return min(max((int(found[1]) + 1 for found in ends if found), default=1), MOST_DEVICES)


def devices_of(role: Role, settings: TrainSettings, topology: Topology) -> tuple[DeviceSet | None, list[Fault]]:
    """A role's devices; none if its list cannot be read or names none, and then why."""
    entries = placements(settings)[role]
    if isinstance(entries, str):
        return topology.all_devices, []
    devices, faults = _read(f"placement.{role}", entries, topology)
    return devices, list(faults)


@lru_cache(maxsize=64)
def _read(path: str, entries: tuple[int | str, ...], topology: Topology) -> tuple[DeviceSet | None, tuple[Fault, ...]]:
    """A list of devices, read once for all changes that are tried."""
    reader = _Reader(path, topology)
    for entry in entries:
        reader.read(entry)
    devices = DeviceSet.of(reader.found)
    if not entries:
        reader.fault("P006", f"{path} names no device")
    if (device := devices.twice()) is not None:
        reader.fault("P003", f"device {_name(topology, device)} is named twice")
    return (None if reader.faults else devices), tuple(reader.faults)


def _name(topology: Topology, device: int) -> str:
    node, index = divmod(device, topology.devices_per_node)
    return str(index) if topology.plain else f"{topology.node_name(node)}:{index}"


class _Reader:
    """Reads one role's list, entry by entry; knows after each what was likely meant so far."""

    def __init__(self, path: str, topology: Topology) -> None:
        self.path, self.topology = path, topology
        self.found: list[range] = []
        self.meant: list[range] = []
        self.faults: list[Fault] = []

    def fault(self, code: str, what: str, *, form: str = "", first: Iterable[Change] = ()) -> None:
        """One fault of a kind is told; the list that is suggested ends them all."""
        if any(fault.code == code for fault in self.faults):
            return
        given = tuple(first)
        fault = Fault(code=code, path=self.path, what=what, form=form, changes=lambda: (*given, *self._changes()))
        self.faults.append(fault)

    def _changes(self) -> Iterator[Change]:
        left = _without_repeats(self.meant)
        if left:
            names = self.topology.entries(left)
            yield {self.path: tuple(int(name) if name.isdecimal() else name for name in names)}
        yield {self.path: "all"}

    def read(self, entry: int | str) -> None:
        found = _ENTRY.fullmatch(str(entry).strip())
        if found is None and not isinstance(entry, int):
            return self.fault("P001", f"{entry!r} names no device: {FORM}", form=self._form())
        if found is None:
            return self._missing(int(entry), (0,), self.topology.devices_per_node)
        nodes = self._nodes(found["node"], str(entry))
        index = found["index"]
        if index in ("all", "*"):
            return self._add(nodes, 0, self.topology.devices_per_node - 1)
        first, _, last = index.partition("-")
        if last and int(last) < int(first):
            return self.fault("P001", f"{entry!r} names no device: {first} comes after {last}", form=self._form())
        return self._add(nodes, int(first), int(last or first))

    def _form(self) -> str:
        named = "0" if self.topology.plain else f"{self.topology.node_name(0)}:0"
        return f"the first device is {named}"

    def _nodes(self, name: str | None, entry: str) -> tuple[int, ...]:
        """Numbers of the nodes that an entry names. After a fault, those that were likely meant, in ``meant`` alone."""
        topology = self.topology
        if name is None:
            if entry in ("all", "*"):
                return tuple(range(topology.num_nodes))
            if topology.num_nodes > 1:
                choices = f"{topology.node_name(0)}:{entry} to {topology.node_name(topology.num_nodes - 1)}:{entry}"
                what = f"device {entry} could be on any of {topology.num_nodes} nodes: {FORM}"
                self.fault("P005", what, form=choices)
            return (0,)
        try:
            names = expand(name)
        except ValueError as error:
            self.fault("P001", f"{entry!r} names no device: {error}", form=self._form())
            return ()
        known = [topology.node_number(each) for each in names]
        for each, number in zip(names, known, strict=True):
            if number is None:
                self._unknown_node(each, entry)
        guess = [
            number if number is not None else self._likely(each) for each, number in zip(names, known, strict=True)
        ]
        return tuple(number for number in guess if number is not None)

    def _likely(self, name: str) -> int | None:
        if name.lower() in _DEVICE_WORDS:
            return 0
        names = [self.topology.node_name(node) for node in range(min(self.topology.num_nodes, 10_000))]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        return self.topology.node_number(near[0]) if near else None

    def _unknown_node(self, name: str, entry: str) -> None:
        topology = self.topology
        if name.lower() in _DEVICE_WORDS:
            return self.fault("P001", f"{entry!r} names no device: {FORM}", form=self._form())
        last = topology.node_name(topology.num_nodes - 1)
        have = topology.node_name(0) if topology.num_nodes == 1 else f"{topology.node_name(0)} to {last}"
        number = re.fullmatch(r"node([1-9]\d{0,5})", name)
        more = [{"cluster.nodes": int(number[1])}] if number and not topology.names else []
        return self.fault("P004", f"there is no node {name!r}: the nodes are {have}", first=more)

    def _add(self, nodes: tuple[int, ...], first: int, last: int) -> None:
        size = self.topology.devices_per_node
        if last >= size:
            return self._missing(last, nodes, first)
        for node in nodes:
            start = self.topology.devices_of(node).start
            self.found.append(range(start + first, start + last + 1))
            self.meant.append(self.found[-1])
        return None

    def _missing(self, index: int, nodes: tuple[int, ...], first: int) -> None:
        """A device that is not there; what is there of a range is likely meant."""
        size = self.topology.devices_per_node
        for node in nodes:
            start = self.topology.devices_of(node).start
            self.meant.append(range(start + first, start + size))
        have = "0" if size == 1 else f"0-{size - 1}"
        more = [{"cluster.devices_per_node": index + 1}] if size <= index < MOST_DEVICES else []
        self.fault("P002", f"device {index}: node has {have}", first=more)


def _without_repeats(ranges: Iterable[range]) -> DeviceSet:
    """The same devices, each where it comes first."""
    devices = DeviceSet.of(ranges)
    if devices.twice() is None:
        return devices
    return DeviceSet.of(range(device, device + 1) for device in dict.fromkeys(devices))


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Devices that the same roles are on."""

    devices: DeviceSet
    roles: tuple[Role, ...]


def shared_devices(topology: Topology, devices: Mapping[Role, DeviceSet]) -> list[Shared]:
    """All devices by the roles that are on them, in the order of their first device; those without a role too."""
    edges = sorted(
        {0, topology.num_devices}
        | {edge for pool in devices.values() for piece in pool.ranges for edge in (piece.start, piece.stop)}
    )
    found: dict[tuple[Role, ...], list[range]] = {}
    for start, stop in zip(edges, edges[1:], strict=False):
        roles = tuple(role for role, pool in devices.items() if pool.rank_of(start) is not None)
        found.setdefault(roles, []).append(range(start, stop))
    return [Shared(devices=DeviceSet.of(ranges), roles=roles) for roles, ranges in found.items()]
