"""Seconds of passes over samples: of updates, and of log-probs, values and rewards without gradients.

Owns: the cost model of training. Refuses to know: settings, which devices they are. Always holds: operations are those of
``plan.arithmetic``; everything else is a constant that is listed.

Products, attention, and traffic of activations and of logits add up, as they are different kernels; a pass is never faster
than its launches. Collectives of shards hide behind a part of the pass, those inside of layers (tensor and sequence parallel)
do not.
"""

import math
from collections.abc import Iterator, Sequence

from meshloom.plan.arithmetic import Work, pass_cost
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.ledger import most_microbatches
from meshloom.plan.pipeline_order import bubble
from meshloom.plan.residency import ModelRole, Phase
from meshloom.plan.seconds import PhaseTime, Seconds
from meshloom.plan.sharded_memory import FLOAT32
from meshloom.plan.shards import Part, ceil_div, part_of

EMPTY_STAGES = "empty stages"
"""Name of the part in which stages of a pipeline have nothing to do."""
_OPTIMIZER_BYTES = 46
"""That an update reads and writes of a parameter: norm and clipping of its gradient (12), AdamW with masters and both
moments (28), rounding into the weights (6)."""


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
    formula = f"{updates} updates × {constants.update_start_s * 1e3:g} ms"
    parts.append(Seconds(name="start", seconds=updates * constants.update_start_s, formula=formula))
    if role.cut.replicate > 1:
        stride = role.cut.shards * role.cut.tensor
        seconds = updates * cluster.all_reduce(trained * 4, role.cut.replicate, stride, constants)
        formula = f"{updates} × gradients in float32 over {role.cut.replicate} replicas"
        parts.append(Seconds(name="sums over replicas", seconds=seconds, formula=formula, over_devices=True))
    return PhaseTime(phase=Phase.UPDATE, role=role.name, parts=tuple(parts))


def forward_time(role: ModelRole, work: Work, cluster: Cluster, constants: Constants, phase: Phase) -> PhaseTime:
    """Log-probs, values or rewards of all samples of a step, without gradients."""
    parts = tuple(_passes(role, work, cluster, constants, backward=False, updates=1))
    return PhaseTime(phase=phase, role=role.name, parts=parts)


def microbatches(role: ModelRole, work: Work, *, updates: int = 1) -> int:
    """Passes of each replica over its share of the work: of the replica that has most, as all make equally many.

    Where samples differ in length, long and short ones fill microbatches nearly to their bound; where they are alike, a
    microbatch has room for whole samples, and for whole groups of a prompt.

    Args:
        role: whose model computes.
        work: over all replicas and updates.
        updates: into which it is cut evenly.
    """
    bound, replicas = role.bound or role.tokens, role.cut.replicas
    samples = ceil_div(ceil_div(work.samples, updates), replicas)
    if work.alike and samples:
        length = ceil_div(work.packed or work.tokens, work.samples)
        return updates * most_microbatches(samples, length, bound, role.samples, role.group)
    by_tokens = math.ceil((work.packed or work.tokens) / replicas / updates / bound)
    by_samples = 0 if role.samples is None else ceil_div(samples, role.samples)
    return updates * max(1, by_tokens, by_samples)


def passes_of_prompt(role: ModelRole, group: Sequence[float], work: Work, *, groups: float, updates: int = 1) -> float:
    """How often a prompt is computed for a group of samples: once in each microbatch that has samples of it.

    Samples of a group are in one microbatch as far as they fit; under a bound on samples they are dealt out one by one. Where
    there are fewer groups than replicas, these share them.

    Args:
        role: whose microbatches they are.
        group: tokens of each of its samples, prompt included.
        work: of all groups in all updates, each prompt once.
        groups: of an update.
        updates: into which the work is cut evenly.
    """
    if role.samples is not None:
        parts = microbatches(role, work, updates=updates) // updates
    else:
        parts, room = 0, 0.0
        for tokens in group:
            if tokens > room:
                parts, room = parts + 1, float(role.bound or role.tokens)
            room -= tokens
    return min(len(group), max(parts, role.cut.replicas / max(1.0, groups)))


