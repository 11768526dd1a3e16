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
from meshloom.plan.weigh import Lack, Scales, Weighed

MOST = 10
"""Arrangements of different kinds that are found."""
_MOST_LOOKS = 1500
"""Closer looks after which a search ends with what it has; runs that are hard to fit on thousands of devices take so many."""


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
        best: of each kind the best arrangement, the fastest first.
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
) -> Found:
    """The fastest arrangements that fit, each of another kind.

    Args:
        families: of arrangements to choose from.
        scales: that weigh them.
        most: to be found.
        allowed: whether an arrangement may be chosen; none if all may.
    """
    return _Search(scales, most, allowed).run(families)


class _Search:
    """The queue, and what came out of it."""

    def __init__(self, scales: Scales, most: int, allowed: Callable[[TrainSettings, Arrangement], bool] | None) -> None:
        self.scales, self.most, self.allowed = scales, most, allowed
        self.found, self.queue, self._ties = Found(), list[_Entry](), count()
        self._lacking: dict[object, tuple[Arrangement, Lack]] = {}
        self._looks = 0

    def run(self, families: Iterable[Family]) -> Found:
        """Look until enough is found or nothing is left."""
        for family in families:
            self.found.considered += len(family)
            self._push(self.scales.family_bound(family), _Known.FAMILY, family)
        kinds: set[object] = set()
        while self.queue and len(self.found.best) < self.most:
            _, known, _, item = heapq.heappop(self.queue)
            if self._looks >= _MOST_LOOKS and not isinstance(item, Weighed):
                self.found.complete = False
                continue
            if isinstance(item, Weighed):
                if item.arrangement.kind not in kinds:
                    self.found.best.append(item)
                kinds.add(item.arrangement.kind)
            elif isinstance(item, Family):
                self._open(item)
            elif item.kind not in kinds:
                self._look_closer(item, known)
        fits = {_pools(weighed.arrangement) for weighed in self.found.best}
        fits |= {_pools(entry[3].arrangement) for entry in self.queue if isinstance(entry[3], Weighed)}
        self.found.lacking = [pair for pools, pair in self._lacking.items() if pools not in fits]
        return self.found

    def _push(self, seconds: float, known: _Known, item: Family | Arrangement | Weighed) -> None:
        heapq.heappush(self.queue, (seconds, known, next(self._ties), item))

    def _open(self, family: Family) -> None:
        for arrangement in family.arrangements():
            if self.allowed is None or self.allowed(self.scales.arranged(arrangement), arrangement):
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


def _pools(arrangement: Arrangement) -> object:
    """How an arrangement shares out the devices."""
    return tuple((role, placed.devices) for role, placed in arrangement.roles)
