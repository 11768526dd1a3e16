"""Roles on a device, and what they hold there: the records of the sharded memory ledger.

Owns: what must be known of a role, and what is said of its bytes. Refuses to know: any formula. Always holds: plain numbers,
so that a search can make thousands of them a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.shards import Cut, cached_values


class Phase(StrEnum):
    """Phases of a step, in their order."""

    GENERATE = "generate"
    SCORE = "score"
    LOGPROB = "log-prob"
    VALUES = "values"
    UPDATE = "update"
    SYNC = "sync"


class Residency(StrEnum):
    """Where bytes are while their role does not compute."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


EVERY = tuple(Phase)


def through_values(needed: Sequence[Phase]) -> tuple[Phase, ...]:
    """Phases in which weights are on the device that are needed in these: they stay there between log-probs and updates, while
    a critic is asked."""
    stays = Phase.LOGPROB in needed and Phase.UPDATE in needed
    return tuple(phase for phase in EVERY if phase in needed or (stays and phase is Phase.VALUES))


@dataclass(frozen=True, kw_only=True)
class ModelRole:
    """A role that computes log-probs, values or rewards with a model, trained or not.

    Args:
        name: of the role.
        model: in numbers.
        cut: of the model.
        computes: phases in which it computes; in ``UPDATE`` it is trained.
        lends: further phases that need its weights on the device: ``SYNC`` to send them, ``GENERATE`` if the engine samples
            from these very weights.
        width: bytes of a value of its arithmetic.
        trained: parameters that are trained, of the whole model; none for all of them.
        tokens: of a microbatch, over all devices that share its sequences.
        bound: tokens that a microbatch may have, a shared prompt in each of its samples; none for ``tokens``.
        samples: that it may have; none: no bound.
        group: samples of a prompt, which stay together in microbatches.
        microbatches: of an update on one replica, which bounds what a pipeline has in flight.
        recompute: whether layers are recomputed in the backward pass.
        compiled: whether layers are compiled.
        chunk_bytes: bound on logits and their gradient at once.
        logit_bytes: of a logit with its gradient.
        gathered_whole: keep all layers gathered from forward to backward.
        over_ranks: whether it is one of a run over several devices, and so a model on a mesh even where it has one device.
        apart: whether the engines that it sends its weights to are on other devices.
        parameters_at: where weights are while they are not needed.
        optimizer_at: where masters and moments are between updates.
        streams: whether they are there during updates too, and come to the device in pieces.
        kept_tokens: of a step, which its ranks keep from its first pass over them to the last; 0 where nothing is kept.
        kept_width: bytes of one of them, all columns.
        kept_at: where they are kept.
    """

    name: str
    model: DecoderNumbers
    cut: Cut = Cut()
    computes: tuple[Phase, ...]
    lends: tuple[Phase, ...] = ()
    width: int
    trained: int | None = None
    tokens: int
    bound: int | None = None
    samples: int | None = None
    group: int = 1
    microbatches: int = 1
    recompute: bool
    compiled: bool
    chunk_bytes: int
    logit_bytes: int
    gathered_whole: bool = False
    over_ranks: bool = False
    apart: bool = False
    parameters_at: Residency = Residency.DEVICE
    optimizer_at: Residency = Residency.DEVICE
    streams: bool = False
    kept_tokens: int = 0
    kept_width: int = 0
    kept_at: Residency = Residency.HOST

    @property
    def is_trained(self) -> bool:
        return Phase.UPDATE in self.computes

    @property
    def on_mesh(self) -> bool:
        """Whether it is a model on a mesh (``train.mesh_model``), whose parameters are shards."""
        return self.over_ranks or self.cut.devices > 1

    @property
    def needs_weights(self) -> tuple[Phase, ...]:
        """Phases in which its weights are on the device."""
        if self.parameters_at is Residency.DEVICE:
            return EVERY
        return through_values([phase for phase in Phase if phase in self.computes or phase in self.lends])


@dataclass(frozen=True, kw_only=True)
class EngineRole:
    """A replica of a rollout engine.

    Args:
        name: of the role.
        model: in numbers.
        tensor: devices of a replica.
        width: bytes of a value of its arithmetic.
        own_weights: whether it has a copy of the weights, and does not sample from the actor's; needed where those are on other
            devices, sharded, or cut in another way.
        sleeps: whether weights of its own and the cache are gone outside of its phases.
        sequences: that a replica generates at once.
        slot_tokens: cache of one sequence, in tokens.
        kept_tokens: that stay in the cache between turns of episodes, beside those of the sequences.
        cache_bytes: bound on the cache of a device; none if there is none.
        cache_bound: where that bound comes from, in words.
        fills_cache: whether it takes the bound whole, whatever the sequences need.
        keeps_logits: whether a decode step's logits are whole, in float32.
        over_ranks: whether it is one of a run over several devices, which gets its weights by exchange.
        apart: whether the model whose weights it gets is on other devices.
        loads_whole: whether it gets every tensor whole, and takes its part of it itself, as vLLM does.
    """

    name: str = "rollout"
    model: DecoderNumbers
    tensor: int = 1
    width: int
    own_weights: bool
    sleeps: bool = True
    sequences: int
    slot_tokens: int
    kept_tokens: int = 0
    cache_bytes: int | None = None
    cache_bound: str = "as given"
    fills_cache: bool = False
    keeps_logits: bool = True
    over_ranks: bool = False
    apart: bool = False
    loads_whole: bool = False

    @property
    def longest_sample_bytes(self) -> int:
        """Cache of one sequence as long as it may be, on one of the replica's devices."""
        return self.slot_tokens * cached_values(self.model, self.tensor) * self.width


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Bytes of one kind on one device.

    Args:
        role: whose they are.
        name: what they are.
        bytes: how many.
        phases: when they are on the device; none for what never is.
        formula: how they follow.
        fleeting: whether they live only while their role computes.
        at: where they are in the other phases.
        streamed: whether they pass over the device in pieces in each update, which are a holding of their own.
    """

    role: str
    name: str
    bytes: int
    phases: tuple[Phase, ...]
    formula: str
    fleeting: bool = False
    at: Residency = Residency.DEVICE
    streamed: bool = False


@dataclass(frozen=True, kw_only=True)
class Move:
    """What offload moves in a step, of one device.

    Args:
        role: whose bytes.
        name: what they are.
        bytes: in one direction.
        ways: times that they are moved in a step.
        at: where they come from and go to.
    """

    role: str
    name: str
    bytes: int
    ways: int
    at: Residency

    def seconds(self, bandwidth: float) -> float:
        """Time of all ways, in bytes a second of the device's share."""
        return self.bytes * self.ways / bandwidth
