"""Ways to save memory, as changes of a run's settings.

Owns: which changes there are, mildest first, and what each costs in words. Refuses to know: whether one is enough
(``plan.fitting`` tries them).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from meshloom.config.cluster_settings import OffloadPlace
from meshloom.config.settings import TrainSettings
from meshloom.plan.faults import Change
from meshloom.plan.ledger import longest_sample_tokens
from meshloom.plan.placement import Role, placements, sequence_parts
from meshloom.plan.residency import EngineRole, Phase
from meshloom.plan.topology import Topology

if TYPE_CHECKING:
    from meshloom.plan.fitting import Look
    from meshloom.plan.forecast import Group

_DEGREES = (2, 4, 8)
_TRAINED = (Role.ACTOR, Role.CRITIC)
_SHARE = "rollout.vllm.gpu_memory_utilization"
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Step:
    """One way to save memory.

    Args:
        price: what it costs.
        changes: the mildest first.
        sizes: of the changes, where they are sizes of one thing; between two of them there are others.
        given: the size that the settings have, milder than all of them.
        of_size: the change to a size.
    """

    price: str
    changes: tuple[Change, ...]
    sizes: tuple[int, ...] = ()
    given: int = 0
    of_size: Callable[[int], Change] | None = None

    @classmethod
    def of_sizes(cls, price: str, of_size: Callable[[int], Change], given: int, sizes: Iterable[int]) -> "Step":
        """A way whose changes are sizes of one thing.

        Args:
            price: what it costs.
            of_size: the change to a size.
            given: the size that the settings have.
            sizes: the mildest first.
        """
        sizes = tuple(sizes)
        return cls(price=price, changes=tuple(map(of_size, sizes)), sizes=sizes, given=given, of_size=of_size)

    def mildest(self, change: Change, is_enough: Callable[[Change], bool]) -> Change:
        """The mildest change that is enough: one between the change that is enough and the one before it, where there are sizes
        between them.

        Args:
            change: of ``changes``, that is enough.
            is_enough: whether another one is; the milder ones among ``changes`` are not.
        """
        if self.of_size is None or change not in self.changes:
            return change
        place = self.changes.index(change)
        enough, not_enough = self.sizes[place], self.sizes[place - 1] if place else self.given
        while abs(enough - not_enough) > 1:
            size = (enough + not_enough) // 2
            if is_enough(self.of_size(size)):
                enough, change = size, self.of_size(size)
            else:
                not_enough = size
        return change


def steps(before: "Look", group: "Group") -> Iterator[Step]:
    """Ways to save memory on a group of devices, in their order: the cache, microbatch, recompute, sharding, the optimizer away
    from the device, parameters away from it."""
    settings, roles = before.settings, group.roles
    if before.engine is not None and before.short_cache(group):
        yield Step(price="a larger cache", changes=tuple(_larger_caches(settings, before.engine, before.case.memory)))
    elif (group.ledger.margin(Phase.GENERATE) or 0) < 0:
        yield from _caches(settings)
    yield _microbatches(settings)
    if settings.model.gradient_checkpointing is False:
        yield Step(price="layers computed twice", changes=({"model.gradient_checkpointing": True},))
    yield Step(price="more exchange between devices", changes=tuple(_shardings(before, roles)))
    offload = {Role.ACTOR: settings.offload.actor, Role.REFERENCE: settings.offload.reference}
    offload[Role.CRITIC] = settings.offload.critic
    here = [role for role in roles if role in offload]
    none, host = OffloadPlace.NONE, OffloadPlace.HOST
    trained = [role for role in here if role in _TRAINED and offload[role].optimizer is none]
    optimizer = {f"offload.{role}.optimizer": host for role in trained}
    yield Step(price="the optimizer waits in the host's memory", changes=(optimizer,) if optimizer else ())
    parameters = {f"offload.{role}.parameters": host for role in here if offload[role].parameters is none}
    yield Step(price="weights wait in the host's memory", changes=(parameters,) if parameters else ())


def _larger_caches(settings: TrainSettings, engine: EngineRole, memory: int | None) -> Iterator[Change]:
    """Room for the longest sample: by the bound that is given, or a larger share for vLLM."""
    needs = engine.longest_sample_bytes
    if settings.rollout.kv_cache_bytes is not None:
        yield {"rollout.kv_cache_bytes": needs}
        yield {"rollout.kv_cache_bytes": None}
    elif memory is not None:
        weights = -(-engine.model.total // engine.tensor) * engine.width
        least, now = ceil(100 * (weights + needs) / memory), round(100 * settings.rollout.vllm.gpu_memory_utilization)
        # Where no share is enough, one may be once the engine is over more devices.
        yield from ({_SHARE: share / 100} for share in range(least if least <= 95 else now + 5, 96, 5))


def _caches(settings: TrainSettings) -> Iterator[Step]:
    """A cache that is left while others compute, and smaller ones: in MiB, or in hundredths of the device's memory."""
    rollout, price = settings.rollout, "a smaller cache, so fewer sequences at once"
    if rollout.engine == "vllm" and not rollout.vllm.sleep:
        yield Step(price=price, changes=({"rollout.vllm.sleep": True},))
    if (given := rollout.kv_cache_bytes) is not None:
        sizes = (max(1, given // _MIB // parts) for parts in (2, 4, 8))
        yield Step.of_sizes(price, lambda size: {"rollout.kv_cache_bytes": size * _MIB}, -(-given // _MIB), sizes)
    elif rollout.engine == "vllm":
        now = ceil(100 * rollout.vllm.gpu_memory_utilization)
        sizes = (share for share in range(95, 5, -5) if share < now)
        yield Step.of_sizes(price, lambda size: {_SHARE: size / 100}, now, sizes)


def _microbatches(settings: TrainSettings) -> Step:
    """Half of the tokens, a quarter, …, and what the longest sample needs."""
    tokens, least = (
        settings.batch.tokens_per_microbatch,
        -(-longest_sample_tokens(settings) // sequence_parts(settings)),
    )
    own = settings.critic.tokens_per_microbatch or 0

    def bound(most: int) -> Change:
        critic = {"critic.tokens_per_microbatch": most} if own > most else {}
        return {"batch.tokens_per_microbatch": most, **critic}

    return microbatch_step(tokens, least, bound)


def microbatch_step(tokens: int, least: int, bound: Callable[[int], Change]) -> Step:
    """Half of the tokens of a microbatch, a quarter, …, and the fewest that there may be.

    Args:
        tokens: that the settings give.
        least: what the longest sample needs.
        bound: the change to so many.
    """
    sizes, smaller = [], tokens // 2
    while smaller > least:
        sizes.append(smaller)
        smaller //= 2
    if least < tokens:
        sizes.append(least)
    return Step.of_sizes("more and smaller microbatches", bound, tokens, sizes)


def _shardings(before: "Look", roles: tuple[Role, ...]) -> Iterator[Change]:
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


def more_devices(before: "Look") -> tuple[Step, ...]:
    """More devices of each node, up to eight, then more nodes; where all roles are on all devices."""
    if any(entries != "all" for role, entries in placements(before.settings).items() if role != Role.REWARD):
        return ()
    return device_steps(before.layout.topology)


def device_steps(topology: Topology) -> tuple[Step, ...]:
    """More devices of each node, up to eight, then more nodes."""
    size, nodes, price = topology.devices_per_node, topology.num_nodes, "more devices"
    larger = [more for more in _DEGREES if more > size]
    each: Change = {"cluster.devices_per_node": larger[-1]} if larger else {}
    devices = Step.of_sizes(price, lambda more: {"cluster.devices_per_node": more}, size, larger)
    doubled = (nodes << times for times in range(1, 7))
    return devices, Step.of_sizes(price, lambda more: {**each, "cluster.nodes": more}, nodes, doubled)


def responses(settings: TrainSettings) -> Step:
    """Half of the longest response, a quarter, …; microbatches no larger than such samples need."""
    prompt, longest = settings.data.max_prompt_tokens, settings.rollout.max_response_tokens
    tokens, parts = settings.batch.tokens_per_microbatch, sequence_parts(settings)

    def of_size(response: int) -> Change:
        least = min(tokens, -(-(prompt + response) // parts))
        return {"rollout.max_response_tokens": response, "batch.tokens_per_microbatch": least}

    sizes = (longest >> times for times in range(1, longest.bit_length()))
    return Step.of_sizes("shorter responses", of_size, longest, sizes)
