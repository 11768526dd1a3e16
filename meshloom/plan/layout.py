"""The layout of a run: its roles on devices, each with its mesh.

Owns: the record that ledgers and pictures read. Refuses to know: what is wrong with it (``device_checks``). Always holds: each
role's mesh has exactly its devices; nothing in it is as long as the list of all devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshloom.plan.meshes import Mesh
from meshloom.plan.placement import PHASES, Role, Shared, shared_devices
from meshloom.plan.topology import DeviceSet, Topology

_MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class RoleLayout:
    """One role on its devices.

    Args:
        role: which.
        devices: in the order of their ranks.
        mesh: that cuts its model; for a reward model, replicas.
        sequence_mesh: the same devices with parts of sequences as an axis; none where sequences are not split.
        stages_per_device: of each device of a pipeline.
        busy: phases in which it is busy; none for those that its role has at most.
    """

    role: Role
    devices: DeviceSet
    mesh: Mesh
    sequence_mesh: Mesh | None = None
    stages_per_device: int = 1
    busy: tuple[str, ...] | None = None

    @cached_property
    def ranks(self) -> list[int]:
        """In the order of its mesh: the numbers of its devices, ascending."""
        return sorted(self.devices)

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of a step in which it is busy."""
        return PHASES[self.role] if self.busy is None else self.busy

    @property
    def replicas(self) -> int:
        """Parts of its devices that have different samples: the data-parallel degree."""
        mesh = self.mesh
        return len(self.devices) // (mesh.size("pp") * mesh.size("sp") * mesh.size("tp"))

    @property
    def shards(self) -> int:
        """Devices that each weight of a stage and of a tensor-parallel part is sharded over; those of one sequence share it
        too."""
        return self.mesh.size("fsdp") * self.mesh.size("sp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All roles of a run that are on devices.

    Args:
        topology: the devices.
        roles: in the order actor, rollout, reference, critic, reward; those that could be laid out.
    """

    topology: Topology
    roles: tuple[RoleLayout, ...]

    def role(self, role: Role) -> RoleLayout | None:
        """A role's layout; none if the run has no such role."""
        return next((found for found in self.roles if found.role == role), None)

    @cached_property
    def shared(self) -> Sequence[Shared]:
        """All devices by the roles that are on them."""
        return shared_devices(self.topology, {found.role: found.devices for found in self.roles})

    @property
    def idle(self) -> DeviceSet:
        """Devices without a role."""
        return next((group.devices for group in self.shared if not group.roles), DeviceSet())

    def as_json(self) -> dict[str, Any]:
        """Plain values; ranks are listed for small meshes only."""
        topology = self.topology
        return {
            "nodes": topology.num_nodes,
            "devices_per_node": topology.devices_per_node,
            "roles": {str(found.role): self._role_json(found) for found in self.roles},
            "shared": {
                ",".join(topology.entries(group.devices)): [str(role) for role in group.roles]
                for group in self.shared
                if len(group.roles) > 1
            },
            "idle": topology.entries(self.idle),
        }

    def _role_json(self, found: RoleLayout) -> dict[str, Any]:
        return {
            "devices": self.topology.entries(found.devices),
            "num_devices": len(found.devices),
            "mesh": mesh_json(found.mesh),
            "sequence_mesh": None if found.sequence_mesh is None else mesh_json(found.sequence_mesh),
            "stages_per_device": found.stages_per_device,
            "replicas": found.replicas,
            "phases": list(found.phases),
        }


def share_devices(one: RoleLayout | None, other: RoleLayout | None) -> bool:
    """Whether two roles have a device in common."""
    if one is None or other is None:
        return False
    pieces = ((a, b) for a in one.devices.ranges for b in other.devices.ranges)
    return any(max(a.start, b.start) < min(a.stop, b.stop) for a, b in pieces)


def mesh_json(mesh: Mesh) -> dict[str, Any]:
    """Plain values of a mesh; its ranks if there are few."""
    ranks = mesh.ranks() if len(mesh.devices) <= _MOST_RANKS else None
    return {"dims": list(mesh.dims), "shape": list(mesh.shape), "ranks": ranks}