def _passes(
    role: ModelRole, work: Work, cluster: Cluster, constants: Constants, *, backward: bool, updates: int
) -> Iterator[Seconds]:
    """Passes over a replica's share of the work, on a device of a usual stage."""
    cut = role.cut
    tokens = work.tokens / cut.replicas
    count = microbatches(role, work, updates=updates)
    part = part_of(role.model, cut, compiled=role.compiled)
    compute = _compute(role, work, part, cluster, constants, backward=backward)
    floor = count * part.layers * constants.pass_layer_s * (1.0 if backward else constants.forward_part)
    kernels = sum(each.seconds for each in compute)
    yield from compute
    of = f"{count} microbatches × {part.layers} layers × launches"
    if kernels < floor:
        yield Seconds(name="waiting for launches", seconds=floor - kernels, formula=of)
    busy = max(kernels, floor)
    inside = list(_collectives_inside(role, tokens, count, part, cluster, constants, backward=backward))
    yield from inside
    if cut.shards > 1:
        exchanged = count * _exchange(role, part, cluster, constants, backward=backward)
        exposed = max(0.0, exchanged - constants.hidden_part * busy)
        formula = f"{exchanged:.3f} s of gathering and scattering, less what hides behind {constants.hidden_part:g} of the pass"
        yield Seconds(name="shards", seconds=exposed, formula=formula, over_devices=True)
    if cut.pipeline > 1:
        sent = _between_stages(role, tokens, count, cluster, constants, backward=backward)
        yield sent
        whole = busy + sum(each.seconds for each in inside) + sent.seconds
        share = bubble(
            devices=cut.pipeline, stages_per_device=cut.stages_per_device, microbatches=max(1, count // updates)
        )
        each = "" if cut.stages_per_device == 1 else f" ÷ {cut.stages_per_device} stages of each device"
        yield Seconds(
            name=EMPTY_STAGES,
            seconds=whole * share,
            formula=f"({cut.pipeline} devices − 1) ÷ microbatches of an update{each}",
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
    role: ModelRole,
    tokens: float,
    microbatches: int,
    part: Part,
    cluster: Cluster,
    constants: Constants,
    *,
    backward: bool,
) -> Iterator[Seconds]:
    """What layers wait for: sums of tensor parallelism, exchanges of sequence parallelism."""
    cut, model = role.cut, role.model
    passes = (2 if backward else 1) + (1 if backward and role.recompute else 0)
    count = microbatches * part.layers * passes
    mine = tokens / cut.sequence * part.layers * passes * role.width
    if cut.tensor > 1:
        moved = 2 * mine * model.hidden
        seconds = cluster.all_reduce(moved, cut.tensor, 1, constants) + 2 * count * constants.collective_s
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


def _between_stages(
    role: ModelRole, tokens: float, count: int, cluster: Cluster, constants: Constants, *, backward: bool
) -> Seconds:
    """Hidden states to the stage after, and their gradients back, from each stage of a device."""
    cut = role.cut
    ways = (2 if backward else 1) * cut.stages_per_device
    moved = ways * tokens / cut.sequence / cut.tensor * role.model.hidden * role.width
    stride = cut.replicate * cut.shards * cut.tensor
    # What crosses nodes leaves by one device's port.
    inside = cut.pipeline * stride <= cluster.devices_per_node
    link = cluster.link(2, 1 if inside else cluster.devices_per_node, constants)
    return Seconds(
        name="hidden states between stages",
        seconds=moved / link + ways * count * constants.collective_s,
        formula=f"{ways} times a microbatch: {moved / 1e9:,.1f} GB",
        over_devices=True,
    )


def _exchange(role: ModelRole, part: Part, cluster: Cluster, constants: Constants, *, backward: bool) -> float:
    """Seconds that shards take to gather weights for a microbatch, and to scatter its gradients in float32."""
    cut = role.cut
    gathers = 1 if not backward or role.gathered_whole else 2
    moved = float(part.parameters * role.width * gathers)
    # Tables and last norm are gathered for each stage of a device.
    moved += (cut.stages_per_device - 1) * part.root * role.width
    moved += part.parameters * 4 if backward and role.trained is None else 0
    moved *= (cut.shards - 1) / cut.shards
    collectives = (part.layers + 1) * (gathers + backward) + cut.stages_per_device - 1
    return moved / cluster.link(cut.shards, cut.tensor, constants) + collectives * constants.collective_s
