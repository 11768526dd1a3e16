"""A site whose attendants a launcher has started.

Owns: matching the nodes of the plan to the hosts that are there. Refuses to know: which launcher it was. Always holds: a node
that is missing, or has another number of processes than devices, ends the run with the same message on every rank.
"""

import json
import os
from collections import defaultdict
from collections.abc import Sequence

from meshloom.config.errors import UserError
from meshloom.fabric.launch import Launched, PlannedNode
from meshloom.fabric.meeting import end_with_parent
from meshloom.fabric.seats import Seat, seats_of
from meshloom.fabric.site import Node, Peer, Site

_HOW = {
    "torchrun": "torchrun --nnodes={nodes} --nproc-per-node={slots}",
    "slurm": "srun --nodes={nodes} --ntasks-per-node={slots}",
    "hostfile": "{nodes} lines of `HOST slots={slots}` in the host file",
}


class JoinedSite(Site):
    """Nodes whose attendants call in by themselves.

    Args:
        launched: what was started.
        nodes: of the plan.
        named: their names are to be found among the hosts; otherwise the launcher's order counts.
    """

    def __init__(self, launched: Launched, nodes: Sequence[PlannedNode], *, named: bool) -> None:
        super().__init__()
        self._launched, self._planned, self._named = launched, nodes, named

    def _start(self) -> None:
        end_with_parent()
        with os.fdopen(self._launched.descriptor, "w") as pipe:
            pipe.write(json.dumps({"port": self.port, "secret": self._secret.hex()}) + "\n")

    def finish(self, code: int, text: str = "") -> None:
        """As ``Site.finish``. What attendants print over ssh comes out where this process has said it already."""
        super().finish(code, "" if self._launched.kind == "hostfile" else text)

    def _missing(self, attendants: Sequence[Peer]) -> str:
        hosts = ", ".join(sorted({_label(peer) for peer in attendants})) or "none"
        return f"{len(attendants)} of {self._launched.num_attendants} processes are there; hosts: {hosts}"

    def _seated(self, attendants: Sequence[Peer]) -> tuple[Node, ...] | None:
        if len(attendants) < self._launched.num_attendants:
            return None
        there: dict[int, list[Peer]] = defaultdict(list)
        for peer in sorted(attendants, key=lambda one: (one.hello["node_index"], one.hello["local_rank"])):
            there[peer.hello["node_index"]].append(peer)
        order = match_nodes(self._planned, [_label(there[index][0]) for index in sorted(there)], named=self._named)
        present = [there[index] for index in sorted(there)]
        self._check_slots([present[at] for at in order])
        seats = seats_of([(node.name, node.devices) for node in self._planned])
        return tuple(
            node
            for index, at in enumerate(order)
            for node in _nodes(self._planned[index].name, index, present[at], seats)
        )

    def _check_slots(self, present: Sequence[Sequence[Peer]]) -> None:
        for planned, peers in zip(self._planned, present, strict=True):
            slots = sum(int(peer.hello["slots"]) for peer in peers)
            if slots != len(planned.devices):
                how = _HOW[self._launched.kind].format(nodes=len(self._planned), slots=len(planned.devices))
                raise UserError(
                    f"{planned.name} (host {_label(peers[0])}) has {slots} processes for {len(planned.devices)} devices",
                    where="cluster.devices_per_node",
                    why="each device has a process of its own",
                    fix=f"{how}, or cluster.devices_per_node={slots}",
                )


def _nodes(name: str, index: int, peers: Sequence[Peer], seats: Sequence[Seat]) -> list[Node]:
    """The attendants of one node, each with its seats."""
    own = [seat for seat in seats if seat.node_index == index]
    nodes = []
    for peer in peers:
        count = int(peer.hello["slots"])
        nodes.append(Node(name, peer, tuple(own[:count])))
        own = own[count:]
    return nodes


def _label(peer: Peer) -> str:
    return str(peer.hello["node"] or peer.hello["host"])


def match_nodes(planned: Sequence[PlannedNode], hosts: Sequence[str], *, named: bool) -> list[int]:
    """For each node of the plan, the position of its host.

    Args:
        planned: nodes of the plan.
        hosts: that are there, in the launcher's order.
        named: the names are those of hosts, with or without their domain; otherwise the order counts.

    Raises:
        UserError: if there are more or fewer, or a name is not there.
    """
    shown = ", ".join(hosts)
    if len(planned) != len(hosts):
        raise UserError(
            f"the plan has {len(planned)} nodes, but the run was started on {len(hosts)}",
            where="cluster.nodes",
            why=f"hosts: {shown}",
            fix=f"start it on {len(planned)} nodes, or cluster.nodes={len(hosts)}",
        )
    if not named:
        return list(range(len(hosts)))
    short = [host.partition(".")[0] for host in hosts]
    order = []
    for node in planned:
        found = [at for at, host in enumerate(hosts) if node.name in (host, short[at])]
        if len(found) != 1:
            what = "is not among the hosts of this run" if not found else "is the name of several hosts of this run"
            raise UserError(
                f"node {node.name} {what}",
                where="cluster.node_names, or the names in the device map",
                why=f"hosts: {shown}",
                fix=f"name these, or set MESHLOOM_NODE={node.name} on the host that is meant",
            )
        order.append(found[0])
    return order
