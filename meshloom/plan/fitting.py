"""Changes that make a run fit on its devices, cheapest first.

Owns: which changes are tried, in which order, and what each costs. Refuses to know: how a plan is shown. Always holds: a
change that is suggested was made and forecast again: all phases fit, and nothing else is wrong that was not before.

The order: a smaller cache where generation alone is too large; microbatch; recompute; sharding; the optimizer away from the
device; parameters away from it; more devices; where all of that is not enough, shorter responses, and devices with more memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from meshloom.config.settings import TrainSettings
from meshloom.plan.checks import check_settings
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.device_checks import lay_out
from meshloom.plan.faults import Change, overrides, with_values
from meshloom.plan.forecast import Forecast, Group, count_roles, device_groups, forecast
from meshloom.plan.hardware import DEVICES, Device
from meshloom.plan.layout import Layout
from meshloom.plan.meshes import Divisible
from meshloom.plan.placement import Role, placements
from meshloom.plan.residency import EngineRole, Phase, Residency
from meshloom.plan.savings import Step, more_devices, responses, steps
from meshloom.plan.sharded_memory import moves

GIB = 2**30
_SUGGESTIONS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that can be forecast again after a change.

    Args:
        settings: of the run, with what its device map says.
        model: in numbers.
        divisible: the same model, for checks of its cuts; none if its config.json does not say.
        adapters: parameters of adapters; none where all are trained.
        critic: the critic's model in numbers, as a language model; none for the actor's.
        memory: bytes of a device; none if that is not known.
        device: what the devices are; none if that is not known.
        machine: devices that this machine has.
        constants: of the cost model.
    """

    settings: TrainSettings
    model: DecoderNumbers
    divisible: Divisible | None
    adapters: int | None
    memory: int | None
    device: Device | None
    machine: int
    constants: Constants = Constants()
    critic: DecoderNumbers | None = None

    def look(self, change: Change) -> "Look":
        """The run after a change, laid out and counted again."""
        settings = with_values(self.settings, change)
        laid_out = lay_out(settings, self.divisible, self.machine)
        settings = laid_out.settings
        batch = check_settings(settings, None).problems
        wrong = {(found.code, found.where.partition(" ")[0]) for found in batch}
        wrong |= {(fault.code, fault.path) for fault in laid_out.faults}
        given = settings.model.gradient_checkpointing
        on = given is True
        groups, engine = self._groups(settings, laid_out.layout, recompute=on)
        if given == "auto" and any((group.ledger.margin(Phase.UPDATE) or 0) < 0 for group in groups):
            on = True
            groups, engine = self._groups(settings, laid_out.layout, recompute=True)
        return Look(
            case=self,
            settings=settings,
            layout=laid_out.layout,
            wrong=frozenset(wrong),
            recompute=on,
            groups=groups,
            engine=engine,
        )

    def _groups(
        self, settings: TrainSettings, layout: Layout, *, recompute: bool
    ) -> tuple[tuple[Group, ...], EngineRole | None]:
        adapters, memory = self.adapters, self.memory
        roles = count_roles(
            settings, self.model, layout, recompute=recompute, adapters=adapters, critic=self.critic, memory=memory
        )
        return device_groups(layout, roles, memory), roles.engine

    def tokens_at_once(self, look: "Look") -> set[int]:
        """Tokens of a microbatch, of all roles that compute with a model."""
        recompute, adapters = look.recompute, self.adapters
        roles = count_roles(
            look.settings, self.model, look.layout, recompute=recompute, adapters=adapters, critic=self.critic
        )
        return {role.tokens for role in roles.models.values()}


