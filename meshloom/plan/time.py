"""The time ledger: seconds of each phase of a step, from a roofline of the device and its links.

Owns: the cost model. Refuses to know: settings, which devices they are. Always holds: each second has a formula; arithmetic
and bytes are those of the ledgers; everything else is a constant that is listed.

Decoding: a step of n sequences reads the weights once, or computes 2 operations a parameter and sequence, whichever takes
longer; it reads the cache of all sequences; and each layer costs its launches. Training: products, attention, and traffic of
activations and of logits add up, as they are different kernels; a pass is never faster than its launches. Collectives of
shards hide behind a part of the pass, those inside of layers (tensor and sequence parallel) do not.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshloom.plan.arithmetic import Work, pass_cost
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.parameters import DecoderNumbers
from meshloom.plan.residency import EngineRole, ModelRole, Move, Phase, Residency
from meshloom.plan.sharded_memory import FLOAT32
from meshloom.plan.shards import Part, cached_values, ceil_div, part_of

_OPTIMIZER_BYTES = 46
"""That an update reads and writes of a parameter: norm and clipping of its gradient (12), AdamW with masters and both
moments (28), rounding into the weights (6)."""


UNMEASURED = "; over devices: nothing of this has been measured"
"""Said of parts in which devices wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """A part of a phase.

    Args:
        name: what takes them.
        seconds: how many.
        formula: how they follow.
        over_devices: whether devices wait for each other in it, which the constants of one device say little about.
    """

    name: str
    seconds: float
    formula: str
    over_devices: bool = False


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """A phase of a step.

    Args:
        phase: which.
        role: that it is of.
        parts: that add up to it.
    """

    phase: Phase
    role: str
    parts: tuple[Seconds, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def lines(self) -> Iterator[LedgerLine]:
        """The phase, and its parts."""
        yield _line(f"{self.role}: {self.phase}", self.seconds, self._bound())
        for part in self.parts:
            formula = part.formula + (UNMEASURED if part.over_devices else "")
            yield _line(f"{self.role}: {self.phase}: {part.name}", part.seconds, formula)

    def _bound(self) -> str:
        """What the phase is made of, and what takes most of it."""
        if not self.seconds:
            return "nothing to do"
        most = max(self.parts, key=lambda part: part.seconds)
        names = " + ".join(part.name for part in self.parts)
        return f"{most.seconds / self.seconds:.0%} are {most.name}; {names}"


def _line(name: str, value: float, formula: str) -> LedgerLine:
    return LedgerLine(section="time", name=name, value=round(value, 6), formula=formula, source=DERIVED, unit="s")


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What one replica of an engine generates in a step.

    Args:
        samples: of the replica.
        prompts: that differ; the samples of a prompt share what is computed of it.
        prompt_tokens: of a prompt, on average.
        response_tokens: of a response, on average.
        longest: response.
    """

    samples: int
    prompts: int
    prompt_tokens: float
    response_tokens: float
    longest: int


def decode_step(
    engine: EngineRole, rows: float, past_tokens: float, cluster: Cluster, constants: Constants
) -> tuple[Seconds, ...]:
    """A decode step of an engine.

    Args:
        engine: with its model and degree of tensor parallelism.
        rows: sequences in flight.
        past_tokens: that each of them attends to, on average.
        cluster: the devices.
        constants: of the cost model.
    """
    model, device = engine.model, cluster.device
    read = _met_parameters(model, rows) * engine.width / engine.tensor
    reading = read / (device.memory_bandwidth * constants.weight_read_share)
    flops = 2 * (model.computed + model.head_matrix) * rows / engine.tensor
    computing = flops / (device.matrix_flops * constants.decode_matrix_share)
    cache = rows * past_tokens * cached_values(model, engine.tensor) * engine.width
    formula = f"max({read / 1e9:.2f} GB of weights, {flops / 1e12:.2f} TFLOP)"
    parts = [
        Seconds(name="products", seconds=max(reading, computing), formula=formula),
        Seconds(
            name="attention",
            seconds=cache / (device.memory_bandwidth * constants.cache_read_share),
            formula=f"{cache / 1e9:.2f} GB of keys and values",
        ),
        Seconds(
            name="launches",
            seconds=len(model.layers) * constants.decode_layer_s,
            formula=f"{len(model.layers)} layers × {constants.decode_layer_s * 1e6:g} µs",
        ),
    ]
    if engine.tensor > 1:
        summed = (
            2
            * len(model.layers)
            * _all_reduce(rows * model.hidden * engine.width, engine.tensor, 1, cluster, constants)
        )
        parts.append(Seconds(name="sums", seconds=summed, formula="2 all-reduces a layer", over_devices=True))
    return tuple(parts)


def _met_parameters(model: DecoderNumbers, rows: float) -> float:
    """Parameters that a decode step reads: of routed experts those that any of the rows meets, if tokens choose alike."""
    read = float(model.computed + model.head_matrix)
    for layer in model.layers:
        if layer.experts:
            each = layer.experts / layer.num_experts
            met = layer.num_experts * (1 - (1 - layer.experts_met / layer.num_experts) ** rows)
            read += each * (max(met, layer.experts_met) - layer.experts_met)
    return read


def generate_time(engine: EngineRole, requests: Requests, cluster: Cluster, constants: Constants) -> PhaseTime:
    """Generation by one replica, which all replicas of the same load take.

    Sequences that end make room for others; when none waits, the batch empties until the longest has ended. A cache that is
    bounded holds as many sequences as it has room for, of usual length.
    """
    model, rows = engine.model, min(engine.sequences, requests.samples)
    if engine.cache_bytes is not None:
        each = (requests.prompt_tokens + requests.response_tokens) * cached_values(model, engine.tensor) * engine.width
        rows = max(1, min(rows, int(engine.cache_bytes / each)))
    steps = (requests.samples - rows) * requests.response_tokens / rows + requests.longest
    mean_rows = requests.samples * requests.response_tokens / steps
    past = requests.prompt_tokens + requests.response_tokens / 2
    step = decode_step(engine, mean_rows, past, cluster, constants)
    of = f"{steps:,.0f} steps of {mean_rows:.0f} sequences on average"
    parts = [Seconds(name=part.name, seconds=part.seconds * steps, formula=f"{of} × {part.formula}") for part in step]
    filled = requests.prompts * requests.prompt_tokens
    flops = 2 * model.computed * filled / engine.tensor
    seconds = flops / (cluster.device.matrix_flops * constants.training_matrix_share)
    formula = f"{filled:,.0f} tokens × 2 × {model.computed:,} parameters"
    parts.append(Seconds(name="prompts", seconds=seconds, formula=formula))
    return PhaseTime(phase=Phase.GENERATE, role=engine.name, parts=tuple(parts))


def update_time(role: ModelRole, work: Work, cluster: Cluster, constants: Constants, *, updates: int = 1) -> PhaseTime:
    """Updates of a step.

    Args:
        role: that is trained.
        work: of all samples of the step, over all replicas and all passes over them.
        cluster: the devices.
        constants: of the cost model.
        updates: optimizer updates that the step makes.
    """
    parts = list(_passes(role, work, cluster, constants, backward=True, updates=updates))
    part = part_of(role.model, role.cut, compiled=role.compiled)
    trained = part.sharded if role.trained is None else ceil_div(role.trained, role.cut.shards)
    device = cluster.device
    seconds = updates * trained * _OPTIMIZER_BYTES / (device.memory_bandwidth * constants.memory_share)
    formula = f"{updates} × {trained:,} parameters × {_OPTIMIZER_BYTES} bytes"
    parts.append(Seconds(name="optimizer", seconds=seconds, formula=formula))
    if role.cut.replicate > 1:
        stride = role.cut.shards * role.cut.tensor
        seconds = updates * _all_reduce(trained * 4, role.cut.replicate, stride, cluster, constants)
        formula = f"{updates} × gradients in float32 over {role.cut.replicate} replicas"
        parts.append(Seconds(name="sums over replicas", seconds=seconds, formula=formula, over_devices=True))
    return PhaseTime(phase=Phase.UPDATE, role=role.name, parts=tuple(parts))


def forward_time(role: ModelRole, work: Work, cluster: Cluster, constants: Constants, phase: Phase) -> PhaseTime:
    """Log-probs, values or rewards of all samples of a step, without gradients."""
    parts = tuple(_passes(role, work, cluster, constants, backward=False, updates=1))
    return PhaseTime(phase=phase, role=role.name, parts=parts)


def _passes(
    role: ModelRole, work: Work, cluster: Cluster, constants: Constants, *, backward: bool, updates: int
) -> Iterator[Seconds]:
    """Passes over a replica's share of the work, on a device of a usual stage."""
    cut = role.cut
    tokens = work.tokens / cut.replicas
    count = updates * math.ceil(tokens / updates / role.tokens)
    part = part_of(role.model, cut, compiled=role.compiled)
    compute = _compute(role, work, part, cluster, constants, backward=backward)
    floor = count * part.layers * constants.pass_layer_s * (1.0 if backward else constants.forward_part)
    kernels = sum(each.seconds for each in compute)
    yield from compute
    of = f"{count} microbatches × {part.layers} layers × launches"
    if kernels < floor:
        yield Seconds(name="waiting for launches", seconds=floor - kernels, formula=of)
    busy = max(kernels, floor)
    inside = list(_collectives_inside(role, tokens, part, cluster, constants, backward=backward))
    yield from inside
    if cut.shards > 1:
        exchanged = count * _exchange(role, part, cluster, constants, backward=backward)
        exposed = max(0.0, exchanged - constants.hidden_part * busy)
        formula = f"{exchanged:.3f} s of gathering and scattering, less what hides behind {constants.hidden_part:g} of the pass"
        yield Seconds(name="shards", seconds=exposed, formula=formula, over_devices=True)
    if cut.pipeline > 1:
        whole = busy + sum(each.seconds for each in inside)
        bubble = whole * (cut.pipeline - 1) * updates / count
        yield Seconds(
            name="empty stages",
            seconds=bubble,
            formula=f"({cut.pipeline} stages − 1) ÷ microbatches of an update",
            over_devices=True,
        )


def _compute(
    role: ModelRole, work: Work, part: Part, cluster: Cluster, constants: Constants, *, backward: bool
) -> list[Seconds]:
    """Kernels of a device, over all of its passes."""
    cut, device = role.cut, cluster.device
    cost = pass_cost(role.model, backward=backward)
    devices = cut.devices
    # Frozen weights need no gradient of their own: two thirds of the work. What is recomputed is a forward pass again: of the
    # layers if that is asked for, of logits always, as they are never kept.
    frozen = 2 / 3 if backward and role.trained is not None else 1.0
    again = 1 / 3 if backward and role.recompute else 0.0
    flops = (frozen + again) * work.tokens * cost.per_token
    flops += (frozen + (1 / 3 if backward else 0.0)) * work.predictions * cost.per_prediction
    flops /= devices
    logits = work.predictions * role.model.vocabulary / devices
    logit_bytes = 4 * FLOAT32 + 3 * role.width if backward else 2 * FLOAT32
    attention = work.attention_flops(cost) * (1 + again) / devices
    kept = work.tokens / cut.replicas / cut.sequence * part.kept_values * role.width
    passes = constants.activation_passes * (1.0 if backward else constants.forward_part)
    passes += constants.activation_passes * constants.forward_part if again else 0
    matrix = device.matrix_flops
    return [
        Seconds(
            name="products",
            seconds=flops / (matrix * constants.training_matrix_share),
            formula=f"{flops / 1e12:,.1f} TFLOP",
        ),
        Seconds(
            name="attention",
            seconds=attention / (matrix * constants.attention_share),
            formula=f"{attention / 1e12:,.1f} TFLOP",
        ),
        Seconds(
            name="activations",
            seconds=kept * passes / (device.memory_bandwidth * constants.memory_share),
            formula=f"{kept / 1e9:,.1f} GB × {passes:.1f} reads and writes",
        ),
        Seconds(
            name="logits",
            seconds=logits * logit_bytes / (device.memory_bandwidth * constants.memory_share),
            formula=f"{logits / 1e9:,.1f} billion × {logit_bytes} bytes, read and written in chunks",
        ),
    ]


def _collectives_inside(
    role: ModelRole, tokens: float, part: Part, cluster: Cluster, constants: Constants, *, backward: bool
) -> Iterator[Seconds]:
    """What layers wait for: sums of tensor parallelism, exchanges of sequence parallelism."""
    cut, model = role.cut, role.model
    passes = (2 if backward else 1) + (1 if backward and role.recompute else 0)
    count = math.ceil(tokens / role.tokens) * part.layers * passes
    mine = tokens / cut.sequence * part.layers * passes * role.width
    if cut.tensor > 1:
        moved = 2 * mine * model.hidden
        seconds = _all_reduce(moved, cut.tensor, 1, cluster, constants) + 2 * count * constants.collective_s
        yield Seconds(
            name="sums of tensor parallelism",
            seconds=seconds,
            formula=f"2 all-reduces a layer and pass: {moved / 1e9:,.1f} GB",
            over_devices=True,
        )
    if cut.sequence > 1:
        widths = model.query_width + model.value_width + 2 * model.key_value_width
        moved = mine * widths / cut.tensor * (cut.sequence - 1) / cut.sequence
        seconds = moved / cluster.link(cut.sequence, cut.tensor, constants) + 4 * count * constants.collective_s
        yield Seconds(
            name="exchanges of sequences",
            seconds=seconds,
            formula=f"4 all-to-alls a layer and pass: {moved / 1e9:,.1f} GB",
            over_devices=True,
        )


def _exchange(role: ModelRole, part: Part, cluster: Cluster, constants: Constants, *, backward: bool) -> float:
    """Seconds that shards take to gather weights for a microbatch, and to scatter its gradients in float32."""
    cut = role.cut
    gathers = 1 if not backward or role.gathered_whole else 2
    moved = float(part.parameters * role.width * gathers)
    moved += part.parameters * 4 if backward and role.trained is None else 0
    moved *= (cut.shards - 1) / cut.shards
    collectives = (part.layers + 1) * (gathers + backward)
    return moved / cluster.link(cut.shards, cut.tensor, constants) + collectives * constants.collective_s


def _all_reduce(count: float, group: int, stride: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-reduce of so many bytes of each device."""
    moved = 2 * count * (group - 1) / group
    return moved / cluster.link(group, stride, constants) + constants.collective_s


def movement_time(
    engine: EngineRole, source: ModelRole, cluster: Cluster, constants: Constants, *, apart: bool
) -> PhaseTime:
    """Weights from a trained role to an engine.

    Args:
        engine: that receives; one without weights of its own gets nothing.
        source: that sends.
        cluster: the devices.
        constants: of the cost model.
        apart: whether the engine is on other devices.
    """
    if not engine.own_weights:
        return PhaseTime(phase=Phase.SYNC, role=engine.name, parts=())
    count = source.model.total * engine.width / engine.tensor
    devices = source.cut.devices
    if apart:
        rate, how = (
            cluster.link(devices + engine.tensor, 1, constants, moving=True),
            "over the link between the devices",
        )
    elif devices > 1:
        rate, how = cluster.link(devices, 1, constants), "gathered from all devices"
    else:
        rate, how = cluster.device.memory_bandwidth * constants.memory_share / 2, "copied on the device"
    formula = f"{count / 1e9:,.2f} GB, {how}"
    part = Seconds(name="weights", seconds=count / rate, formula=formula, over_devices=apart or devices > 1)
    return PhaseTime(phase=Phase.SYNC, role=engine.name, parts=(part,))


def offload_time(moves: Iterable[Move], cluster: Cluster, constants: Constants) -> Iterator[Seconds]:
    """What offload moves in a step, each of a node's devices over its own link to the host, and all of them to one disk."""
    for move in moves:
        rate = cluster.device.host_bandwidth * constants.host_share
        if move.at is Residency.DISK:
            rate = min(rate, constants.disk_bandwidth / cluster.devices_per_node)
        formula = f"{move.bytes / 1e9:,.2f} GB × {move.ways}, {move.at}"
        yield Seconds(name=f"{move.role}: {move.name}", seconds=move.seconds(rate), formula=formula)


def step_seconds(
    rollout: Iterable[PhaseTime],
    training: Iterable[PhaseTime],
    constants: Constants,
    *,
    offload: float = 0.0,
    apart: bool = False,
) -> float:
    """Seconds of a step.

    Args:
        rollout: phases of the engines' devices.
        training: phases of the other roles' devices, in their order.
        constants: of the cost model.
        offload: seconds of what offload moves.
        apart: whether both are on devices of their own and a lag of a version or more lets them work at once.
    """
    sampled, trained = (sum(phase.seconds for phase in phases) for phases in (rollout, training))
    return (max(sampled, trained) if apart else sampled + trained) + offload + constants.beside_phases_s
