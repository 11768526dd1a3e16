"""A model on many devices, as one object with the verbs of a trained model.

Owns: what is asked of its replicas, and what is made of their answers. Refuses to know: algorithms, meshes' axes, which samples
go where (``loop.sharing``), what is sent of them (``loop.held``), what a worker does. Always holds: a loss and its numbers are
those of the whole update, however its samples are shared out; log-probs come back in the order of the samples.

Legend: T tokens of all samples end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.fabric.groups import WorkerGroup
from meshloom.loop.held import HeldSamples, Shares
from meshloom.loop.sharing import Sharing, shared_out
from meshloom.plan.placement import Role
from meshloom.samples import Samples, concat
from meshloom.train.model import Loss
from meshloom.train.optimizer import StepStats

COMPUTE_DEADLINE_S = 3600.0
"""Seconds that one pass over a batch may take; dead and silent workers are noticed long before."""
_KEPT_AS = {Role.REFERENCE: "reference_logprob", Role.CRITIC: "values"}
"""Columns of a batch that models compute, as the batch has them."""


@dataclass(frozen=True)
class RoleRanks:
    """The ranks of a model, and what they hold of a step's samples.

    Args:
        group: of them.
        sharing: how samples go to its replicas.
        knowing: those of them that have what the model's head says.
        held: what ranks hold of the samples; none where nothing is kept.
    """

    group: WorkerGroup
    sharing: Sharing
    knowing: frozenset[int] = frozenset()
    held: HeldSamples | None = None

    def shares(self, samples: Samples) -> Shares:
        """Samples shared out over the replicas."""
        return Shares(samples, shared_out(self.sharing, samples, self.group.layout, self.held), self.held)

    def ask(self, role: Role, samples: Samples, *, temperature: float, adapters: bool) -> Tensor:
        """Log-probabilities, or a critic's values [T]; ranks that keep the samples keep them too, and may alone have them:
        then they are ``nan`` here."""
        shares = self.shares(Samples(samples.lengths, {n: samples.tokens[n] for n in ("ids", "mask")}, samples.rows))
        name = _KEPT_AS.get(role, "old_logprob" if adapters else "reference_logprob")
        layout, held = self.group.layout, self.held or HeldSamples(())
        tells = held.need_tell(name, samples, shares.parts, layout, self.knowing)
        asked = {"role": role, "temperature": temperature, "adapters": adapters, "kept_as": name, "tells": tells}
        found = self.group.call(
            "forward",
            {"samples": shares, **asked},
            phase="values" if role is Role.CRITIC else "log-prob",
            deadline_s=COMPUTE_DEADLINE_S,
        )
        found_T = next(iter(in_order(samples, shares.parts, found).tokens.values())) if tells else None
        ranks = {r: part for r, part in zip(layout.ranks, layout.data_index, strict=True) if r in self.knowing}
        return held.computed(name, found_T, samples, shares.parts, ranks)


@dataclass
class RemoteModel:
    """A model that is trained over ranks.

    Args:
        ranks: that it is on.
        role: whose model it is: the actor's, or the critic's.
    """

    ranks: RoleRanks
    role: Role = Role.ACTOR

    @property
    def group(self) -> WorkerGroup:
        return self.ranks.group

    def forward(self, samples: Samples, *, temperature: float = 1.0, adapters: bool = True) -> tuple[Tensor, ...]:
        """As ``TrainedModel.forward``, but for entropies, which nobody asks for over devices."""
        found_T = self.ranks.ask(self.role, samples, temperature=temperature, adapters=adapters)
        return (found_T,)

    def forward_backward(self, samples: Samples, loss: Loss, *, temperature: float = 1.0) -> dict[str, Any]:
        """As ``TrainedModel.forward_backward``; ``loss`` travels, so it is a record of this package."""
        reports = self.group.call(
            "forward_backward",
            {
                "samples": self.ranks.shares(samples),
                "role": self.role,
                "loss": loss,
                "temperature": temperature,
            },
            phase=self._phase,
            deadline_s=COMPUTE_DEADLINE_S,
        )
        return merged(reports)

    def optim_step(self, total_updates: int) -> StepStats:
        """As ``TrainedModel.optim_step``."""
        return self.group.call(
            "optim_step",
            {"role": self.role, "total_updates": total_updates},
            phase=self._phase,
            deadline_s=COMPUTE_DEADLINE_S,
        )

    @property
    def _phase(self) -> str:
        return "critic" if self.role is Role.CRITIC else "update"

    def take_utilization(self, seconds: float) -> dict[str, float]:
        """As ``TrainedModel.take_utilization``: the mean over the ranks."""
        found = self.group.call("take_utilization", {"seconds": seconds}, phase="report", deadline_s=300.0)
        names = set.intersection(*(set(each) for each in found))
        return {name: sum(each[name] for each in found) / len(found) for name in sorted(names)}


@dataclass(frozen=True)
class RemoteReference:
    """The reference on its ranks: a frozen copy, or the actor without its adapters.

    Args:
        ranks: that it is on.
        role: whose model it is: the reference's own, or the actor's.
        with_actor: its ranks and those of the actor; none where it is never refreshed.
    """

    ranks: RoleRanks
    role: Role
    with_actor: WorkerGroup | None = None

    def refresh(self, actor: RemoteModel, version: int) -> None:
        """As ``Reference.refresh``; its ranks take the weights from those of the actor."""
        if self.with_actor is None:
            raise RuntimeError("this reference is never refreshed")
        deadline_s = COMPUTE_DEADLINE_S
        self.with_actor.call("refresh_reference", {"version": version}, phase="reference", deadline_s=deadline_s)

    def logprobs(self, samples: Samples, *, temperature: float) -> Tensor:
        """As ``Reference.logprobs``."""
        return self.ranks.ask(self.role, samples, temperature=temperature, adapters=self.role is not Role.ACTOR)


def in_order(samples: Samples, parts: Sequence[Sequence[int]], found: Sequence[dict[str, Tensor]]) -> Samples:
    """Token columns that replicas computed for parts of the samples, in the order of the samples.

    Args:
        samples: all of them.
        parts: places of each replica's samples.
        found: columns by name, those of a replica end to end.
    """
    pieces = [Samples(samples.lengths[list(part)], columns) for part, columns in zip(parts, found, strict=True) if part]
    places = torch.tensor([place for part in parts for place in part], dtype=torch.int64)
    return concat(pieces).select(places.argsort())


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What replicas reported of their parts of an update: values that add up. A replica without samples reports nothing."""
    together: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            together[name] = together[name] + value if name in together else value
    return together
