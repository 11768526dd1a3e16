"""Changes that make a run fit on its devices, cheapest first.

Owns: which changes are tried, in which order, and what each costs. Refuses to know: how a plan is shown. Always holds: a
change that is suggested was made and forecast again: all phases fit, and nothing else is wrong that was not before.

The order: a smaller cache where generation alone is too large; microbatch; recompute; sharding; the optimizer away from the
device; parameters away from it; more devices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from meshloom.config.cluster_settings import OffloadPlace
from meshloom.config.settings import TrainSettings
from meshloom.plan.checks import check_settings
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.device_checks import lay_out
from meshloom.plan.faults import Change, overrides, with_values
from meshloom.plan.forecast import Forecast, Group, count_roles, device_groups, forecast
from meshloom.plan.hardware import Device
from meshloom.plan.layout import Layout
from meshloom.plan.ledger import longest_sample_tokens
from meshloom.plan.meshes import Divisible
from meshloom.plan.parameters import DecoderNumbers
from meshloom.plan.placement import Role, placements, sequence_parts
from meshloom.plan.residency import Phase, Residency
from meshloom.plan.sharded_memory import moves

GIB = 2**30
_SUGGESTIONS = 3
_DEGREES = (2, 4, 8)
_TRAINED = (Role.ACTOR, Role.CRITIC)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that can be forecast again after a change.

    Args:
        settings: of the run, with what its device map says.
        model: in numbers.
        divisible: the same model, for checks of its cuts; none if its config.json does not say.
        adapters: parameters of adapters; none where all are trained.
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
        groups = self._groups(settings, laid_out.layout, recompute=on)
        if given == "auto" and any((group.ledger.margin(Phase.UPDATE) or 0) < 0 for group in groups):
            on, groups = True, self._groups(settings, laid_out.layout, recompute=True)
        return Look(
            case=self, settings=settings, layout=laid_out.layout, wrong=frozenset(wrong), recompute=on, groups=groups
        )

    def _groups(self, settings: TrainSettings, layout: Layout, *, recompute: bool) -> tuple[Group, ...]:
        adapters, memory = self.adapters, self.memory
        roles = count_roles(settings, self.model, layout, recompute=recompute, adapters=adapters, memory=memory)
        return device_groups(layout, roles, memory)

    def tokens_at_once(self, look: "Look") -> set[int]:
        """Tokens of a microbatch, of all roles that compute with a model."""
        roles = count_roles(look.settings, self.model, look.layout, recompute=look.recompute, adapters=self.adapters)
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
    """

    case: Case
    settings: TrainSettings
    layout: Layout
    wrong: frozenset[tuple[str, str]]
    recompute: bool
    groups: tuple[Group, ...]

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
            constants=case.constants,
            device_memory=case.memory,
        )

    @property
    def has_cache(self) -> bool:
        """Whether the engine's devices have room for its cache."""
        return all((group.ledger.margin(Phase.GENERATE) or 0) >= 0 for group in self.groups)

    def lacking(self) -> dict[tuple[Role, ...], int]:
        """Bytes that each group of devices lacks, by its roles, added up over phases, so that what helps one of them counts;
        without groups that have enough."""
        short = {
            group.roles: sum(max(0, -(group.ledger.margin(phase) or 0)) for phase in Phase) for group in self.groups
        }
        return {roles: count for roles, count in short.items() if count}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change that makes a group of devices hold its roles.

    Args:
        change: as overrides.
        price: what it costs, in words.
    """

    change: tuple[str, ...]
    price: str


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One way to save memory: its changes, the mildest first, and what they cost."""

    price: str
    changes: tuple[Change, ...]


def changes_that_fit(before: Look, group: Group) -> tuple[Suggestion, ...]:
    """Changes after which a group of devices has room, cheapest first.

    Args:
        before: the run that does not fit.
        group: of its devices that lack memory.
    """
    search, steps = _Search(before, group.roles), tuple(_steps(before, group))
    more = _Step(price="more devices", changes=tuple(_more_devices(before)))
    found = list(search.alone(steps)) or list(search.together(steps))
    found += search.alone([more])
    return tuple((found or list(search.together([*steps, more])))[:_SUGGESTIONS])


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

    def alone(self, steps: Iterable[_Step]) -> Iterator[Suggestion]:
        """The mildest change of each step that is enough by itself."""
        for step in steps:
            if (change := next(filter(self.fits, step.changes), None)) is not None:
                yield self.suggestion(change, [step])

    def together(self, steps: Iterable[_Step]) -> Iterator[Suggestion]:
        """One change of several steps, each as far as it helps, without those that turn out not to be needed."""
        made: list[tuple[_Step, Change]] = []
        for step in steps:
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
            milder = (change for change in step.changes if self.fits(_joined([*others, (step, change)])))
            made = [(step, next(milder)) if other[0] is step else other for other in made]
        yield self.suggestion(_joined(made), [step for step, _ in made])

    def suggestion(self, change: Change, steps: Iterable[_Step]) -> Suggestion:
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
            parts.append(f"a step of about {after.forecast.step_s:.3g} s")
            # A run that has no room for its cache generates one sequence at a time: there is nothing to compare with.
            if self.before.has_cache and (more := after.forecast.step_s - self.before.forecast.step_s) > 0:
                parts[-1] += f", {more:.2g} s more"
        return Suggestion(change=overrides(change), price="; ".join(parts))


