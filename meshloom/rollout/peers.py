"""Devices that hold an engine's model together: what they exchange while they generate.

Owns: the exchanges. Refuses to know: how a model is cut, requests, weights. Always holds: all of them call the same ones in
the same order; what the first one decides (a deadline that is over, an abort) the others follow in the same round; they draw
the same tokens, and one that has drawn others stops the run.

Sums and gathered logits go from device to device, and can be captured in a graph; decisions go through the processors.

Legend: N rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding

from meshloom.config.errors import RunFault
from meshloom.rollout.endings import Decision
from meshloom.train.vocabulary import VocabularyPart


class Peers(Protocol):
    """Who holds the model."""

    count: int
    rank: int
    part: VocabularyPart | None
    """This device's part of the vocabulary, if it is cut."""

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of all devices' tensors, in place of this one's."""
        ...

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of the embedding, of which this device has ``weight``."""
        ...

    def whole(self, logits_NV: Tensor) -> Tensor:
        """Logits of all tokens, from those of this device's part."""
        ...

    def least(self, number: int) -> int:
        """The smallest of all devices' numbers."""
        ...

    def first_says(self, number: int) -> int:
        """The first device's number."""
        ...

    def follow(self, decision: Decision, drawn: int) -> Decision:
        """The first device's decision.

        Args:
            decision: this device's.
            drawn: a number of what was drawn in the last round.

        Raises:
            RunFault: if the first device has drawn something else.
        """
        ...


class Alone:
    """One device has all of it."""

    count, rank = 1, 0
    part: VocabularyPart | None = None

    def add_up(self, partial: Tensor) -> Tensor:
        return partial

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        return embedding(ids, weight)

    def whole(self, logits_NV: Tensor) -> Tensor:
        return logits_NV

    def least(self, number: int) -> int:
        return number

    def first_says(self, number: int) -> int:
        return number

    def follow(self, decision: Decision, drawn: int) -> Decision:
        return decision


class OverRanks:
    """Ranks of torch.distributed.

    Args:
        group: of them, in the order of their parts; it takes tensors of the devices and of the processors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.count, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.part: VocabularyPart | None = None

    def cut_vocabulary(self, rows: int) -> None:
        """Divide a vocabulary of so many tokens, which the ranks divide evenly."""
        each = rows // self.count
        self.part = VocabularyPart(self.rank * each, each, self._group)

    def add_up(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial, group=self._group)
        return partial

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        if self.part is None:
            return embedding(ids, weight)
        places = self.part.own(ids)
        rows = embedding(places.clamp(min=0), weight)
        return self.add_up(torch.where((places >= 0)[..., None], rows, 0))

    def whole(self, logits_NV: Tensor) -> Tensor:
        if self.part is None:
            return logits_NV
        parts = [torch.empty_like(logits_NV) for _ in range(self.count)]
        dist.all_gather(parts, logits_NV, group=self._group)
        return torch.cat(parts, 1)

    def least(self, number: int) -> int:
        told = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self._group)
        return int(told)

    def first_says(self, number: int) -> int:
        return self._tell([number])[0]

    def follow(self, decision: Decision, drawn: int) -> Decision:
        first = self._tell([decision.is_over, len(decision.aborted), len(decision.withdrawn), drawn])
        if first[3] != drawn:
            raise RunFault(
                f"device {self.rank} of an engine has drawn other tokens than the first one",
                where="parallel.rollout.tensor",
                why="the devices that hold a model together do not compute the same",
                fix="parallel.rollout.tensor=1; the run's checkpoints stand",
            )
        count = first[1] + first[2]
        mine = [*decision.aborted, *decision.withdrawn] if self.rank == 0 else [0] * count
        ended = self._tell(mine) if count else []
        return Decision(bool(first[0]), frozenset(ended[: first[1]]), frozenset(ended[first[1] :]))

    def _tell(self, numbers: Sequence[int]) -> list[int]:
        """The first rank's numbers."""
        told = torch.tensor(list(numbers), dtype=torch.int64)
        dist.broadcast(told, group=self._group, group_src=0)
        return told.tolist()
