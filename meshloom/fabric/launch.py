"""How this process came to be, and where its workers are: on this machine, or where a launcher has started attendants.

Owns: the choice of the site. Refuses to know: what workers do. Always holds: one process of a run is its controller; each other
process that a launcher started minds workers, and exits with the run's exit code; nothing heavy is imported to find that out.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from meshloom.config.cluster_settings import Fabric
from meshloom.config.environment import launcher_variables, take_controller_ticket
from meshloom.config.errors import UserError
from meshloom.fabric.site import Site


@dataclass(frozen=True)
class PlannedNode:
    """A node as the plan has it.

    Args:
        name: as the device map calls it, or node1, node2, …
        devices: of its workers, by local rank.
    """

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Launched:
    """What a launcher has started for this controller.

    Args:
        kind: of the launcher: ``torchrun``, ``slurm`` or ``hostfile``.
        descriptor: of a pipe, on which the controller says where it listens.
        num_attendants: that will call in.
        nodes: number of processes on each node, in the launcher's order.
    """

    kind: str
    descriptor: int
    num_attendants: int
    nodes: tuple[int, ...]

    def text(self) -> str:
        """As a line of JSON, which ``launched`` reads."""
        return json.dumps(asdict(self))


@lru_cache(maxsize=1)
def launched() -> Launched | None:
    """What a launcher has started for this controller; none if nothing has.

    With it the settings' ``cluster`` can be left out: there are so many nodes, and so many devices on each.
    """
    text = take_controller_ticket()
    if text is None:
        return None
    fields = json.loads(text)
    os.set_inheritable(fields["descriptor"], False)
    return Launched(**{**fields, "nodes": tuple(fields["nodes"])})


def attend_if_launched(command: Sequence[str]) -> int | None:
    """Do what a process does that torchrun or srun has started: mind a worker, and on rank 0 start the controller.

    Args:
        command: of this process, which the controller is started with too.

    Returns:
        The run's exit code; none in a process that no launcher has started, or that is the controller.
    """
    if launched() is not None or any(word in ("fabric=local", "fabric=ray") for word in command):
        return None
    variables = launcher_variables()
    from meshloom.fabric import slurm, torchrun

    task = torchrun.task_of(variables) or slurm.task_of(variables)
    if task is None:
        return None
    from meshloom.fabric.meeting import attend_task

    return attend_task(task, command)


def open_site(
    nodes: Sequence[PlannedNode], *, fabric: Fabric = Fabric.AUTO, ray_address: str | None = None, named: bool = False
) -> Site:
    """The site that a run's workers are on; to be entered.

    Args:
        nodes: of the plan.
        fabric: how the processes are started; ``auto``: as this process was.
        ray_address: of the cluster for ``fabric=ray``.
        named: the names of the nodes were given, and are to be found among the hosts.

    Raises:
        UserError: if nodes cannot be where they should.
    """
    if fabric is Fabric.RAY:
        from meshloom.fabric.ray_site import RaySite

        return RaySite(nodes, address=ray_address, named=named)
    found = launched()
    _check_fabric(fabric, found)
    if found is not None:
        from meshloom.fabric.joined import JoinedSite

        return JoinedSite(found, nodes, named=named)
    if len(nodes) > 1:
        names = ", ".join(node.name for node in nodes[:4])
        raise UserError(
            f"the plan has {len(nodes)} nodes ({names}), and this command was started on one machine alone",
            where="cluster.nodes",
            fix="start it with torchrun, srun, or meshloom launch --hostfile HOSTS; or fabric=ray",
        )
    from meshloom.fabric.local import LocalSite

    return LocalSite(nodes[0].devices, node=nodes[0].name)


def _check_fabric(fabric: Fabric, found: Launched | None) -> None:
    kind = "local" if found is None else found.kind
    if fabric in (Fabric.AUTO, kind):
        return
    by = (
        "no launcher" if found is None else {"hostfile": "meshloom launch", "slurm": "srun"}.get(found.kind, found.kind)
    )
    raise UserError(f"fabric={fabric}, but {by} has started this run", where="fabric", fix="leave fabric=auto")
