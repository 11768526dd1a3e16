"""The memory ledger of a device among many: what each role holds there, in which phase, and where the rest is.

Owns: bytes of weights, gathered layers, gradients, optimizer, activations, log-probs, cache and buffers, of models that are
cut; peak and margin of each phase; what offload moves. Refuses to know: settings, which devices they are. Always holds: with
all degrees one it says what ``plan.memory`` says of one device; what is an estimate says so.

On one device that is the whole run, weights are held in the model's arithmetic, masters, moments and gradients in float32. A
model on a mesh (``train.mesh_model``) holds what is trained in float32 alone, its own masters, and what is not in its
arithmetic, all of them sharded alike; a layer and the next are gathered in its arithmetic while one is computed, and tables and
last norm throughout; a layer's gradient is whole in the model's arithmetic and in float32 until it is summed, that of tables
from the head's backward pass to the end. Engines then have a copy of their own (``weights.engine_copy``), without memory while
others train on their devices. Where there are stages, a device keeps activations of as many passes through a stage as
the order of its pipeline has in flight (``plan.pipeline_order``). Roles
that compute in one phase on one device take turns: of what lives only while they compute, the largest counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from meshloom.plan.headroom import needed_bytes
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.pipeline_order import passes_in_flight
from meshloom.plan.residency import EVERY, EngineRole, Holding, ModelRole, Move, Phase, Residency, through_values
from meshloom.plan.shards import Cut, Part, cached_values, ceil_div, part_of

FLOAT32 = 4
COMMUNICATOR_BYTES = 256 * 2**20
"""Buffers of a process group, an estimate."""
BUCKET_BYTES = 1 << 27
"""That a device sends, or receives, at once of weights on their way (``weights.reshard``)."""
OPTIMIZER_PIECES = 16
"""In which an optimizer passes over the device that is kept elsewhere; a large tensor's state is one by itself."""
_SLOTS = 2
"""Buckets of each direction that are in flight."""
MOVEMENT_BYTES = 2 * _SLOTS * BUCKET_BYTES
"""Weights on their way to an engine that may send and receive: an estimate."""


@dataclass(frozen=True, kw_only=True)
class DeviceLedger:
    """What one device holds.

    Args:
        holdings: of all roles on it.
        memory_bytes: that it has; none if that is not known.
    """

    holdings: tuple[Holding, ...]
    memory_bytes: int | None = None

    @cached_property
    def _held(self) -> dict[Phase, int]:
        steady, fleeting = dict.fromkeys(Phase, 0), {phase: dict[str, int]() for phase in Phase}
        for holding in self.holdings:
            for phase in holding.phases:
                if holding.fleeting:
                    roles = fleeting[phase]
                    roles[holding.role] = roles.get(holding.role, 0) + holding.bytes
                else:
                    steady[phase] += holding.bytes
        return {phase: count + max(fleeting[phase].values(), default=0) for phase, count in steady.items()}

    def held(self, phase: Phase) -> int:
        """Bytes at once in a phase; of what lives only while a role computes, the largest role's."""
        return self._held[phase]

    def needed(self, phase: Phase) -> int:
        """Bytes that a phase takes of a GPU: what is held, what is lost between blocks, and libraries."""
        return needed_bytes(self.held(phase))

    def margin(self, phase: Phase) -> int | None:
        """Bytes that are left in a phase, negative if it does not fit; none if the device's memory is not known."""
        return None if self.memory_bytes is None else self.memory_bytes - self.needed(phase)

    @property
    def peak(self) -> tuple[Phase, int]:
        """The phase that holds most, the first of equals, and its bytes."""
        phase = max(Phase, key=self.held)
        return phase, self.held(phase)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that a device has: values are asked for only where a critic is."""
        asked = any(Phase.VALUES in found.phases and found.fleeting for found in self.holdings)
        return tuple(phase for phase in Phase if asked or phase is not Phase.VALUES)

    def elsewhere(self, at: Residency) -> int:
        """Bytes in the host's memory or on the disk, for this device."""
        return sum(holding.bytes for holding in self.holdings if holding.at is at is not Residency.DEVICE)

    def lines(self) -> Iterator[LedgerLine]:
        """Each holding, and the phases' sums."""
        for holding in self.holdings:
            when = "every phase" if holding.phases == EVERY else ", ".join(holding.phases)
            where = "" if holding.at is Residency.DEVICE else f"; else on the {holding.at}"
            where = f"; in {when}{where}" if holding.phases else f"; on the {holding.at}"
            where += ", but for its turns" if holding.streamed else ""
            name, formula = f"{holding.role}: {holding.name}", f"{holding.formula}{where}"
            yield replace(_line(name, holding.bytes, formula), phases=tuple(map(str, holding.phases)))
        for phase in self.phases:
            formula = "sum of what the phase holds; libraries and fragmentation come on top"
            yield _line(f"held in {phase}", self.held(phase), formula)
            if (margin := self.margin(phase)) is not None:
                yield _line(f"margin in {phase}", margin, "memory of the device − what the phase needs")


