"""The actor's weights to the engines of other layouts and other ranks.

Owns: which ranks take part, and the memory of an engine's copy around a movement. Refuses to know: schedules, how the actor is
cut, how tensors travel (``weights.reshard``). Always holds: every engine gets the same values, rounded to its dtype, and proves
it; adapters are merged on the way.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshloom.train.mesh_model import MeshModel
from meshloom.weights.engine_copy import EngineCopy
from meshloom.weights.mesh_giver import MeshGiver
from meshloom.weights.mesh_probe import Asked, MeshProbe
from meshloom.weights.mesh_taker import MeshTaker
from meshloom.weights.reshard import Resharded, Resharder


class WeightMover:
    """This rank's end of every movement. Made by all ranks of the world at once.

    Args:
        actor: the model that is trained, if this rank has a part of it.
        copy: what an engine here samples with, if it has weights of its own.
        actor_ranks: of the world, in the order of the actor's mesh.
        engine_ranks: of all engines.
        device: of this rank.
        nodes: machine of each rank of the world.

    ``last`` is the newest movement, ``gap`` what the probe after it found.
    """

    def __init__(
        self,
        actor: MeshModel | None,
        copy: EngineCopy | None,
        actor_ranks: Sequence[int],
        engine_ranks: Sequence[int],
        device: torch.device,
        nodes: Sequence[int],
    ) -> None:
        self.last: Resharded | None = None
        self.gap: float | None = None
        self._copy = copy
        members = sorted({*actor_ranks, *engine_ranks})
        group = None if len(members) == dist.get_world_size() else dist.new_group(members)
        self._resharder: Resharder | None = None
        self._probe: MeshProbe | None = None
        if actor is not None or copy is not None:
            asked = None if copy is None else Asked.of_module(copy.module, copy.peers)
            self._probe = MeshProbe(actor, asked, group)
            self._resharder = Resharder(
                None if actor is None else MeshGiver(actor),
                None if copy is None else copy.taker,
                group=group,
                device=device,
                nodes=nodes,
                # Where engines take turns with the trainer, its passes need the memory.
                keep_buffers=not set(actor_ranks) & set(engine_ranks),
            )

    def move(self, version: int) -> None:
        """Give or take every tensor once, and prove it; due on all ranks of actor and engines at once.

        Raises:
            RunFault: on all of them, if a tensor did not arrive, which is named, or an engine uses it otherwise.
        """
        if self._resharder is None or self._probe is None:
            return
        if self._copy is not None:
            self._copy.take_memory()
        self.last = self._resharder.move(version)
        if self._copy is not None:
            self._copy.is_filled = True
        self.gap = self._probe.prove()


class ReferenceMover:
    """This rank's end of the movements from the actor to the reference. Made by all ranks of the world at once.

    Args:
        actor: the model that is trained, if this rank has a part of it.
        reference: the one that takes its weights, if this rank has a part of that.
        ranks: of the world, of both.
        device: of this rank.
        nodes: machine of each rank of the world.
    """

    def __init__(
        self,
        actor: MeshModel | None,
        reference: MeshModel | None,
        ranks: Sequence[int],
        device: torch.device,
        nodes: Sequence[int],
    ) -> None:
        group = None if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))
        self._resharder: Resharder | None = None
        if actor is not None or reference is not None:
            self._resharder = Resharder(
                None if actor is None else MeshGiver(actor),
                None if reference is None else MeshTaker(reference),
                group=group,
                device=device,
                nodes=nodes,
                keep_buffers=False,
            )

    def move(self, version: int) -> None:
        """Give or take every tensor once, and prove it; due on all ranks of both at once.

        Raises:
            RunFault: on all of them, if a tensor did not arrive, which is named.
        """
        if self._resharder is not None:
            self._resharder.move(version)
