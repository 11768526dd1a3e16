"""What a launcher says of the cluster, as settings.

Owns: which of them it decides. Refuses to know: roles. Always holds: what the user said of the cluster wins; a contradiction is
found when the nodes are matched.
"""

from typing import TypeVar

from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.fabric.launch import launched
from meshloom.plan.faults import with_values

S = TypeVar("S", TrainSettings, SftSettings)


def with_launched_cluster(settings: S) -> S:
    """The settings, with as many nodes and devices as a launcher has started, where they do not say.

    A device map names the nodes itself.
    """
    found = launched()
    if found is None:
        return settings
    values: dict[str, int] = {}
    if settings.cluster.devices_per_node is None and len(set(found.nodes)) == 1:
        values["cluster.devices_per_node"] = found.nodes[0]
    says_nodes = settings.provenance.of("cluster.nodes") != "default"
    mapped = isinstance(settings, TrainSettings) and settings.placement.map is not None
    if not says_nodes and not mapped:
        values["cluster.nodes"] = len(found.nodes)
    return with_values(settings, values, found.kind) if values else settings