def _line(name: str, value: int, formula: str) -> LedgerLine:
    return LedgerLine(section="memory", name=name, value=value, formula=formula, source=DERIVED, unit="bytes")


def device_ledger(
    models: Iterable[ModelRole], engines: Iterable[EngineRole] = (), memory_bytes: int | None = None
) -> DeviceLedger:
    """The fullest device of those that hold these roles; of each model that is its heaviest stage.

    Args:
        models: of the roles on the device.
        engines: on it.
        memory_bytes: that it has; none if that is not known.
    """
    holdings = [holding for role in models for holding in model_holdings(role, heaviest_stage(role))]
    holdings += [holding for engine in engines for holding in engine_holdings(engine)]
    return DeviceLedger(holdings=tuple(holdings), memory_bytes=memory_bytes)


@lru_cache(maxsize=4096)
def heaviest_stage(role: ModelRole) -> int:
    """The stage whose devices hold most at once; the first of equals.

    Where all layers are alike, that is the first, which has most in flight, the last, which has the head, or the second, which
    has most in flight of those without tables.
    """
    last = role.cut.pipeline - 1
    if last == 0:
        return 0
    alike = len(role.model.layers.runs) == 1
    stages = sorted({0, 1, last}) if alike else range(last + 1)
    return max(stages, key=lambda stage: DeviceLedger(holdings=model_holdings(role, stage)).peak[1])


@lru_cache(maxsize=4096)
def model_holdings(role: ModelRole, stage: int = 0) -> tuple[Holding, ...]:
    """What a role's model holds on a device of a stage."""
    part = part_of(role.model, role.cut, compiled=role.compiled, stage=stage)
    found = [*_weights(role, part), *_gathered(role, part)]
    for phase in role.computes:
        found += _computing(role, part, phase, stage)
    found += [*_sent(role, part), *_kept(role)]
    return (*found, *_communication(role.name, role.cut))


@lru_cache(maxsize=1024)
def engine_holdings(role: EngineRole) -> tuple[Holding, ...]:
    """What a replica of an engine holds on each of its devices."""
    # vLLM takes its cache back before it is asked for the tokens that prove a movement.
    proven = (Phase.SYNC,) if role.loads_whole else ()
    awake = (Phase.GENERATE, *proven) if role.sleeps else EVERY
    found: list[Holding] = []
    if role.own_weights:
        part = part_of(role.model, Cut(tensor=role.tensor), compiled=True, of_engine=True)
        phases = (Phase.GENERATE, Phase.SYNC) if role.sleeps else EVERY
        formula = f"a copy of the weights: parameters{_by(tensor=role.tensor)} × {role.width}"
        found.append(_held(role, "engine's weights", part.parameters * role.width, formula, *phases))
        found.append(_received(role, part.parameters * role.width))
        if role.loads_whole:
            found.append(_whole_tensors(role))
    per_token = cached_values(role.model, role.tensor) * role.width
    wanted = (role.sequences * role.slot_tokens + role.kept_tokens) * per_token
    formula = f"{role.sequences} sequences at once × {role.slot_tokens} tokens × {per_token}"
    if role.kept_tokens:
        formula += f" + {role.kept_tokens:,} tokens kept between turns × {per_token}"
    if role.cache_bytes is not None and (role.fills_cache or role.cache_bytes < wanted):
        wanted, formula = role.cache_bytes, f"{role.cache_bound}; wanted are {formula}"
    found.append(_held(role, "key-value cache", wanted, formula, *awake))
    if role.keeps_logits:
        # Drawing needs them whole: those of a part, all parts as they come, and together.
        copies = 1 if role.tensor == 1 else 3
        logits = copies * role.sequences * role.model.vocabulary * FLOAT32
        formula = f"sequences at once × vocabulary × {FLOAT32}{'' if copies == 1 else f' × {copies} (gathered)'}"
        found.append(_held(role, "logits of a decode step", logits, formula, Phase.GENERATE))
    return (*found, *_communication(role.name, Cut(tensor=role.tensor)))