@dataclass(frozen=True, kw_only=True)
class Look:
    """A run on its devices.

    Args:
        case: what it is made from.
        settings: after the change.
        layout: of them.
        wrong: code and setting of all that is wrong, but for memory.
        recompute: whether layers are recomputed: as given, or for ``auto`` where an update does not fit without it.
        groups: devices by what they hold.
        engine: a replica of the rollout engine; none if it could not be laid out.
    """

    case: Case
    settings: TrainSettings
    layout: Layout
    wrong: frozenset[tuple[str, str]]
    recompute: bool
    groups: tuple[Group, ...]
    engine: EngineRole | None

    @cached_property
    def cluster(self) -> Cluster | None:
        """What the devices are; none if that is not known."""
        device = self.case.device
        size = self.layout.topology.devices_per_node
        return None if device is None else Cluster(device=device, devices_per_node=size)

    @cached_property
    def forecast(self) -> Forecast | None:
        """With time; none where the devices are not known."""
        return self.forecast_of(self.settings)

    def forecast_of(self, settings: TrainSettings) -> Forecast | None:
        """The same with other settings that leave the layout as it is."""
        if self.cluster is None:
            return None
        case = self.case
        return forecast(
            settings,
            case.model,
            self.layout,
            self.cluster,
            recompute=self.recompute,
            adapters=case.adapters,
            critic=case.critic,
            constants=case.constants,
            device_memory=case.memory,
        )

    @property
    def has_cache(self) -> bool:
        """Whether the engine's devices have room for its cache."""
        return all((group.ledger.margin(Phase.GENERATE) or 0) >= 0 for group in self.groups)

    def lacking(self) -> dict[tuple[Role, ...], int]:
        """Bytes that each group of devices lacks, by its roles, added up over phases, so that what helps one of them counts,
        and what the longest sample lacks in the engine's cache; without groups that have enough."""
        short = {
            group.roles: sum(max(0, -(group.ledger.margin(phase) or 0)) for phase in Phase) + self.short_cache(group)
            for group in self.groups
        }
        return {roles: count for roles, count in short.items() if count}

    def short_cache(self, group: Group) -> int:
        """Bytes that the longest sample lacks in the engine's cache on a group of devices."""
        engine = self.engine
        if engine is None or engine.cache_bytes is None or Role.ROLLOUT not in group.roles:
            return 0
        return max(0, engine.longest_sample_bytes - engine.cache_bytes)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change that makes a group of devices hold its roles.

    Args:
        change: as overrides.
        price: what it costs, in words.
    """

    change: tuple[str, ...]
    price: str


def changes_that_fit(before: Look, group: Group) -> tuple[Suggestion, ...]:
    """Changes after which a group of devices has room, cheapest first.

    Args:
        before: the run that does not fit.
        group: of its devices that lack memory.
    """
    search, ways = _Search(before, group.roles), tuple(steps(before, group))
    more = more_devices(before)
    found = list(search.alone(ways)) or list(search.together(ways))
    alone = list(search.alone(more))[:1]
    # Fewer devices may be enough where other changes are made too.
    found = [*(found or search.together([*ways, *more])), *alone]
    found = found or [*_shorter(search, ways), *_elsewhere(before)]
    found = list({each.change: each for each in found}.values())
    return tuple(found[:_SUGGESTIONS])


def _shorter(search: "_Search", ways: tuple[Step, ...]) -> Iterator[Suggestion]:
    """Shorter responses, where nothing else is enough."""
    settings = search.before.settings
    step = responses(settings)
    yield from list(search.alone([step])) or search.together([*ways, step])


def _elsewhere(before: Look) -> Iterator[Suggestion]:
    """All roles on all devices, or the smallest of the known devices whose memory is enough, with what else it takes there."""
    given = placements(before.settings)
    apart = {f"placement.{role}": "all" for role, entries in given.items() if entries != "all" and role != Role.REWARD}
    if apart:
        yield from _after(before, apart, "all roles take turns on all devices")
    for device in sorted(DEVICES, key=lambda device: device.memory_bytes):
        if device.memory_bytes > (before.case.memory or 0):
            price = f"devices of {device.memory_bytes / GIB:,.0f} GiB, as {device.name} has"
            found = list(_after(before, {"device_memory_bytes": device.memory_bytes}, price))
            yield from found
            if found:
                return


def _after(before: Look, change: Change, price: str) -> Iterator[Suggestion]:
    """A change that is no saving, with what else it takes to make all devices hold their roles."""
    memory = change.get("device_memory_bytes", before.case.memory)
    case = replace(before.case, settings=with_values(before.settings, change), memory=memory)
    there = case.look({})
    lacking = [group for group in there.groups if group.roles in there.lacking()]
    if not there.wrong <= before.wrong or len(lacking) > 1:
        return
    if not lacking:
        yield Suggestion(change=overrides(change), price=price)
        return
    search, ways = _Search(there, lacking[0].roles), tuple(steps(there, lacking[0]))
    more = more_devices(there)
    found = list(search.alone(ways))[:1] or list(search.together(ways)) or list(search.together([*ways, *more]))
    for each in found:
        yield Suggestion(change=(*overrides(change), *each.change), price=f"{price}; {each.price}")


class _Search:
    """Makes changes and looks whether a group of devices fits then."""

    def __init__(self, before: Look, roles: tuple[Role, ...]) -> None:
        self.before, self.roles, self._seen = before, roles, dict[tuple[str, ...], Look]()

    def look(self, change: Change) -> Look:
        key = tuple(sorted(overrides(change)))
        if key not in self._seen:
            self._seen[key] = self.before.case.look(change)
        return self._seen[key]

    def lacks(self, change: Change) -> int | None:
        """Bytes that the group still lacks; none if the change makes something else wrong. Where no devices have these very
        roles any more, none of the others may lack anything."""
        after = self.look(change)
        lacking, known = after.lacking(), self.before.lacking()
        worse = any(count > known.get(roles, 0) for roles, count in lacking.items() if roles != self.roles)
        if worse or not after.wrong <= self.before.wrong:
            return None
        return lacking.get(self.roles, 0)

    def fits(self, change: Change) -> bool:
        return self.lacks(change) == 0

    def alone(self, steps: Iterable[Step]) -> Iterator[Suggestion]:
        """The mildest change of each step that is enough by itself."""
        for step in steps:
            if (change := next(filter(self.fits, step.changes), None)) is not None:
                yield self.suggestion(step.mildest(change, self.fits), [step])

    def together(self, steps: Iterable[Step]) -> Iterator[Suggestion]:
        """One change of several steps, each as far as it helps, without those that turn out not to be needed. Steps that do not
        help at first are tried once more: a cache may be larger once there is room for it."""
        made: list[tuple[Step, Change]] = []
        steps = tuple(steps)
        for step in (*steps, *steps):
            if any(step is earlier for earlier, _ in made):
                continue
            before, least = made, self.lacks(_joined(made))
            for change in step.changes:
                lacks = self.lacks(_joined([*before, (step, change)]))
                if lacks is not None and (least is None or lacks < least):
                    least, made = lacks, [*before, (step, change)]
                if lacks == 0:
                    break
            if least == 0:
                break
        else:
            return
        for pair in tuple(made):
            rest = [other for other in made if other is not pair]
            if self.fits(_joined(rest)):
                made = rest
        for step, _ in tuple(made):
            others = [other for other in made if other[0] is not step]
            milder = self._mildest(step, others)
            made = [(step, milder) if other[0] is step else other for other in made]
        yield self.suggestion(_joined(made), [step for step, _ in made])

    def _mildest(self, step: Step, others: list[tuple[Step, Change]]) -> Change:
        """The mildest change of a step that is enough with those of others; one of its changes is."""

        def is_enough(change: Change) -> bool:
            return self.fits(_joined([*others, (step, change)]))

        return step.mildest(next(filter(is_enough, step.changes)), is_enough)

    def suggestion(self, change: Change, steps: Iterable[Step]) -> Suggestion:
        after = self.look(change)
        parts = [step.price for step in steps]
        moved = sum(
            move.bytes * move.ways
            for group in after.groups
            if group.roles == self.roles
            for move in moves(group.ledger.holdings)
        )
        if moved:
            parts.append(f"{moved / GIB:,.1f} GiB that offload moves a step and device")
        if after.forecast is not None and self.before.forecast is not None:
            parts.append(f"a step of about {_seconds(after.forecast.step_s)}")
            # A run that has no room for its cache generates one sequence at a time: there is nothing to compare with.
            if self.before.has_cache and (more := after.forecast.step_s - self.before.forecast.step_s) > 0:
                parts[-1] += f", {_seconds(more)} more"
        return Suggestion(change=overrides(change), price="; ".join(parts))


def _seconds(count: float) -> str:
    """Seconds in few digits."""
    return f"{count:,.0f} s" if count >= 100 else f"{count:.3g} s"


def _joined(made: Iterable[tuple[Step, Change]]) -> dict[str, object]:
    return dict(chain.from_iterable(change.items() for _, change in made))


def where_else(group: Group) -> Iterator[tuple[Residency, int]]:
    """Bytes that a device of a group keeps in the host's memory and on the disk."""
    for place in (Residency.HOST, Residency.DISK):
        if count := group.ledger.elsewhere(place):
            yield place, count
