"""Arrangements that a search looks at: pools of devices, and cuts of each role's model that go into its pool.

Owns: which there are, and why others are not. Refuses to know: memory, time. Always holds: what the settings give is kept; each
arrangement can be laid out, and leaves no device without work.

Left out, as they are hardly ever better than what is there: tensor or sequence parallelism across nodes; more than sixteen
devices of a pipeline, or two stages on each; sharding over a part of the devices that is neither inside a node nor one, two,
four or eight of them; pools that are no whole nodes where there are several. Of more than sixteen nodes fewer pools, stages and
shards.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from meshloom.config.provenance import is_verls_default
from meshloom.config.settings import TrainSettings
from meshloom.plan.arrangement import Arrangement, Placed
from meshloom.plan.ledger import samples_per_update
from meshloom.plan.meshes import Degrees, Divisible, Pool, divisors, mesh_faults
from meshloom.plan.placement import Role, devices_of, placements, roles_of
from meshloom.plan.spread import degrees_of
from meshloom.plan.topology import DeviceSet, Topology

_FRACTIONS = (1 / 8, 1 / 4, 1 / 3, 3 / 8, 1 / 2, 5 / 8, 2 / 3, 3 / 4, 7 / 8)
_COARSE = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Parts of the devices that generate apart from the others; the second where there are many nodes."""
_FEW, _MOST_STAGES, _MANY_NODES = 16, 16, 16
_CUTS = ("tensor", "sequence", "pipeline", "stages_per_device", "fsdp_size")
_STAGES_PER_DEVICE = (1, 2)


@dataclass(frozen=True)
class Given:
    """Which settings a search must keep.

    Args:
        paths: dotted paths of values that were given.
    """

    paths: frozenset[str]

    @classmethod
    def of(cls, settings: TrainSettings) -> "Given":
        """Values that somebody gave; what a translation takes for its own default is not among them."""
        origins = settings.provenance.origins
        return cls(frozenset(path for path, origin in origins.items() if not is_verls_default(origin)))

    def __contains__(self, path: str) -> bool:
        return path in self.paths


@dataclass(frozen=True, kw_only=True)
class Family:
    """Arrangements with the same pools and the same cut of the trained model.

    Args:
        topology: the devices.
        choices: of each role, in the order of a layout, how it may be placed.
    """

    topology: Topology
    choices: tuple[tuple[Role, tuple[Placed, ...]], ...]

    def arrangements(self) -> Iterator[Arrangement]:
        """All of them."""
        for placed in product(*(choices for _, choices in self.choices)):
            roles = tuple((role, one) for (role, _), one in zip(self.choices, placed, strict=True))
            yield Arrangement(topology=self.topology, roles=roles)

    def __len__(self) -> int:
        return prod(len(choices) for _, choices in self.choices)