def checkpoint_bytes(role: ModelRole) -> int:
    """Bytes of a checkpoint's weights and optimizer, of all devices together; of adapters alone where only they are trained."""
    trained = role.model.total if role.trained is None else role.trained
    masters = 0 if role.width == FLOAT32 else FLOAT32
    return trained * (role.width + (masters + 2 * FLOAT32 if role.is_trained else 0))


def moves(holdings: Iterable[Holding]) -> tuple[Move, ...]:
    """What offload moves in a step: in before each stretch of phases that need it, and out again after one that changes it."""
    found = []
    for holding in holdings:
        if holding.at is Residency.DEVICE or not (holding.phases or holding.streamed):
            continue
        stretches = [[Phase.UPDATE]] if holding.streamed else _stretches(holding.phases)
        ways = sum(1 + (Phase.UPDATE in stretch) for stretch in stretches)
        found.append(Move(role=holding.role, name=holding.name, bytes=holding.bytes, ways=ways, at=holding.at))
    return tuple(found)


def _stretches(phases: tuple[Phase, ...]) -> list[list[Phase]]:
    """Runs of neighbouring phases; the last phase of a step is the neighbour of the first of the next."""
    runs: list[list[Phase]] = [[]]
    for phase in EVERY:
        if phase in phases:
            runs[-1].append(phase)
        elif runs[-1]:
            runs.append([])
    runs = [run for run in runs if run]
    if len(runs) > 1 and runs[0][0] is EVERY[0] and runs[-1][-1] is EVERY[-1]:
        runs[0] = runs.pop() + runs[0]
    return runs


def _weights(role: ModelRole, part: Part) -> Iterator[Holding]:
    """Weights, and what training keeps beside them."""
    by = _by(stages=role.cut.pipeline, tensor=role.cut.tensor, shards=role.cut.shards)
    all_trained = role.is_trained and role.trained is None
    own_masters = role.on_mesh and all_trained and role.width < FLOAT32
    width = FLOAT32 if own_masters else role.width
    staged = f"{part.sharded:,} parameters that a device of the heaviest stage has"
    of = staged if role.cut.pipeline > 1 else f"parameters{by}"
    formula = f"{of} × {width}" + (", float32" if own_masters else "")
    yield _held(role, "weights", part.sharded * width, formula, *role.needs_weights, at=role.parameters_at)
    if not role.is_trained:
        return
    trained = part.sharded
    if role.trained is not None:
        trained = ceil_div(role.trained, role.cut.pipeline * role.cut.tensor * role.cut.shards)
        of = f"trained parameters{by}"
        width = FLOAT32 if role.on_mesh else role.width
        formula = f"{of} × {width}"
        yield _held(role, "adapter weights", trained * width, formula, *role.needs_weights, at=role.parameters_at)
    kept = EVERY if role.optimizer_at is Residency.DEVICE else (Phase.UPDATE,)
    place = {"at": role.optimizer_at, "streamed": role.streams}
    kept = () if role.streams else kept
    if not role.on_mesh:
        masters = 0 if role.width == FLOAT32 else trained * FLOAT32
        formula = f"{of} × {FLOAT32}" if masters else "the weights are float32 themselves"
        yield _held(role, "float32 masters", masters, formula, *kept, **place)
    formula = f"{of} × 2 × {FLOAT32}"
    yield _held(role, "optimizer moments", 2 * trained * FLOAT32, formula, *kept, **place)
    formula = f"{of} × {FLOAT32}, float32"
    yield _held(role, "gradients", trained * FLOAT32, formula, Phase.UPDATE, fleeting=not role.streams)
    if role.streams:
        yield _streamed(role, part, trained)


