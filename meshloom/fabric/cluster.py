"""From a run's settings to the nodes it is on.

Owns: what a launcher says of the cluster, as settings; the site of a topology. Refuses to know: roles. Always holds: what
the user said of the cluster wins; a contradiction is found when the nodes are matched.
"""

from collections.abc import Sequence

from meshloom.config.settings import TrainSettings
from meshloom.fabric.launch import PlannedNode, launched, open_site
from meshloom.fabric.site import Site
from meshloom.plan.faults import with_values
from meshloom.plan.topology import Topology


def with_launched_cluster(settings: TrainSettings) -> TrainSettings:
    """The settings, with as many nodes and devices as a launcher has started, where they do not say.

    A device map names the nodes itself.
    """
    found = launched()
    if found is None:
        return settings
    values: dict[str, int] = {}
    if settings.cluster.devices_per_node is None and len(set(found.nodes)) == 1:
        values["cluster.devices_per_node"] = found.nodes[0]
    says_nodes = settings.provenance.of("cluster.nodes") != "default" or bool(settings.cluster.node_names)
    if not says_nodes and settings.placement.map is None:
        values["cluster.nodes"] = len(found.nodes)
    return with_values(settings, values, found.kind) if values else settings


def site_of(settings: TrainSettings, topology: Topology, devices: Sequence[str]) -> Site:
    """The site of a run; to be entered.

    Args:
        settings: of the run.
        topology: its nodes.
        devices: of all its workers, by rank: ``cpu``, or ``cuda:1`` with the index on its node.

    Raises:
        UserError: if nodes cannot be where they should.
    """
    size = topology.devices_per_node
    nodes = [
        PlannedNode(topology.node_name(node), tuple(devices[node * size : (node + 1) * size]))
        for node in range(topology.num_nodes)
    ]
    address = settings.cluster.ray_address
    return open_site(nodes, fabric=settings.fabric, ray_address=address, named=bool(topology.names))
