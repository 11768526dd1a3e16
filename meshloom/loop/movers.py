"""The actor's weights to the engines of other layouts and other ranks, and to the reference.

Owns: which ranks take part, and the memory of an engine's copy around a movement. Refuses to know: schedules, how the actor is
cut, how tensors travel (``weights.reshard``). Always holds: every engine gets the same values, rounded to its dtype, and proves
it; adapters are merged on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshloom.rollout.protocol import ReplicaEngine
from meshloom.train.mesh_model import MeshModel
from meshloom.weights.engine_copy import EngineCopy
from meshloom.weights.mesh_giver import MeshGiver, mesh_tensors
from meshloom.weights.mesh_probe import Asked, MeshProbe
from meshloom.weights.reshard import Resharded, Resharder
from meshloom.weights.shards import HeldTaker, Taker


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Where movements begin and end, as a rank sees it.

    Args:
        actor: the model that is trained, if this rank has a part of it.
        givers: ranks of the world that have, in the order of the actor's mesh.
        takers: ranks that take.
        device: of this rank.
        nodes: machine of each rank of the world.
    """

    actor: MeshModel | None
    givers: Sequence[int]
    takers: Sequence[int]
    device: torch.device
    nodes: Sequence[int]

    @property
    def share_ranks(self) -> bool:
        """Whether some ranks have both, so that they take turns."""
        return bool(set(self.givers) & set(self.takers))

    def group(self) -> dist.ProcessGroup | None:
        """Of all that take part; none if it is the whole world. Due on all ranks of the world at once."""
        members = sorted({*self.givers, *self.takers})
        return None if len(members) == dist.get_world_size() else dist.new_group(members)

    def resharder(
        self, taker: Taker | None, group: dist.ProcessGroup | None, *, keep_buffers: bool
    ) -> Resharder | None:
        """What moves the weights, if this rank takes part."""
        if self.actor is None and taker is None:
            return None
        giver = None if self.actor is None else MeshGiver(self.actor)
        return Resharder(giver, taker, group=group, device=self.device, nodes=self.nodes, keep_buffers=keep_buffers)


class EngineMover:
    """This rank's end of every movement to engines. Made by all ranks of the world at once.

    Args:
        ends: of the movements.
        taker: what takes weights here, for an engine.
        asked: that engine, for the probe.

    ``last`` is the newest movement, ``gap`` what the probe after it found.
    """

    def __init__(self, ends: Ends, taker: Taker | None, asked: Asked | None) -> None:
        self.last: Resharded | None = None
        self.gap: float | None = None
        group = ends.group()
        # Where engines take turns with the trainer, its passes need the memory.
        self._resharder = ends.resharder(taker, group, keep_buffers=not ends.share_ranks)
        self._probe = None if self._resharder is None else MeshProbe(ends.actor, asked, group)

    def bring(self, version: int) -> None:
        """Give or take every tensor once, and prove it; due on all ranks of actor and engines at once.

        Raises:
            RunFault: on all of them, if a tensor did not arrive, which is named, or an engine uses it otherwise.
        """
        if self._resharder is not None:
            self.last = self._resharder.move(version)
            self.gap = self._probe.prove()


class WeightMover(EngineMover):
    """To the embedded engine's copies.

    Args:
        ends: of the movements.
        copy: what an engine here samples with, if there is one.
        engine: that samples with it.
    """

    def __init__(self, ends: Ends, copy: EngineCopy | None, engine: ReplicaEngine | None) -> None:
        asked = None if copy is None else Asked.of_module(copy.module, copy.peers)
        super().__init__(ends, None if copy is None else copy.taker, asked)
        self._copy, self._engine = copy, engine

    def bring(self, version: int) -> None:
        if self._copy is not None:
            self._copy.take_memory()
        super().bring(version)
        if self._copy is not None:
            self._copy.is_filled = True
        if self._engine is not None:
            self._engine.load_weights(version)


class ReferenceMover:
    """This rank's end of the movements from the actor to the reference. Made by all ranks of the world at once.

    Args:
        ends: of the movements.
        reference: the one that takes its weights, if this rank has a part of that.
    """

    def __init__(self, ends: Ends, reference: MeshModel | None) -> None:
        taker = None if reference is None else HeldTaker(lambda: mesh_tensors(reference))
        self._resharder = ends.resharder(taker, ends.group(), keep_buffers=False)

    def bring(self, version: int) -> None:
        """Give or take every tensor once, and prove it; due on all ranks of both at once.

        Raises:
            RunFault: on all of them, if a tensor did not arrive, which is named.
        """
        if self._resharder is not None:
            self._resharder.move(version)