def _streamed(role: ModelRole, part: Part, trained: int) -> Holding:
    """Pieces of the optimizer in its turn, when a microbatch's activations are gone."""
    each = FLOAT32 * (2 if role.on_mesh or role.width == FLOAT32 else 3)
    shards = role.cut.tensor * role.cut.shards
    layer = ceil_div(part.largest_layer, role.cut.shards)
    table = ceil_div(max(role.model.embedding, role.model.head), shards)
    if role.trained is not None:
        layer = table = ceil_div(trained, part.layers)
    usual = max(ceil_div(trained, OPTIMIZER_PIECES), layer)
    count = min(trained, max(usual, table) + usual) * each
    formula = (
        f"at most: two pieces, of 1/{OPTIMIZER_PIECES} of it or of the largest layer and table; not beside activations"
    )
    return Holding(
        role=f"{role.name}'s step",
        name="optimizer in turn",
        bytes=count,
        phases=(Phase.UPDATE,),
        formula=formula,
        fleeting=True,
    )


def _gathered(role: ModelRole, part: Part) -> Iterator[Holding]:
    """What is whole for a while of what is sharded."""
    if not role.on_mesh:
        return
    if role.gathered_whole:
        count, formula = part.parameters, f"parameters of the device × {role.width}"
    else:
        # Without other shards nothing is fetched ahead, but layers are rounded into memory of their own all the same.
        ahead = min(2 if role.cut.shards > 1 else 1, part.layers)
        count = part.root + ahead * part.largest_layer
        formula = f"(tables and last norm + {ahead} × the largest layer) × {role.width}"
    # After a movement the model is asked for a few tokens, to prove it.
    phases = (*role.computes, *(phase for phase in role.lends if phase is Phase.SYNC))
    yield _held(role, "gathered layers", count * role.width, formula, *phases, fleeting=True)
    if role.is_trained and role.trained is None:
        # Summed over one rank it is whole three times: as it is given, divided, and as the shard.
        each = role.width + FLOAT32 if role.cut.shards > 1 else 3 * FLOAT32
        count = max(part.root * each, part.root * role.width + part.largest_layer * each)
        formula = (
            f"estimate: tables × {role.width} + the largest layer × {each}, or tables × {each}, until they are summed"
        )
        yield _held(role, "gathered gradients", count, formula, Phase.UPDATE, fleeting=True)


def _sent(role: ModelRole, part: Part) -> Iterator[Holding]:
    """Buffers from which weights are sent; where engines are on the same devices they are gone after each movement."""
    if role.on_mesh and Phase.SYNC in role.lends:
        count = _SLOTS * min(BUCKET_BYTES, part.sharded * role.width)
        formula = f"{_SLOTS} buckets that are sent, of {BUCKET_BYTES // 2**20} MiB at most"
        phases = EVERY if role.apart else (Phase.SYNC,)
        yield _held(role, "weights in movement", count, formula, *phases, fleeting=not role.apart)


def _kept(role: ModelRole) -> Iterator[Holding]:
    """Samples of the step that is on, which ranks have from the controller once (``loop.held``)."""
    if role.kept_tokens and role.is_trained:
        count = ceil_div(role.kept_tokens, role.cut.replicas) * role.kept_width
        formula = f"{role.kept_tokens} tokens of a step{_by(replicas=role.cut.replicas)} × {role.kept_width}"
        phases = through_values(role.computes) if role.kept_at is Residency.DEVICE else ()
        yield _held(role, "samples", count, formula, *phases, at=role.kept_at)


