"""One way to arrange a run: which devices each role has, how its model is cut, and what memory it may take.

Owns: the records, and what each comes to as a layout and as settings. Refuses to know: which ones there are, whether one is
good. Always holds: the layout of an arrangement is the layout of the settings that it is written as.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshloom.config.cluster_settings import OffloadPlace
from meshloom.config.settings import TrainSettings
from meshloom.plan.device_checks import role_layout
from meshloom.plan.faults import Change
from meshloom.plan.layout import Layout
from meshloom.plan.meshes import Degrees
from meshloom.plan.placement import Role
from meshloom.plan.spread import cut_change, degrees_of
from meshloom.plan.topology import DeviceSet, Topology

TOKENS = "batch.tokens_per_microbatch"
RECOMPUTE = "model.gradient_checkpointing"
CACHE_SHARE = "rollout.vllm.gpu_memory_utilization"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One role's devices, and how its model is cut over them."""

    devices: DeviceSet
    cut: Degrees = Degrees()

    @property
    def whole_fsdp(self) -> int:
        """Devices that are left for sharding and replicas."""
        return len(self.devices) // self.cut.model_parallel


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """All roles of a run on devices.

    Args:
        topology: the devices.
        roles: each with its devices and cut, in the order of the layout.
    """

    topology: Topology
    roles: tuple[tuple[Role, Placed], ...]

    @cached_property
    def placed(self) -> Mapping[Role, Placed]:
        """Each role's devices and cut."""
        return dict(self.roles)

    @cached_property
    def layout(self) -> Layout:
        """The layout that the plan makes of these settings."""
        roles = tuple(role_layout(role, placed.devices, placed.cut) for role, placed in self.roles)
        return Layout(topology=self.topology, roles=roles)

    @property
    def colocated(self) -> bool:
        """Whether all roles are on the same devices."""
        return len({placed.devices for _, placed in self.roles}) == 1

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What tells arrangements apart for people: pools, and cuts of the trained model and the engine, but for how weights
        are sharded."""
        actor, rollout = self.placed[Role.ACTOR], self.placed[Role.ROLLOUT]
        cut = actor.cut
        return actor.devices, rollout.devices, cut.tensor, cut.sequence, cut.pipeline, rollout.cut.tensor

    def change(self, settings: TrainSettings) -> Change:
        """The change that makes these settings lay the run out like this.

        Args:
            settings: of the run; what is as it should be already is left out.
        """
        change: dict[str, Any] = {}
        for role, placed in self.roles:
            entries = self.entries(placed.devices)
            if getattr(settings.placement, role) != entries and role != Role.REWARD:
                change[f"placement.{role}"] = entries
            if role != Role.REWARD:
                change |= cut_change(role, degrees_of(settings, role), placed.cut)
        return change

    def entries(self, devices: DeviceSet) -> str | tuple[int | str, ...]:
        """Devices as ``placement`` takes them."""
        if devices == self.topology.all_devices:
            return "all"
        names = self.topology.entries(devices)
        return tuple(int(name) if name.isdecimal() else name for name in names)

    def words(self) -> str:
        """In a few words: ``colocated, fsdp 8, rollout tp 2``."""
        actor, rollout = self.placed[Role.ACTOR], self.placed[Role.ROLLOUT]
        if actor.devices == rollout.devices:
            where = "colocated" if len(actor.devices) == self.topology.num_devices else f"on {len(actor.devices):,}"
        else:
            where = f"{len(actor.devices):,} train + {len(rollout.devices):,} generate"
        parts = [where, cut_words(actor)]
        if (reference := self.placed.get(Role.REFERENCE)) is not None and reference != actor:
            beside = " with the engine" if reference.devices != actor.devices else ""
            parts.append(f"reference {cut_words(reference)}{beside}")
        if (critic := self.placed.get(Role.CRITIC)) is not None and critic != actor:
            parts.append(f"critic {cut_words(critic)}")
        return ", ".join([*parts, f"engine tp {rollout.cut.tensor}"])


def cut_words(placed: Placed) -> str:
    """How a model is cut, in a few words."""
    cut = placed.cut
    fsdp = cut.fsdp_size or placed.whole_fsdp
    sizes = {"pp": cut.pipeline, "replicate": placed.whole_fsdp // fsdp, "fsdp": fsdp}
    sizes |= {"sp": cut.sequence, "tp": cut.tensor}
    each = f" ({cut.stages_per_device} stages each)" if cut.stages_per_device > 1 else ""
    words = (f"{name} {size}{each if name == 'pp' else ''}" for name, size in sizes.items() if size > 1)
    return " × ".join(words) or "one copy each"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What memory a run may take, and what leaves the devices between phases.

    Args:
        recompute: whether layers are recomputed.
        tokens: of a microbatch.
        cache_share: of a device's memory, for vLLM's weights and cache; none where that says nothing.
        optimizer: roles whose optimizer waits in the host's memory.
        parameters: roles whose weights wait there.
    """

    recompute: bool
    tokens: int
    cache_share: float | None = None
    optimizer: tuple[Role, ...] = ()
    parameters: tuple[Role, ...] = ()

    def change(self, settings: TrainSettings) -> Change:
        """The change that gives the run this budget; what is as it should be already is left out."""
        offload = settings.offload
        groups = {Role.ACTOR: offload.actor, Role.REFERENCE: offload.reference, Role.CRITIC: offload.critic}
        change: dict[str, Any] = {RECOMPUTE: self.recompute, TOKENS: self.tokens}
        if self.cache_share is not None:
            change[CACHE_SHARE] = self.cache_share
        for name, roles in (("optimizer", self.optimizer), ("parameters", self.parameters)):
            for role in roles:
                if getattr(groups[role], name) is OffloadPlace.NONE:
                    change[f"offload.{role}.{name}"] = OffloadPlace.HOST
        batch, vllm = settings.batch, settings.rollout.vllm
        now = {
            RECOMPUTE: settings.model.gradient_checkpointing,
            TOKENS: batch.tokens_per_microbatch,
            CACHE_SHARE: vllm.gpu_memory_utilization,
        }
        return {path: value for path, value in change.items() if path not in now or now[path] != value}

    def words(self) -> str:
        """In a few words."""
        parts = [f"{self.tokens:,} tokens", "recomputed" if self.recompute else "nothing recomputed"]
        if self.cache_share is not None:
            parts.append(f"cache share {self.cache_share:g}")
        for name, roles in (("optimizer", self.optimizer), ("weights", self.parameters)):
            if roles:
                parts.append(f"{name} of {' and '.join(roles)} on the host between phases")
        return ", ".join(parts)
