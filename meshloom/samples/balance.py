"""Sharing samples out over data-parallel ranks by what they cost.

Owns: which rank computes which sample. Refuses to know: ranks' devices, microbatches, losses. Always holds: every sample is
on exactly one rank; the choice follows from the costs alone, so it is the same on every run; where samples share nothing, no
rank costs more than four thirds of the heaviest of the best choice.

The samples of a group begin with the same prompt, which a rank computes once for all of them that it has. So a group is kept
whole where that costs nothing; it is split where the ranks are evener for it. Nothing needs to divide: ranks may have
different numbers of samples, or none.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshloom.samples.packing import SampleTooLong
from meshloom.samples.ragged import Samples

_EVEN = 1.001
"""The heaviest part, as a multiple of the mean, that is not looked at for improvements."""
_ROUNDS = 4
"""Improvements that are made, for each sample, before the choice is taken as it is."""


@dataclass(frozen=True)
class Costs:
    """What samples cost.

    Args:
        own: cost of each sample besides what it shares with its group.
        group: number of each sample's group.
        shared: cost of what a group shares, said for each of its samples; paid once by every rank that has one of them.
    """

    own: Sequence[float]
    group: Sequence[int]
    shared: Sequence[float]

    @classmethod
    def of(cls, samples: Samples, *, pair_cost: float = 0.0) -> "Costs":
        """Costs in computed tokens: a group's prompt once, each response, and attention over what a token sees.

        Args:
            samples: with ``mask`` and, where there are groups, ``group``; the prompt is what stands before the mask's first
                token.
            pair_cost: of one token that sees another, in tokens.
        """
        lengths = samples.lengths.numpy()
        prompt = _prompt_lengths(samples)
        response = lengths - prompt
        pairs = response * prompt + response * (response + 1) // 2
        group = samples["group"].tolist() if "group" in samples.rows else list(range(len(samples)))
        return cls(
            own=(response + pair_cost * pairs).tolist(),
            group=group,
            shared=(prompt + pair_cost * (prompt * (prompt + 1) // 2)).tolist(),
        )

    def of_part(self, part: Sequence[int]) -> float:
        """Cost of some samples on one rank."""
        prompts = {self.group[i]: self.shared[i] for i in part}
        return sum(self.own[i] for i in part) + sum(prompts.values())


def share_out(samples: Samples, parts: int, *, tokens_per_microbatch: int, pair_cost: float = 0.0) -> list[list[int]]:
    """Which samples each rank computes, ascending.

    Args:
        samples: as ``Costs.of``.
        parts: ranks.
        tokens_per_microbatch: hard bound on the tokens that a rank holds at once.
        pair_cost: as ``Costs.of``.

    Raises:
        SampleTooLong: if one sample exceeds the bound alone.
    """
    for index, length in enumerate(samples.lengths.tolist()):
        if length > tokens_per_microbatch:
            raise SampleTooLong(index, length, tokens_per_microbatch)
    return balance(Costs.of(samples, pair_cost=pair_cost), parts)


def balance(costs: Costs, parts: int) -> list[list[int]]:
    """Cut samples into parts whose heaviest is light.

    Whole groups and single samples are shared out longest first (longest processing time, Graham 1969); then samples move
    from the heaviest part to the lightest, or change places with one there, as long as that helps. The better is taken.

    Args:
        costs: of the samples.
        parts: how many; some are empty where there are fewer samples.

    Returns:
        Sample indices of each part, ascending.
    """
    if parts < 1:
        raise ValueError(f"samples cannot be shared out over {parts} parts")
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(costs.group):
        groups.setdefault(group, []).append(index)
    best: _Parts | None = None
    for units in (list(groups.values()), [[index] for index in range(len(costs.own))]):
        found = _Parts(costs, parts)
        found.fill(units)
        found.improve()
        if best is None or found.heaviest < best.heaviest:
            best = found
    return [sorted(part) for part in (best.members if best is not None else [])]


class _Parts:
    """Parts that are being filled."""

    def __init__(self, costs: Costs, count: int) -> None:
        self.costs = costs
        self.members: list[list[int]] = [[] for _ in range(count)]
        self.in_part: list[dict[int, int]] = [{} for _ in range(count)]
        self.loads = [0.0] * count

    @property
    def heaviest(self) -> float:
        return max(self.loads)

    def fill(self, units: list[list[int]]) -> None:
        """Give each unit to the lightest part, the most expensive first."""
        weights = [self.costs.of_part(unit) for unit in units]
        heap = [(0.0, part) for part in range(len(self.members))]
        for unit in sorted(range(len(units)), key=lambda u: (-weights[u], u)):
            _, part = heapq.heappop(heap)
            for index in units[unit]:
                self._put(index, part)
            heapq.heappush(heap, (self.loads[part], part))

    def improve(self) -> None:
        """Move samples, or exchange two, between the heaviest part and the lightest while the heavier one becomes lighter."""
        for _ in range(_ROUNDS * len(self.costs.own)):
            if self.heaviest <= _EVEN * sum(self.loads) / len(self.loads):
                return
            heavy = max(range(len(self.loads)), key=lambda p: (self.loads[p], -p))
            light = min(range(len(self.loads)), key=lambda p: (self.loads[p], p))
            if not (self._move(heavy, light) or self._exchange(heavy, light)):
                return

    def _put(self, index: int, part: int) -> None:
        self.loads[part] += self._joins(index, part)
        group = self.costs.group[index]
        self.in_part[part][group] = self.in_part[part].get(group, 0) + 1
        self.members[part].append(index)

    def _take(self, index: int, part: int) -> None:
        self.loads[part] -= self._leaves(index, part)
        self.in_part[part][self.costs.group[index]] -= 1
        self.members[part].remove(index)

    def _joins(self, index: int, part: int) -> float:
        alone = not self.in_part[part].get(self.costs.group[index])
        return self.costs.own[index] + (self.costs.shared[index] if alone else 0.0)

    def _leaves(self, index: int, part: int) -> float:
        alone = self.in_part[part][self.costs.group[index]] == 1
        return self.costs.own[index] + (self.costs.shared[index] if alone else 0.0)

    def _move(self, heavy: int, light: int) -> bool:
        """Move the sample that makes the heavier of two parts lightest; whether there is one that helps."""
        best, chosen = self.loads[heavy], -1
        for index in self.members[heavy]:
            after = max(self.loads[heavy] - self._leaves(index, heavy), self.loads[light] + self._joins(index, light))
            if after < best - _tolerance(best):
                best, chosen = after, index
        if chosen < 0:
            return False
        self._take(chosen, heavy)
        self._put(chosen, light)
        return True

    def _exchange(self, heavy: int, light: int) -> bool:
        """Exchange two samples so that half the difference goes over, as nearly as it can be; whether that helps."""
        if not self.members[light]:
            return False
        gives = np.array([self._leaves(index, heavy) for index in self.members[heavy]])
        takes = np.array([self._leaves(index, light) for index in self.members[light]])
        order = np.argsort(takes, kind="stable")
        wanted = gives - (self.loads[heavy] - self.loads[light]) / 2
        place = np.clip(np.searchsorted(takes[order], wanted), 0, len(order) - 1)
        best, chosen = self.loads[heavy], (-1, -1)
        for at, back in enumerate(place):
            pair = self.members[heavy][at], self.members[light][order[back]]
            if (after := self._after_exchange(*pair, heavy, light)) < best - _tolerance(best):
                best, chosen = after, pair
        if chosen[0] < 0:
            return False
        self._swap(*chosen, heavy, light)
        return True

    def _swap(self, given: int, taken: int, heavy: int, light: int) -> None:
        self._take(given, heavy)
        self._take(taken, light)
        self._put(given, light)
        self._put(taken, heavy)

    def _after_exchange(self, given: int, taken: int, heavy: int, light: int) -> float:
        """The heavier of two parts after an exchange."""
        if self.costs.group[given] == self.costs.group[taken]:
            change = self.costs.own[given] - self.costs.own[taken]
            return max(self.loads[heavy] - change, self.loads[light] + change)
        return max(
            self.loads[heavy] - self._leaves(given, heavy) + self._joins(taken, heavy),
            self.loads[light] - self._leaves(taken, light) + self._joins(given, light),
        )


def _tolerance(load: float) -> float:
    """What a part must become lighter by, so that rounding is never taken for an improvement."""
    return 1e-9 * load


def _prompt_lengths(samples: Samples) -> np.ndarray:
    """Tokens before the first one of the mask in each sample; all of them but none where the mask is empty."""
    mask_T, lengths = samples["mask"].numpy(), samples.lengths.numpy()
    starts = samples.offsets[:-1].numpy()
    first = np.flatnonzero(mask_T)
    at = np.searchsorted(first, starts)
    found = np.append(first, np.iinfo(np.int64).max)[at]
    return np.where(found < starts + lengths, found - starts, 0)
