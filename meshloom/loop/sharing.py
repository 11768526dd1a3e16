"""Which replica of a model computes which samples of a call.

Owns: sharing them out by what they cost, and letting them stay where they are. Refuses to know: who sends what (``loop.held``),
how parts are balanced (``samples.balance``). Always holds: samples that stay make no part heavier than the heaviest would be
without, but for a hundredth; each update is as even as if it were alone.

A step's samples are asked about all at once, and learned from update by update. So they are shared out for the updates first:
each update's parts go to the replicas so that all of them together are even too. If they are, nothing moves between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.fabric.dispatch import GroupLayout
from meshloom.loop.held import PLACE, HeldSamples
from meshloom.plan.arithmetic import pass_cost
from meshloom.plan.layout import RoleLayout
from meshloom.plan.model_folder import read_model_folder
from meshloom.plan.parameters import UnknownFamily, count_parameters
from meshloom.samples import Samples
from meshloom.samples.balance import Costs, share_out

_EVEN = 1.01
"""The heaviest part that is taken for samples to stay, as a multiple of the heaviest part without."""

Parts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How samples are shared out over the replicas of a model.

    Args:
        tokens_per_microbatch: hard bound on what a replica holds at once.
        pair_cost: of one token that sees another, in tokens.
    """

    tokens_per_microbatch: int
    pair_cost: float = 0.0

    def parts(self, samples: Samples, replicas: int) -> Parts:
        """Samples of each replica, by their places among them."""
        return share_out(samples, replicas, tokens_per_microbatch=self.tokens_per_microbatch, pair_cost=self.pair_cost)

    def costs(self, samples: Samples) -> Costs:
        """What the samples cost."""
        return Costs.of(samples, pair_cost=self.pair_cost)


def sharing_of(
    settings: TrainSettings | SftSettings,
    found: RoleLayout,
    *,
    backward: bool,
    tokens: int | None = None,
    path: str | None = None,
) -> Sharing:
    """How samples are shared out over a role's replicas. Ranks that split sequences hold a microbatch's tokens each.

    Args:
        settings: of the run.
        found: the role on its devices.
        backward: whether its passes are those of training.
        tokens: of a microbatch, if it is not ``batch.tokens_per_microbatch``.
        path: folder of its model, if it is not ``model.path``.
    """
    tokens = (tokens or settings.batch.tokens_per_microbatch) * found.mesh.size("sp")
    try:
        numbers = count_parameters(read_model_folder(Path(path or settings.model.path)).text_config)
    except UnknownFamily:
        return Sharing(tokens_per_microbatch=tokens)
    cost = pass_cost(numbers, backward=backward)
    return Sharing(tokens_per_microbatch=tokens, pair_cost=cost.per_pair / cost.per_token)


def shared_out(sharing: Sharing, samples: Samples, layout: GroupLayout, held: HeldSamples | None) -> Parts:
    """Samples of each replica, by their places among them.

    Args:
        sharing: by what they cost.
        samples: of a call.
        layout: of the replicas.
        held: what ranks have of the samples.
    """
    own = sharing.parts(samples, layout.num_parts)
    if held is None or layout.num_parts == 1 or not (held.knows(samples) and held.keeps(layout)):
        return own
    costs = sharing.costs(samples)
    bound = _EVEN * _heaviest(costs, own)
    where = held.replicas(samples, layout)
    stay = [[i for i, index in enumerate(where) if index == part] for part in range(layout.num_parts)]
    if -1 not in where and (held.must_stay(layout) or _heaviest(costs, stay) <= bound):
        return stay
    if held.is_whole(samples):
        of_updates = _by_updates(sharing, held.updates, layout.num_parts)
        if _heaviest(costs, of_updates) <= bound:
            held.settle(of_updates, layout)
            return of_updates
    return _nearest(own, where, samples.lengths.tolist())


def _heaviest(costs: Costs, parts: Parts) -> float:
    return max(map(costs.of_part, parts))


def _by_updates(sharing: Sharing, updates: Sequence[Samples], replicas: int) -> Parts:
    """Parts of a step's updates, the heaviest of each to the replica that has least of those before."""
    together: Parts = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for update in updates:
        costs, places = sharing.costs(update), update[PLACE].tolist()
        parts = sorted(sharing.parts(update, replicas), key=costs.of_part, reverse=True)
        for part, replica in zip(parts, sorted(range(replicas), key=lambda at: loads[at]), strict=True):
            together[replica] += [places[i] for i in part]
            loads[replica] += costs.of_part(part)
    return [sorted(part) for part in together]


def _nearest(parts: Parts, where: Sequence[int], lengths: Sequence[int]) -> Parts:
    """The same parts in another order: each to the replica that has most tokens of it, as far as that is free."""
    overlap = torch.zeros((len(parts), len(parts)), dtype=torch.int64)
    for number, part in enumerate(parts):
        for i in part:
            if where[i] >= 0:
                overlap[number, where[i]] += lengths[i]
    found: dict[int, list[int]] = {}
    given: set[int] = set()
    for place in overlap.flatten().argsort(descending=True, stable=True).tolist():
        number, replica = divmod(place, len(parts))
        if number not in given and replica not in found:
            found[replica] = parts[number]
            given.add(number)
    return [found[replica] for replica in range(len(parts))]
