"""Changes that make a supervised run fit on its devices, cheapest first.

Owns: which changes are tried, and which of them are told. Refuses to know: formulas of bytes (the caller's). Always holds: a
change that is suggested was made and counted again: an update fits, and nothing else is wrong that was not before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from meshloom.config.cluster_settings import OffloadPlace
from meshloom.config.settings import SftSettings
from meshloom.plan.checks import check_settings
from meshloom.plan.faults import Change, overrides, with_values
from meshloom.plan.hardware import DEVICES
from meshloom.plan.layout import Layout
from meshloom.plan.ledger import longest_sample_tokens
from meshloom.plan.meshes import Divisible
from meshloom.plan.placement import devices_of_machine
from meshloom.plan.savings import Step, device_steps, microbatch_step
from meshloom.plan.sft_devices import lay_out_sft

_SUGGESTIONS = 3
_DEGREES = (2, 4, 8)
_MEMORY = "device_memory_bytes"

Needed = Callable[[SftSettings, Layout], int]
"""Bytes that an update needs of each device."""


@dataclass(frozen=True, kw_only=True)
class SftSavings:
    """Ways to make a run fit.

    Args:
        settings: of the run that does not fit.
        layout: of its model.
        model: for checks of cuts; none if its config.json does not say.
        memory: bytes of a device.
        needed: counts a run.
    """

    settings: SftSettings
    layout: Layout
    model: Divisible | None
    memory: int
    needed: Needed
    _seen: dict[tuple[str, ...], int | None] = field(default_factory=dict)

    def found(self) -> tuple[tuple[str, ...], ...]:
        """Changes that are enough, as overrides; those that are so alone, else some together, and more devices; where none is,
        the smallest of the known devices that are."""
        ways, devices = tuple(self._ways()), device_steps(self.layout.topology)
        found = [*self._alone(ways)] or [*self._together(ways)]
        more = [*self._alone(devices)][:1] or ([] if found else [*self._together((*ways, *devices))])
        larger = sorted(device.memory_bytes for device in DEVICES if device.memory_bytes > self.memory)
        if not (found or more):
            more = [*self._alone((Step(price="", changes=tuple({_MEMORY: size} for size in larger)),))]
        return tuple(overrides(change) for change in (*found[: _SUGGESTIONS - len(more)], *more))

    def _ways(self) -> Iterator[Step]:
        settings, parallel = self.settings, self.settings.parallel.actor
        least = -(-longest_sample_tokens(settings) // parallel.sequence)
        path = "batch.tokens_per_microbatch"
        yield microbatch_step(settings.batch.tokens_per_microbatch, least, lambda size: {path: size})
        if settings.model.gradient_checkpointing is False:
            yield Step(price="", changes=({"model.gradient_checkpointing": True},))
        if settings.offload.actor.optimizer is OffloadPlace.NONE:
            yield Step(price="", changes=({"offload.actor.optimizer": OffloadPlace.HOST},))
        wider = (size for size in _DEGREES if size > parallel.tensor)
        yield Step(price="", changes=tuple({"parallel.actor.tensor": size} for size in wider))

    def _alone(self, steps: tuple[Step, ...]) -> Iterator[Change]:
        for step in steps:
            if (change := next(filter(self._fits, step.changes), None)) is not None:
                yield step.mildest(change, self._fits)

    def _together(self, steps: tuple[Step, ...]) -> Iterator[Change]:
        """One change of several steps, each as far as it helps, and then as mild as the others let it be."""
        made: dict[int, Change] = {}
        for place, step in enumerate(steps):
            for change in step.changes:
                least = self._lacks(_joined(made))
                lacks = self._lacks(_joined({**made, place: change}))
                if lacks is not None and (least is None or lacks < least):
                    made = {**made, place: change}
        if not self._fits(_joined(made)):
            return
        for place in tuple(made):
            rest = {other: change for other, change in made.items() if other != place}
            if self._fits(_joined(rest)):
                made = rest
                continue

            def is_enough(change: Change, place: int = place, rest: dict[int, Change] = rest) -> bool:
                return self._fits(_joined({**rest, place: change}))

            made[place] = steps[place].mildest(next(filter(is_enough, steps[place].changes)), is_enough)
        yield _joined(made)

    def _fits(self, change: Change) -> bool:
        return self._lacks(change) == 0

    def _lacks(self, change: Change) -> int | None:
        """Bytes that a device lacks after a change; none if something else is wrong then."""
        key = overrides(change)
        if key not in self._seen:
            self._seen[key] = self._count(change)
        return self._seen[key]

    def _count(self, change: Change) -> int | None:
        settings = with_values(self.settings, change)
        laid_out = lay_out_sft(settings, self.model, devices_of_machine())
        before = {problem.code for problem in check_settings(self.settings, None).problems}
        after = {problem.code for problem in check_settings(settings, None).problems}
        if laid_out.problems or not after <= before:
            return None
        return max(0, self.needed(settings, laid_out.layout) - change.get(_MEMORY, self.memory))


def _joined(made: dict[int, Change]) -> Change:
    return {path: value for change in made.values() for path, value in change.items()}
