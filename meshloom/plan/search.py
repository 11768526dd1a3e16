"""The search for an arrangement: those that take least time of all that fit.

Owns: the order in which arrangements are looked at, and when to stop. Refuses to know: what an arrangement is made of, how it
is weighed. Always holds: what it finds is best by the cost model, not merely good, or it says that it ended early: what
was not weighed has a bound that is above all that was found; the same run is always arranged in the same way.

Arrangements wait in a queue by what they take at least: first in families, as if memory were no matter, then each as if only
training had to fit, at last as forecast. The first that comes out forecast is the best.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

from meshloom.config.settings import TrainSettings
from meshloom.plan.arrangement import Arrangement
from meshloom.plan.candidates import Family
from meshloom.plan.weigh import Scales
from meshloom.plan.weighed import Lack, Weighed

MOST = 10
"""Arrangements of different kinds that are found."""
_MOST_LOOKS = 1500
"""Closer looks after which a search ends with what it has; runs that are hard to fit on thousands of devices take so many."""
_COMPARED = 60
"""Closer looks for the fastest placement of another kind than all that were found: with or without devices of its own for
generation."""


class _Known(IntEnum):
    """How well a time is known."""

    FORECAST = 0
    CLOSER = 1
    BOUND = 2
    FAMILY = 3


_Entry = tuple[float, _Known, int, Family | Arrangement | Weighed]


@dataclass(kw_only=True)
class Found:
    """What a search has found.

    Args:
        best: of each kind the best arrangement, the fastest first; the last may be there for comparison.
        lacking: of each way to share out the devices what the arrangement that came nearest lacks, where none fits.
        considered: arrangements that there were.
        weighed: of them, those that were forecast.
        complete: whether nothing better can be among those that were not.
    """

    best: list[Weighed] = field(default_factory=list)
    lacking: list[tuple[Arrangement, Lack]] = field(default_factory=list)
    considered: int = 0
    weighed: int = 0
    complete: bool = True


def search(
    families: Iterable[Family],
    scales: Scales,
    *,
    most: int = MOST,
    allowed: Callable[[TrainSettings, Arrangement], bool] | None = None,
    accepted: Callable[[Weighed], bool] | None = None,
) -> Found:
    """The fastest arrangements that fit, each of another kind.

    Args:
        families: of arrangements to choose from.
        scales: that weigh them.
        most: to be found.
        allowed: whether an arrangement may be chosen; none if all may.
        accepted: a last look at what would be chosen; none if it needs none.
    """
    return _Search(scales, most, allowed, accepted).run(families)


class _Search:
    """The queue, and what came out of it."""

    def __init__(
        self,
        scales: Scales,
        most: int,
        allowed: Callable[[TrainSettings, Arrangement], bool] | None,
        accepted: Callable[[Weighed], bool] | None,
    ) -> None:
        self.scales, self.most, self.allowed, self.accepted = scales, most, allowed, accepted
        self.found, self.queue, self._ties = Found(), list[_Entry](), count()
        self._lacking: dict[object, tuple[Arrangement, Lack]] = {}
        self._kinds: set[object] = set()
        self._looks, self._most_looks = 0, _MOST_LOOKS

    def run(self, families: Iterable[Family]) -> Found:
        """Look until enough is found or nothing is left."""
        for family in families:
            self.found.considered += len(family)
            self._push(self.scales.family_bound(family), _Known.FAMILY, family)
        self._draw(lambda: len(self.found.best) < self.most)
        if self.found.best and len({weighed.arrangement.colocated for weighed in self.found.best}) == 1:
            self._other_pools(not self.found.best[0].arrangement.colocated)
        fits = {_pools(weighed.arrangement) for weighed in self.found.best}
        fits |= {_pools(entry[3].arrangement) for entry in self.queue if isinstance(entry[3], Weighed)}
        self.found.lacking = [pair for pools, pair in self._lacking.items() if pools not in fits]
        return self.found

    def _draw(self, wants: Callable[[], bool]) -> None:
        """Take from the queue what takes least, until nothing more is wanted."""
        while self.queue and wants():
            _, known, _, item = heapq.heappop(self.queue)
            if self._looks >= self._most_looks and not isinstance(item, Weighed):
                self.found.complete = self.found.complete and not wants()
            elif isinstance(item, Weighed):
                if item.arrangement.kind not in self._kinds and (self.accepted is None or self.accepted(item)):
                    self.found.best.append(item)
                    self._kinds.add(item.arrangement.kind)
            elif isinstance(item, Family):
                self._open(item)
            elif item.kind not in self._kinds:
                self._look_closer(item, known)

    def _other_pools(self, colocated: bool) -> None:
        """The fastest that shares out the devices in the other way, for comparison."""
        count, complete = len(self.found.best), self.found.complete
        self._most_looks = self._looks + _COMPARED
        self.queue = [entry for entry in self.queue if _arrangement(entry).colocated is colocated]
        heapq.heapify(self.queue)
        self._draw(lambda: len(self.found.best) == count)
        self.found.complete = complete

    def _push(self, seconds: float, known: _Known, item: Family | Arrangement | Weighed) -> None:
        heapq.heappush(self.queue, (seconds, known, next(self._ties), item))

    def _open(self, family: Family) -> None:
        for arrangement in family.arrangements():
            if self.allowed is None or self.allowed(self.scales.settings_of(arrangement), arrangement):
                self._push(self.scales.bound(arrangement), _Known.BOUND, arrangement)

    def _look_closer(self, arrangement: Arrangement, known: _Known) -> None:
        self._looks += 1
        if known is _Known.BOUND:
            answer: float | Weighed | Lack = self.scales.closer_bound(arrangement)
        else:
            answer = self.scales.weigh(arrangement)
            self.found.weighed += 1
        if isinstance(answer, Lack):
            before = self._lacking.get(_pools(arrangement))
            if before is None or answer.lacking < before[1].lacking:
                self._lacking[_pools(arrangement)] = arrangement, answer
        elif isinstance(answer, Weighed):
            self._push(answer.step_s, _Known.FORECAST, answer)
        else:
            self._push(answer, _Known.CLOSER, arrangement)


def _arrangement(entry: _Entry) -> Arrangement:
    """The arrangement of an entry, or one of its family."""
    item = entry[3]
    if isinstance(item, Family):
        return next(item.arrangements())
    return item.arrangement if isinstance(item, Weighed) else item


def _pools(arrangement: Arrangement) -> object:
    """How an arrangement shares out the devices."""
    return tuple((role, placed.devices) for role, placed in arrangement.roles)
