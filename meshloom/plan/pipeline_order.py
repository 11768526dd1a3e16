"""The order in which devices of a pipeline compute microbatches where each has several stages, and what any order costs.

Owns: which microbatch a device computes when, how many it has in flight, how long it stands empty. Refuses to know: layers,
tensors, bytes, seconds. Always holds: what a stage needs was made at least one tick before; both follow from counts alone, so
all devices make the same table, and what is sent in a tick is taken in that tick.

With one stage on each device the order is one forward, one backward (1F1B). With several it is interleaved (Narayanan et al.
2021, arXiv:2104.04473, section 2.2): device d of p has stages d, p + d, 2p + d, …; a device takes a round of microbatches
through its first stage, the same through its second, and so on, forward and, later, backward, from the last stage to the first.
In a tick a device computes at most one stage forward and then one backward. Each round has p microbatches or more, so that
what leaves the last device is at the first before it is needed: no number of microbatches is asked for. Rounds are as small as
that, and as equal as they get; with fewer than p microbatches some ticks have nothing to do.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Task(NamedTuple):
    """What a device computes in one direction in a tick.

    Args:
        microbatch: its index.
        stage: of all stages, from 0.
    """

    microbatch: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """The order of an update.

    Args:
        devices: of the pipeline.
        stages_per_device: of each.
        microbatches: of the update on these devices; with none there is nothing to do.
    """

    devices: int
    stages_per_device: int
    microbatches: int

    @property
    def num_stages(self) -> int:
        return self.devices * self.stages_per_device

    @cached_property
    def _rounds(self) -> list[int]:
        """Places of each round; only with fewer microbatches than devices there are more places than microbatches."""
        count = max(1, self.microbatches // self.devices)
        each, more = divmod(max(self.microbatches, self.devices), count)
        return [each + (index < more) for index in range(count)]

    @cached_property
    def _turns(self) -> list[tuple[int, int] | None]:
        """Microbatch, and how many stages of the device it has behind it, in the order of forward passes; none: nothing is
        due."""
        found: list[tuple[int, int] | None] = []
        start = 0
        for places in self._rounds:
            inside = range(start, start + places)
            found += [
                (i, turn) if i < self.microbatches else None for turn in range(self.stages_per_device) for i in inside
            ]
            start += places
        while found and found[-1] is None:
            found.pop()
        return found

    @property
    def _lag(self) -> int:
        """Ticks from the first forward pass on the first device to its first backward pass: to the last stage and back."""
        return 2 * (self.devices - 1) + (self.stages_per_device - 1) * max(self._rounds)

    def num_ticks(self, *, backward: bool) -> int:
        """Ticks until everything is done."""
        return len(self._turns) + (self._lag if backward else self.devices - 1)

    def forward(self, device: int, tick: int) -> Task | None:
        """What a device computes forward in a tick; none: nothing."""
        return self._task(device, tick - device, forward=True)

    def backward(self, device: int, tick: int) -> Task | None:
        """What a device computes backward in a tick, after its forward pass; none: nothing."""
        return self._task(device, tick - (self._lag - device), forward=False)

    def _task(self, device: int, number: int, *, forward: bool) -> Task | None:
        turn = self._turns[number] if 0 <= number < len(self._turns) else None
        if turn is None:
            return None
        microbatch, behind = turn
        own = behind if forward else self.stages_per_device - 1 - behind
        return Task(microbatch, own * self.devices + device)

    def in_flight(self, device: int) -> int:
        """Most passes through a stage whose activations a device has at once."""
        return min(self.microbatches * self.stages_per_device, self._lag - 2 * device + 1)


def passes_in_flight(*, devices: int, device: int, stages_per_device: int, microbatches: int) -> int:
    """Most passes through one of its stages whose activations a device of a pipeline has at once, in an update."""
    if stages_per_device == 1:
        return min(microbatches, devices - device)
    order = Interleaving(devices=devices, stages_per_device=stages_per_device, microbatches=max(1, microbatches))
    return order.in_flight(device)


def bubble(*, devices: int, stages_per_device: int, microbatches: int) -> float:
    """Time in which a device of a pipeline has nothing to do, as a share of the time in which it computes.

    It is (p − 1) ÷ (m · v) with p devices, m microbatches and v stages on each (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2.2); with fewer microbatches than devices, their places in a round stay empty on each stage but the last.
    """
    missing = (stages_per_device - 1) * max(0, devices - microbatches)
    return (devices - 1 + missing) / (microbatches * stages_per_device)
