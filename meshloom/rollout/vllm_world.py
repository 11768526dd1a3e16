"""A world of processes of vLLM's own, within a run's: the ranks of one replica, counted from 0.

Owns: the process groups of that world, which of the two worlds is torch.distributed's at the moment, and what ranks of a
replica must decide together. Refuses to know: engines, weights. Always holds: outside ``entered`` torch.distributed is as the
run has set it up; what vLLM makes inside never meets ranks of another replica, so that none waits for one without an engine.

vLLM takes the processes that torch.distributed knows of for its own. In a run that trains they are not: there are ranks that
only train, and ranks of other replicas.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d

from meshloom.rollout.endings import Decision
from meshloom.rollout.peers import Alone, OverRanks

_FIRST_GROUP = 1_000_000
"""Number of the first process group, by which it is named: names are one set for all of a process."""


@dataclass
class _State:
    """What torch.distributed keeps of process groups: see its ``_World``."""

    default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    group_count: int = _FIRST_GROUP
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """For reports of errors."""
        return [{"pg_name": name, "ranks": list(self.pg_group_ranks[pg])} for pg, name in self.pg_names.items()]


class VllmWorld:
    """The world of one replica; made by its ranks at once.

    Args:
        ranks: of the replica, in the run's world, in their order.
        device: of this rank.

    ``rank`` and ``size`` are this rank's number in it and their count; ``name`` is the replica's alone.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device) -> None:
        here = dist.get_rank() if dist.is_initialized() else ranks[0]
        self.rank, self.size, self.device = list(ranks).index(here), len(ranks), device
        self._state: Any = _State()
        self._outer = distributed_c10d._world
        store: Store = HashStore()
        if self.size > 1:
            store = PrefixStore(f"vllm/{ranks[0]}", distributed_c10d._get_default_store())
        if self.rank == 0:
            store.set("name", uuid4().hex)
        self.name = store.get("name").decode()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with self.entered():
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
            self._peers = Alone() if self.size == 1 else OverRanks(dist.group.WORLD)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, torch.distributed knows this world."""
        before, distributed_c10d._world = distributed_c10d._world, self._state
        try:
            yield
        finally:
            distributed_c10d._world = before

    @contextmanager
    def left(self) -> Iterator[None]:
        """Inside, it knows the run's again."""
        before, distributed_c10d._world = distributed_c10d._world, self._outer
        try:
            yield
        finally:
            distributed_c10d._world = before

    def first_says(self, number: int) -> int:
        """The first rank's number; due on all ranks."""
        with self.entered():
            return self._peers.first_says(number)

    def follow(self, decision: Decision, drawn: int) -> Decision:
        """The first rank's decision: see ``Peers.follow``; due on all ranks."""
        with self.entered():
            return self._peers.follow(decision, drawn)

    def gathered(self, value: Any) -> list[Any]:
        """What each rank says; due on all ranks."""
        told = [value] * self.size
        if self.size > 1:
            with self.entered():
                dist.all_gather_object(told, value)
        return told