def _received(role: EngineRole, weights: int) -> Holding:
    """The same of an engine with ``weights`` bytes; on devices that train it counts both directions."""
    name, bucket = "weights in movement", min(BUCKET_BYTES, weights)
    if role.apart:
        formula = f"{_SLOTS} buckets that are received, of {BUCKET_BYTES // 2**20} MiB at most"
        return _held(role, name, _SLOTS * bucket, formula, *EVERY)
    if role.over_ranks:
        formula = f"2 × {_SLOTS} buckets, sent and received, of {BUCKET_BYTES // 2**20} MiB at most"
        return _held(role, name, 2 * _SLOTS * bucket, formula, Phase.SYNC, fleeting=True)
    formula = "estimate: a bucket of weights, gathered and in flight"
    return _held(role, name, MOVEMENT_BYTES, formula, Phase.SYNC, fleeting=True)


def _whole_tensors(role: EngineRole) -> Holding:
    """Tensors on their way through an engine's own loaders, which wait for all of a layer."""
    part = part_of(role.model, Cut(), compiled=True, of_engine=True)
    values = max(role.model.embedding, role.model.head) + part.largest_layer
    count = min(part.parameters * role.width, BUCKET_BYTES + values * role.width)
    formula = f"a bucket, the largest table and a layer, whole × {role.width}, for the engine's loaders"
    return _held(role, "whole tensors", count, formula, Phase.SYNC, fleeting=True)


def _computing(role: ModelRole, part: Part, phase: Phase, stage: int) -> Iterator[Holding]:
    """Logits and activations of a microbatch."""
    tokens = ceil_div(role.tokens, role.cut.sequence)
    of = f"tokens at once{_by(sequence=role.cut.sequence)}"
    name = "" if phase is Phase.UPDATE else f" in {phase}"
    logits = min(role.chunk_bytes, tokens * part.vocabulary * role.logit_bytes)
    chunk = f"{role.chunk_bytes / 2**20:g} MiB"
    formula = f"min({chunk}, {of} × vocabulary{_by(tensor=role.cut.tensor)} × {role.logit_bytes})"
    yield _held(role, f"logits{name}", logits, formula, phase, fleeting=True)
    each = role.cut.stages_per_device
    flights = passes_in_flight(
        devices=role.cut.pipeline, device=stage, stages_per_device=each, microbatches=role.microbatches
    )
    many = (
        "" if flights == each else f" × {flights} in flight" + (f" ÷ {each} stages of the device" if each > 1 else "")
    )
    if phase is not Phase.UPDATE:
        values = part.hidden + part.layer_values
        formula = f"estimate: {of} × (hidden + {part.layer_values}) × {role.width}: one layer at a time"
    elif role.recompute:
        whole = part.layer_values + part.layer_gradients
        values = ceil_div(flights * part.layers, each) * part.hidden + whole
        formula = f"estimate: {of} × ({part.layers} layers × hidden{many} + {whole}) × {role.width}"
    else:
        values = ceil_div(flights * part.kept_values, each)
        formula = f"estimate: {of} × {part.kept_values} of {part.layers} layers{many} × {role.width}"
    yield _held(role, f"activations{name}", tokens * values * role.width, formula, phase, fleeting=True)


def _communication(role: str, cut: Cut) -> Iterator[Holding]:
    """Buffers of the process groups, one for each axis."""
    if axes := sum(size > 1 for size in (cut.replicate, cut.shards, cut.tensor, cut.pipeline)):
        formula = f"estimate: {axes} process groups × {COMMUNICATOR_BYTES // 2**20} MiB"
        count = axes * COMMUNICATOR_BYTES
        yield Holding(role=role, name="communication", bytes=count, phases=EVERY, formula=formula)


def _held(
    role: ModelRole | EngineRole,
    name: str,
    count: int,
    formula: str,
    *phases: Phase,
    fleeting: bool = False,
    at: Residency = Residency.DEVICE,
    streamed: bool = False,
) -> Holding:
    return Holding(
        role=role.name,
        name=name,
        bytes=count,
        phases=phases,
        formula=formula,
        fleeting=fleeting,
        at=at,
        streamed=streamed,
    )


def _by(**degrees: int) -> str:
    """How a formula says by what it is divided; nothing where it is not."""
    return "".join(f" ÷ {size} ({name})" for name, size in degrees.items() if size > 1)