@dataclass(kw_only=True)
class Candidates:
    """The arrangements of a run.

    Args:
        settings: of the run.
        topology: its devices.
        model: of the run, for what divides it; none if that is not known.
        given: what must be kept.
        refused: what cannot be arranged, and why, in words; grows while arrangements are made.
    """

    settings: TrainSettings
    topology: Topology
    model: Divisible | None
    given: Given
    refused: dict[str, None] = field(default_factory=dict)

    def families(self) -> Iterator[Family]:
        """All of them, in families."""
        for pools in self.pools():
            engines = tuple(
                Placed(devices=pools[Role.ROLLOUT], cut=cut) for cut in self.engine_cuts(pools[Role.ROLLOUT])
            )
            reward = {role: Placed(devices=pools[role]) for role in (Role.REWARD,) if role in pools}
            for cut in self.model_cuts(Role.ACTOR, pools[Role.ACTOR]) if engines else ():
                others = {
                    role: tuple(Placed(devices=pools[role], cut=it) for it in self.other_cuts(role, pools, cut))
                    for role in (Role.REFERENCE, Role.CRITIC)
                    if role in pools
                }
                choices = {Role.ACTOR: (Placed(devices=pools[Role.ACTOR], cut=cut),), Role.ROLLOUT: engines, **others}
                choices |= {role: (placed,) for role, placed in reward.items()}
                if all(choices.values()):
                    yield Family(topology=self.topology, choices=tuple(choices.items()))

    def pools(self) -> list[dict[Role, DeviceSet]]:
        """Devices of each role: all on all; generation apart; the reference with it. What is given stays."""
        roles = roles_of(self.settings)
        fixed = {role: devices for role in roles if (devices := self._fixed(role)) is not None}
        everything = self.topology.all_devices
        options = [dict.fromkeys(roles, everything)]
        splits = [self._split(size) for size in self._sizes()]
        for role, other in ((Role.ACTOR, Role.ROLLOUT), (Role.ROLLOUT, Role.ACTOR)):
            if role in fixed and other not in fixed:
                options.append(dict.fromkeys(roles, fixed[role]))
                if rest := _rest(self.topology, fixed[role]):
                    splits = [(fixed[role], rest) if role is Role.ACTOR else (rest, fixed[role])]
        for trains, generates in splits:
            apart = dict.fromkeys(roles, trains) | {Role.ROLLOUT: generates}
            options.append(apart)
            if Role.REFERENCE in roles:
                options.append(apart | {Role.REFERENCE: generates})
        found = {tuple((option | fixed).items()): None for option in options}
        return [pools for option in found if self._may_lag(pools := dict(option))]

    def _may_lag(self, pools: Mapping[Role, DeviceSet]) -> bool:
        """Whether generation has devices of its own, where it is to run ahead."""
        if not self.settings.algorithm.max_lag_versions or pools[Role.ROLLOUT] != pools[Role.ACTOR]:
            return True
        self.refused["rollout: to run ahead (algorithm.max_lag_versions) it needs devices of its own"] = None
        return False

    def _fixed(self, role: Role) -> DeviceSet | None:
        """Devices that a role was given; none if it may be anywhere."""
        if f"placement.{role}" not in self.given and placements(self.settings)[role] == "all":
            return None
        return devices_of(role, self.settings, self.topology)[0]

    @property
    def _many(self) -> bool:
        return self.topology.num_nodes > _MANY_NODES

    def _sizes(self) -> list[int]:
        """How many devices generate, where they are apart: any number on one node, whole nodes on several."""
        total, each = self.topology.num_devices, self.topology.devices_per_node
        if self.topology.num_nodes > 1:
            nodes = self.topology.num_nodes
            parts = _COARSE if self._many else _FRACTIONS
            return sorted({max(1, min(nodes - 1, round(part * nodes))) * each for part in parts})
        if total <= _FEW:
            return list(range(1, total))
        return sorted({round(part * total) for part in _FRACTIONS})

    def _split(self, generating: int) -> tuple[DeviceSet, DeviceSet]:
        total = self.topology.num_devices
        return DeviceSet((range(total - generating),)), DeviceSet((range(total - generating, total),))

    def engine_cuts(self, devices: DeviceSet) -> list[Degrees]:
        """Degrees of tensor parallelism of the engine."""
        pool, prompts = Pool.of(devices, self.topology), self.settings.batch.prompts_per_step
        sizes = self._sizes_of("parallel.rollout.tensor", self.settings.parallel.rollout.tensor, pool.world)
        cuts = [Degrees(tensor=size) for size in sizes]
        return [
            cut
            for cut in cuts
            if self._fits(Role.ROLLOUT, pool, cut)
            and not self._no_work(Role.ROLLOUT, cut, pool.world // cut.tensor, prompts, "prompts a step")
        ]

    def model_cuts(self, role: Role, devices: DeviceSet) -> list[Degrees]:
        """Cuts of a model that is trained, or computes log-probs."""
        pool, degrees = Pool.of(devices, self.topology), degrees_of(self.settings, role)
        path, cuts = f"parallel.{role}", []
        for tensor, sequence, pipeline in product(
            self._sizes_of(f"{path}.tensor", degrees.tensor, pool.world),
            self._sizes_of(f"{path}.sequence", degrees.sequence, pool.world),
            self._sizes_of(f"{path}.pipeline", degrees.pipeline, min(pool.world, _MOST_STAGES)),
        ):
            for stages in self._stages_of(f"{path}.stages_per_device", degrees.stages_per_device, pipeline):
                cut = Degrees(tensor=tensor, sequence=sequence, pipeline=pipeline, stages_per_device=stages)
                if not self._fits(role, pool, cut):
                    continue
                left = pool.world // cut.model_parallel
                samples = samples_per_update(self.settings)
                if not self._no_work(role, cut, left, samples, "samples an update"):
                    cuts += [replace(cut, fsdp_size=size) for size in self._shards(role, cut, left)]
        return cuts

    def other_cuts(self, role: Role, pools: Mapping[Role, DeviceSet], actor: Degrees) -> list[Degrees]:
        """Cuts of the reference or the critic: as the actor, sharded over all, and one copy on each device."""
        pool = Pool.of(pools[role], self.topology)
        given = degrees_of(self.settings, role)
        choices = [actor, Degrees(sequence=actor.sequence), Degrees(sequence=actor.sequence, fsdp_size=1)]
        if role is Role.CRITIC:
            choices = choices[:2]
        found: dict[Degrees, None] = {}
        for choice in choices:
            kept = {name: getattr(given, name) for name in _CUTS if f"parallel.{role}.{name}" in self.given}
            cut = replace(choice, **kept)
            if cut.pipeline == 1 and "stages_per_device" not in kept:
                cut = replace(cut, stages_per_device=1)
            if self._fits(role, pool, cut) and pool.world // cut.model_parallel <= samples_per_update(self.settings):
                left = pool.world // cut.model_parallel
                found[replace(cut, fsdp_size=None if cut.fsdp_size == left else cut.fsdp_size)] = None
        return list(found)

    def _stages_of(self, path: str, value: int, pipeline: int) -> Collection[int]:
        """How many stages each device of a pipeline may have."""
        if path in self.given:
            return [value]
        layers = 0 if self.model is None or pipeline == 1 else self.model.layers // pipeline
        return [count for count in _STAGES_PER_DEVICE if count == 1 or (layers and layers % count == 0)]

    def _sizes_of(self, path: str, value: int, world: int) -> Collection[int]:
        if path in self.given:
            return [value]
        most = self.topology.devices_per_node if self._many else world
        return [size for size in divisors(world) if size <= most]

    def _fits(self, role: Role, pool: Pool, cut: Degrees) -> bool:
        """Whether a cut goes into the devices and the model, and keeps what exchanges every layer inside a node."""
        other = role is Role.CRITIC and self.settings.critic.model is not None
        model = None if other else self.model
        if pool.world % cut.model_parallel:
            return False
        fault = next(mesh_faults(pool, cut, model, trained=role is not Role.ROLLOUT), None)
        if fault is not None:
            self.refused[f"{role}: {fault.what.partition(';')[0]}"] = None
            return False
        inside = cut.tensor * cut.sequence
        if cut.sequence > 1 and not pool.keeps_together(inside) and f"parallel.{role}.sequence" not in self.given:
            self.refused[f"{role}: sp {cut.sequence} of tp {cut.tensor} would span two nodes"] = None
            return False
        return True

    def _no_work(self, role: Role, cut: Degrees, replicas: int, work: int, of: str) -> bool:
        if replicas <= work:
            return False
        where = " × ".join(f"{name} {size}" for name, size in (("tp", cut.tensor), ("sp", cut.sequence)) if size > 1)
        self.refused[
            f"{role}: {work} {of} leave some of {replicas:,} replicas without work{where and f' ({where})'}"
        ] = None
        return True

    def _shards(self, role: Role, cut: Degrees, left: int) -> list[int | None]:
        """Devices that weights are sharded over: parts of a node, one to eight nodes, or all."""
        path, given = f"parallel.{role}.fsdp_size", degrees_of(self.settings, role).fsdp_size
        if path in self.given:
            return [given] if given is None or left % given == 0 else []
        inside = max(1, self.topology.devices_per_node // (cut.tensor * cut.sequence))
        parts = [1, inside] if self._many else [size for size in divisors(left) if size <= inside]
        sizes = dict.fromkeys([*parts, *((8 * inside,) if self._many else (2 * inside, 4 * inside, 8 * inside))])
        return [*(size for size in sizes if size < left and left % size == 0), None]


def _rest(topology: Topology, devices: DeviceSet) -> DeviceSet | None:
    """The devices that are not among these; none if there is none."""
    left: list[range] = []
    at = 0
    for piece in sorted(devices.ranges, key=lambda each: each.start):
        left.append(range(at, piece.start))
        at = max(at, piece.stop)
    rest = DeviceSet.of([*left, range(at, topology.num_devices)])
    return rest if len(rest) else None
