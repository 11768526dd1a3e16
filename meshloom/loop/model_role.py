"""A model on many devices, as one object with the verbs of a trained model.

Owns: which samples go to which replica, and what is made of their answers. Refuses to know: algorithms, meshes' axes, what a
worker does. Always holds: a loss and its numbers are those of the whole update, however its samples are shared out; log-probs
come back in the order of the samples.

Legend: T tokens of all samples end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshloom.fabric.groups import WorkerGroup
from meshloom.plan.placement import Role
from meshloom.samples import Samples, concat
from meshloom.samples.balance import share_out
from meshloom.train.model import Loss
from meshloom.train.optimizer import StepStats

COMPUTE_DEADLINE_S = 3600.0
"""Seconds that one pass over a batch may take; dead and silent workers are noticed long before."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How samples are shared out over the replicas of a model.

    Args:
        tokens_per_microbatch: hard bound on what a replica holds at once.
        pair_cost: of one token that sees another, in tokens.
    """

    tokens_per_microbatch: int
    pair_cost: float = 0.0

    def parts(self, samples: Samples, replicas: int) -> list[list[int]]:
        """Samples of each replica, by their places."""
        return share_out(samples, replicas, tokens_per_microbatch=self.tokens_per_microbatch, pair_cost=self.pair_cost)


@dataclass
class RemoteModel:
    """A model that is trained over ranks.

    Args:
        group: its ranks.
        sharing: how samples go to its replicas.
        role: whose model it is: the actor's, or the critic's.
    """

    group: WorkerGroup
    sharing: Sharing
    role: Role = Role.ACTOR

    def forward(self, samples: Samples, *, temperature: float = 1.0, adapters: bool = True) -> tuple[Tensor, ...]:
        """As ``TrainedModel.forward``."""
        return asked(self.group, self.role, self.sharing, samples, temperature=temperature, adapters=adapters)

    def forward_backward(self, samples: Samples, loss: Loss, *, temperature: float = 1.0) -> dict[str, Any]:
        """As ``TrainedModel.forward_backward``; ``loss`` travels, so it is a record of this package."""
        parts = self.sharing.parts(samples, self.group.layout.num_parts)
        plain = replace(samples, meta={})
        reports = self.group.call(
            "forward_backward",
            {
                "samples": [plain.select(part) for part in parts],
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
        group: its ranks.
        role: whose model it is: the reference's own, or the actor's.
        sharing: how samples go to its replicas.
        with_actor: its ranks and those of the actor; none where it is never refreshed.
    """

    group: WorkerGroup
    role: Role
    sharing: Sharing
    with_actor: WorkerGroup | None = None

    def refresh(self, actor: RemoteModel, version: int) -> None:
        """As ``Reference.refresh``; its ranks take the weights from those of the actor."""
        if self.with_actor is None:
            raise RuntimeError("this reference is never refreshed")
        deadline_s = COMPUTE_DEADLINE_S
        self.with_actor.call("refresh_reference", {"version": version}, phase="reference", deadline_s=deadline_s)

    def logprobs(self, samples: Samples, *, temperature: float) -> Tensor:
        """As ``Reference.logprobs``."""
        adapters = self.role is not Role.ACTOR
        return asked(self.group, self.role, self.sharing, samples, temperature=temperature, adapters=adapters)[0]


def asked(
    group: WorkerGroup, role: Role, sharing: Sharing, samples: Samples, *, temperature: float, adapters: bool
) -> tuple[Tensor, ...]:
    """What the replicas of a model say of samples, [T]: log-probabilities and entropies, or a critic's values."""
    parts = sharing.parts(samples, group.layout.num_parts)
    plain = Samples(samples.lengths, {name: samples.tokens[name] for name in ("ids", "mask")})
    found = group.call(
        "forward",
        {
            "samples": [plain.select(part) for part in parts],
            "role": role,
            "temperature": temperature,
            "adapters": adapters,
        },
        phase="values" if role is Role.CRITIC else "log-prob",
        deadline_s=COMPUTE_DEADLINE_S,
    )
    together = in_order(samples, parts, found)
    return tuple(together[name] for name in (("value",) if role is Role.CRITIC else ("logprob", "entropy")))


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
