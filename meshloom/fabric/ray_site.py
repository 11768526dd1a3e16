"""Workers on a Ray cluster.

Owns: a placement group of the plan's nodes, and an actor on each that starts the attendant there. Refuses to know: what workers
do. Always holds: Ray is imported here alone, and only when asked for; devices of one node of the plan are on one machine, two
nodes on two; an attendant ends with its actor, whatever ends that.
"""

import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from meshloom.config.errors import RunFault, UserError
from meshloom.fabric.attendant import Ticket, import_path, python_command
from meshloom.fabric.launch import PlannedNode
from meshloom.fabric.processes import ending_text
from meshloom.fabric.seats import seats_of
from meshloom.fabric.site import Node, Peer, Site

_PLACE_S, _ANSWER_S = 60.0, 10.0
_PINCH = 0.001
"""Of the resource that each machine of a cluster has by its address: asking for it pins a bundle there."""


def import_ray() -> Any:
    """Ray.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError("fabric=ray needs Ray", where="fabric", fix="pip install 'meshloom[ray]'") from error
    return ray


class Minder:
    """An actor on a node of the plan: it starts the attendant, which minds the workers."""

    def attend(self, ticket: str) -> str:
        """Serve the run; how the attendant ended.

        Args:
            ticket: of the attendant, without its parent.
        """
        told = Ticket.of(ticket, parent=os.getpid())
        process = subprocess.Popen(
            python_command("attendant", "main", import_path()), stdin=subprocess.PIPE, start_new_session=True
        )
        process.communicate(told.text().encode() + b"\n")
        return ending_text(process.returncode)


class RaySite(Site):
    """Nodes that Ray chooses, or those that the plan names.

    Args:
        nodes: of the plan.
        address: of the cluster. Default: what ``RAY_ADDRESS`` says, a cluster that runs on this machine, or one that is started
            here for the run.
        named: the nodes' names are those of machines; otherwise Ray chooses.
        start_deadline_s: seconds in which all attendants must have called in.
    """

    def __init__(
        self, nodes: Sequence[PlannedNode], *, address: str | None, named: bool, start_deadline_s: float = 300.0
    ) -> None:
        self._ray = import_ray()
        super().__init__(start_deadline_s=start_deadline_s)
        self._planned, self._address, self._named = nodes, address, named
        self._was_connected = bool(self._ray.is_initialized())
        self._group: Any = None
        self._minders: list[Any] = []
        self._ends: list[Any] = []

    def _start(self) -> None:
        if not self._was_connected:
            self._connect()
        self._place()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host = self._ray.util.get_node_ip_address()
        for index, node in enumerate(self._planned):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            needs = {"num_cpus": len(node.devices), "num_gpus": _num_gpus(node), "scheduling_strategy": place}
            minder = self._ray.remote(Minder).options(**needs).remote()
            slots = len(node.devices)
            ticket = Ticket(host, self.port, self._secret.hex(), node=node.name, slots=slots, node_index=index)
            self._minders.append(minder)
            self._ends.append(minder.attend.remote(ticket.text()))

    def _connect(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address is not None:
            _require_answer(self._address)
        try:
            self._ray.init(address=self._address or "auto", **quiet)
        except ConnectionError as error:
            if self._address is not None:
                raise _no_cluster(self._address, error) from error
            slots = sum(len(node.devices) for node in self._planned)
            cores = max(slots, os.cpu_count() or 1)
            self._ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)

    def _place(self) -> None:
        """Reserve the devices of each node."""
        bundles = [_bundle(node) for node in self._planned]
        if self._named:
            for node, bundle in zip(self._planned, bundles, strict=True):
                bundle[f"node:{self._machine_of(node)}"] = _PINCH
        strategy = "STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD"
        self._group = self._ray.util.placement_group(bundles, strategy=strategy)
        if not self._group.wait(_PLACE_S):
            raise UserError(
                f"the Ray cluster has no room for {len(bundles)} nodes as planned within {_PLACE_S:g} s",
                where="cluster",
                why=f"needed, each on a machine of its own: {bundles}; free in all: {self._ray.available_resources()}",
                fix="plan for what the cluster has, or end what holds it (`ray status`)",
            )

    def _machine_of(self, node: PlannedNode) -> str:
        """Address of the machine that a node is named after."""
        alive = [told for told in self._ray.nodes() if told["Alive"]]
        names = {str(told["NodeManagerHostname"]): str(told["NodeManagerAddress"]) for told in alive}
        found = [address for name, address in names.items() if node.name in (name, name.partition(".")[0], address)]
        if len(found) != 1:
            raise UserError(
                f"node {node.name} is no machine of the Ray cluster",
                where="cluster.node_names, or the names in the device map",
                why=f"machines: {', '.join(names)}",
                fix="name these, or leave the names out and let Ray choose",
            )
        return found[0]

    def _seated(self, attendants: Sequence[Peer]) -> tuple[Node, ...] | None:
        if len(attendants) < len(self._planned):
            return None
        there = sorted(attendants, key=lambda peer: int(peer.hello["node_index"]))
        seats = seats_of([(node.name, node.devices) for node in self._planned])
        return tuple(
            Node(node.name, peer, tuple(seat for seat in seats if seat.node_index == index))
            for index, (node, peer) in enumerate(zip(self._planned, there, strict=True))
        )

    def _check(self) -> None:
        done, _ = self._ray.wait(self._ends, timeout=0)
        if done:
            node = self._planned[self._ends.index(done[0])]
            try:
                why = f"its process {self._ray.get(done[0])}"
            except self._ray.exceptions.RayError as error:
                why = str(error)
            raise RunFault(f"{node.name} could not start its workers", why=why, fix="see Ray's logs of that node")

    def _closed(self) -> None:
        for minder in self._minders:
            self._ray.kill(minder)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        if not self._was_connected and self._ray.is_initialized():
            self._ray.shutdown()


def _require_answer(address: str) -> None:
    """Refuse an address at which nobody answers; Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return  # a word of Ray's own, such as ``auto``
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> UserError:
    fix = "`ray start --head` on the first machine says the address"
    return UserError(f"no Ray cluster answers at {address}", where="cluster.ray_address", why=str(error), fix=fix)


def _num_gpus(node: PlannedNode) -> int:
    return sum(device.startswith("cuda") for device in node.devices)


def _bundle(node: PlannedNode) -> dict[str, float]:
    gpus = _num_gpus(node)
    return {"CPU": float(len(node.devices)), **({"GPU": float(gpus)} if gpus else {})}