def _joined(made: Iterable[tuple[_Step, Change]]) -> dict[str, object]:
    return dict(chain.from_iterable(change.items() for _, change in made))


def _steps(before: Look, group: Group) -> Iterator[_Step]:
    settings, roles = before.settings, group.roles
    if (group.ledger.margin(Phase.GENERATE) or 0) < 0:
        yield _Step(price="a smaller cache, so fewer sequences at once", changes=tuple(_caches(settings)))
    yield _Step(price="more and smaller microbatches", changes=tuple(_microbatches(settings)))
    if settings.model.gradient_checkpointing is False:
        yield _Step(price="layers computed twice", changes=({"model.gradient_checkpointing": True},))
    yield _Step(price="more exchange between devices", changes=tuple(_shardings(before, roles)))
    offload = {Role.ACTOR: settings.offload.actor, Role.REFERENCE: settings.offload.reference}
    offload[Role.CRITIC] = settings.offload.critic
    here = [role for role in roles if role in offload]
    none, host = OffloadPlace.NONE, OffloadPlace.HOST
    trained = [role for role in here if role in _TRAINED and offload[role].optimizer is none]
    optimizer = {f"offload.{role}.optimizer": host for role in trained}
    yield _Step(price="the optimizer waits in the host's memory", changes=(optimizer,) if optimizer else ())
    parameters = {f"offload.{role}.parameters": host for role in here if offload[role].parameters is none}
    yield _Step(price="weights wait in the host's memory", changes=(parameters,) if parameters else ())


def _caches(settings: TrainSettings) -> Iterator[Change]:
    rollout = settings.rollout
    if rollout.engine == "vllm" and not rollout.vllm.sleep:
        yield {"rollout.vllm.sleep": True}
    if rollout.kv_cache_bytes is not None:
        yield from ({"rollout.kv_cache_bytes": rollout.kv_cache_bytes // parts} for parts in (2, 4, 8))
    elif rollout.engine == "vllm":
        shares = (share / 20 for share in range(19, 1, -1))
        yield from ({_SHARE: share} for share in shares if share < rollout.vllm.gpu_memory_utilization)


_SHARE = "rollout.vllm.gpu_memory_utilization"


def _microbatches(settings: TrainSettings) -> Iterator[Change]:
    """Half of the tokens, a quarter, …, and what the longest sample needs."""
    tokens, least = (
        settings.batch.tokens_per_microbatch,
        -(-longest_sample_tokens(settings) // sequence_parts(settings)),
    )
    smaller = tokens // 2
    while smaller > least:
        yield {"batch.tokens_per_microbatch": smaller}
        smaller //= 2
    if least < tokens:
        yield {"batch.tokens_per_microbatch": least}


def _shardings(before: Look, roles: tuple[Role, ...]) -> Iterator[Change]:
    """Roles over all devices; shards over all of a role's; the engine's layers over more; sequences, then layers, of the
    models over more."""
    parallel = before.settings.parallel
    groups = {Role.ACTOR: parallel.actor, Role.REFERENCE: parallel.reference, Role.CRITIC: parallel.critic}
    here = {role: groups[role] for role in roles if role in groups}
    topology, given = before.layout.topology, placements(before.settings)
    names = topology.entries(topology.all_devices)
    everywhere = tuple(int(name) if name.isdecimal() else name for name in names)
    yield from ({f"placement.{role}": everywhere} for role in here if given[role] not in ("all", everywhere))
    whole = {f"parallel.{role}.fsdp_size": None for role, group in here.items() if group.fsdp_size is not None}
    if whole:
        yield whole
    engine: list[dict[str, object]] = [{}]
    if Role.ROLLOUT in roles:
        wider = (size for size in _DEGREES if size > parallel.rollout.tensor)
        engine += [{"parallel.rollout.tensor": size} for size in wider]
    yield from engine[1:]
    for name in ("sequence", "tensor"):
        for size in _DEGREES:
            cut = {f"parallel.{role}.{name}": size for role, group in here.items() if getattr(group, name) < size}
            if cut:
                yield from ({**whole, **cut, **change} for change in engine)


def _more_devices(before: Look) -> Iterator[Change]:
    """More devices of each node, up to eight, then more nodes; where all roles are on all devices."""
    topology = before.layout.topology
    if any(entries != "all" for role, entries in placements(before.settings).items() if role != Role.REWARD):
        return
    size = topology.devices_per_node
    larger = [more for more in _DEGREES if more > size]
    yield from ({"cluster.devices_per_node": more} for more in larger)
    each: Change = {"cluster.devices_per_node": larger[-1]} if larger else {}
    for doubled in range(1, 7):
        yield {**each, "cluster.nodes": topology.num_nodes << doubled}


def where_else(group: Group) -> Iterator[tuple[Residency, int]]:
    """Bytes that a device of a group keeps in the host's memory and on the disk."""
    for place in (Residency.HOST, Residency.DISK):
        if count := group.ledger.elsewhere(place):
            yield place, count
