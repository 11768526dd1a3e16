"""The log-probability probe over ranks: do all engines and the trainer give fixed tokens the same probability?

Owns: who computes what, and the verdict on all ranks. Refuses to know: how weights were moved. Always holds: checksums prove
that values arrived, this proves that they are used in the same way; a disagreement is the same error on every rank, and names
the engine's rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from meshloom.config.errors import RunFault
from meshloom.config.settings import ModelSettings
from meshloom.rollout.peers import Alone, Peers
from meshloom.rollout.torch_engine import vocabulary_of
from meshloom.train.mesh_model import MeshModel
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.vocabulary import VocabularyPart
from meshloom.weights.feed import gap_allowed
from meshloom.weights.probe import TokenLogprobs, probe_ids, trainer_logprobs


@dataclass(frozen=True)
class Asked:
    """An engine as the probe sees it.

    Args:
        logprobs: what it gives; asked on all ranks of the engine at once.
        vocabulary: tokens that it has.
        dtype: in which it computes.
        max_gap: tolerance, where the dtype's own is not meant.
    """

    logprobs: TokenLogprobs
    vocabulary: int
    dtype: torch.dtype
    max_gap: float | None = None

    @classmethod
    def of_module(cls, module: nn.Module, peers: Peers | None = None) -> "Asked":
        """A module, by its own layers; ``peers``: devices that hold it together."""
        peers = peers or Alone()
        return cls(module_logprobs(module, peers.part), vocabulary_of(module, peers), module.dtype)


class MeshProbe:
    """One rank's end of the probe.

    Args:
        trainer: the model that is trained, if this rank has a part of it.
        engine: what an engine here samples with, if there is one.
        group: of all ranks of both.
    """

    def __init__(self, trainer: MeshModel | None, engine: Asked | None, group: dist.ProcessGroup | None) -> None:
        self._group = dist.group.WORLD if group is None else group
        self._trainer, self._engine = trainer, None if engine is None else engine.logprobs
        mine = None if engine is None else (engine.vocabulary, engine.max_gap or gap_allowed(engine.dtype))
        told: list[tuple[int, float] | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, mine, group=self._group)
        rows, self._allowed = next(each for each in told if each is not None)
        self._ids = probe_ids(rows)

    def prove(self) -> float:
        """Compare; due on all ranks.

        Returns:
            The largest mean absolute difference of an engine.

        Raises:
            RunFault: on all ranks, if it is more than rounding explains.
        """
        mine = self._asked(), None if self._engine is None else self._engine(self._ids)
        ranks = dist.get_process_group_ranks(self._group)
        told = [mine] * len(ranks)
        dist.all_gather_object(told, mine, group=self._group)
        expected = _values(next(side for side, _ in told if side is not None))
        gaps = {
            rank: float((_values(found) - expected).abs().mean())
            for rank, (_, found) in zip(ranks, told, strict=True)
            if found is not None
        }
        worst = max(gaps, key=lambda rank: math.inf if math.isnan(gaps[rank]) else gaps[rank])
        if not gaps[worst] <= self._allowed:
            raise RunFault(
                f"the engine of rank {worst} and the trainer disagree about fixed tokens",
                where="weights",
                why=f"mean |Δ log-prob| is {gaps[worst]:.3g}, more than {self._allowed:g}, right after the weights were moved",
                fix="the same model.dtype for both; the run's checkpoints stand",
            )
        return gaps[worst]

    def _asked(self) -> list[list[float]] | None:
        """What the trainer gives; none from ranks that do not answer for it."""
        if self._trainer is None:
            return None
        found = trainer_logprobs(self._trainer)(self._ids)
        return found if self._trainer.mesh.answers else None


def module_logprobs(module: nn.Module, part: VocabularyPart | None = None) -> TokenLogprobs:
    """What a module gives, by its own layers; ``part``: of the vocabulary that its head has, if that is cut."""
    settings = ModelSettings(path="-", compile=False, gradient_checkpointing=False)
    model = TrainedModel(module, settings, MicrobatchBound(4096), None)
    model.head.part = part
    return trainer_logprobs(model)


def _values(sequences: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor(sequences, dtype=torch.float64)
