"""The actor's weights to vLLM on other ranks and in other layouts.

Owns: the way of tensors into vLLM's loaders. Refuses to know: who takes part (``loop.movers``), schedules, how the actor is
cut, how tensors travel (``weights.reshard``), vLLM but for its receiver and world. Always holds: each rank of vLLM gets each
tensor whole, one bucket after the other, and puts its own part in its places; all tensors are taken whole by the ranks of a
replica together, and engine and trainer agree about fixed tokens, or the run stops on all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.loop.movers import Ends, EngineMover
from meshloom.rollout.vllm_build import VllmReceiver
from meshloom.rollout.vllm_engine import VllmEngine
from meshloom.rollout.vllm_world import VllmWorld
from meshloom.weights.mesh_probe import Asked
from meshloom.weights.movement import not_there, with_tied
from meshloom.weights.probe import TokenLogprobs
from meshloom.weights.reshard import Resharded
from meshloom.weights.tracing import watch_loading
from meshloom.weights.whole_tensors import WholeTaker


@dataclass(frozen=True, kw_only=True)
class VllmSide:
    """What is to be known of vLLM on a rank that has it.

    Args:
        world: of its replica.
        shapes: of the model's tensors, by their names in its folder; tied ones once.
        tied: second names of tensors, and their first ones.
        dtype: in which it computes.
        vocabulary: tokens that it has.
        max_gap: tolerance of the probe; none: the dtype's.
    """

    world: VllmWorld
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    dtype: torch.dtype
    vocabulary: int
    max_gap: float | None


class VllmMover(EngineMover):
    """This rank's end of every movement, and what brings vLLM its weights. Made by all ranks of the world at once.

    Args:
        ends: of the movements.
        vllm: of this rank, if there is one.

    ``engine`` is to be set where there is one.
    """

    def __init__(self, ends: Ends, vllm: VllmSide | None) -> None:
        self.engine: VllmEngine | None = None
        self._vllm, self._version = vllm, 0
        self._score: TokenLogprobs | None = None
        self._taker = None if vllm is None else WholeTaker(vllm.shapes, vllm.dtype, ends.device)
        asked = None if vllm is None else Asked(self._ask, vllm.vocabulary, vllm.dtype, vllm.max_gap)
        super().__init__(ends, self._taker, asked)

    def bring(self, version: int) -> None:
        """Give every tensor once, and let vLLM take it, wake and prove it. See ``EngineMover``."""
        self._version = version
        if self.engine is None:
            super().bring(version)
            return
        self.engine.load_weights(version)
        self.engine.wake()

    def move(self, receiver: VllmReceiver) -> Resharded:
        """Fill vLLM, which asks for it; see ``rollout.vllm_engine.WeightsFeed``."""
        tensors = with_tied(self._arriving(), self._vllm.tied)
        table = watch_loading(receiver.reload, tensors, self._vllm.tied)
        with self._vllm.world.left():
            told = self._vllm.world.gathered(table.copied_elements)
        taken = {name: sum(each.get(name, 0) for each in told) for name in self._vllm.shapes}
        if lost := [name for name, shape in self._vllm.shapes.items() if taken[name] < torch.Size(shape).numel()]:
            raise not_there(lost, "the engine's loaders did not take it whole")
        return self.last

    def prove(self, engine: TokenLogprobs) -> None:
        """Compare log-probabilities that vLLM gives with the trainer's; asked by vLLM."""
        self._score = engine
        self.gap = self._probe.prove()

    def _ask(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._score(sequences)

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors as they become whole. What travels does so in the run's world, whoever asks in vLLM's."""
        moving = self._resharder.moving(self._version)
        while True:
            with self._vllm.world.left():
                try:
                    next(moving)
                except StopIteration as end:
                    self.last = end.value
                    return
            yield from self._taker.finished()
