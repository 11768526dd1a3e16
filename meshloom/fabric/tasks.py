"""One process among those that a launcher has started for a run.

Owns: the record. Always holds: task 0 is on the host where all tasks meet.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A process that a launcher has started.

    Args:
        kind: of the launcher.
        rank: among all tasks.
        world_size: tasks of the run.
        local_rank: on its node.
        node_index: of its node.
        nodes: number of tasks on each node.
        master: host and port of the store that tasks meet at.
        has_store: the launcher holds the store; otherwise task 0 does.
        key: that tells this run, or this attempt, from others that use the store.
        name: of this machine; empty: its host name.
    """

    kind: str
    rank: int
    world_size: int
    local_rank: int
    node_index: int
    nodes: tuple[int, ...]
    master: tuple[str, int]
    has_store: bool
    key: str
    name: str = ""
