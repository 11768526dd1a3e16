"""Seconds of generation: of a decode step, and of all that a replica generates in a step.

Owns: the cost model of decoding. Refuses to know: settings, which devices they are. Always holds: bytes and operations are
those of the ledgers; everything else is a constant that is listed.

A step of n sequences reads the weights once, or computes 2 operations a parameter and sequence, whichever takes longer; it
reads the cache of all sequences; writes logits and reads them; and each layer costs its launches. Prompts are computed as in a
training pass, once each; those of later turns as far as they did not stay in the cache.
"""

from dataclasses import dataclass

from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.residency import EngineRole, Phase
from meshloom.plan.seconds import PhaseTime, Seconds
from meshloom.plan.shards import cached_values

_FLOAT32 = 4
LOGIT_BYTES = 2 * _FLOAT32
"""That drawing a token writes and reads of a logit, in float32."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What one replica of an engine generates in a step.

    Args:
        samples: of the replica.
        prompts: that differ; the samples of a prompt share what is computed of it.
        prompt_tokens: of a prompt, on average.
        response_tokens: of a response, on average.
        longest: response.
        later_turns: of an episode after its first, whose prompt is the conversation so far.
    """

    samples: int
    prompts: int
    prompt_tokens: float
    response_tokens: float
    longest: int
    later_turns: int = 0


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
    logits = rows * model.vocabulary / engine.tensor * LOGIT_BYTES
    drawing = logits / (device.memory_bandwidth * constants.memory_share)
    formula = f"{logits / 1e9:.2f} GB of logits, written and read"
    parts.append(Seconds(name="drawing", seconds=drawing, formula=formula))
    if engine.tensor > 1:
        summed = (
            2 * len(model.layers) * cluster.all_reduce(rows * model.hidden * engine.width, engine.tensor, 1, constants)
        )
        parts.append(Seconds(name="sums", seconds=summed, formula="2 all-reduces a layer", over_devices=True))
        gathered = cluster.all_gather(rows * model.vocabulary * _FLOAT32, engine.tensor, 1, constants)
        formula = f"{rows:.0f} rows of {model.vocabulary:,} in float32"
        parts.append(Seconds(name="gathered logits", seconds=gathered, formula=formula, over_devices=True))
    return tuple(parts)


def _met_parameters(model: DecoderNumbers, rows: float) -> float:
    """Parameters that a decode step reads: of routed experts those that any of the rows meets, if tokens choose alike."""
    read = float(model.computed + model.head_matrix)
    for layer, count in model.layers.runs:
        if layer.experts:
            each = layer.experts / layer.num_experts
            met = layer.num_experts * (1 - (1 - layer.experts_met / layer.num_experts) ** rows)
            read += count * each * (max(met, layer.experts_met) - layer.experts_met)
    return read


def generate_time(engine: EngineRole, requests: Requests, cluster: Cluster, constants: Constants) -> PhaseTime:
    """Generation by one replica, which all replicas of the same load take.

    Sequences that end make room for others; when none waits, the batch empties until the longest has ended. A cache that is
    bounded holds as many sequences as it has room for, of usual length.
    """
    model, rows = engine.model, min(engine.sequences, requests.samples)
    kept = 1.0
    if engine.cache_bytes is not None:
        each = (requests.prompt_tokens + requests.response_tokens) * cached_values(model, engine.tensor) * engine.width
        rows = max(1, min(rows, int(engine.cache_bytes / each)))
        kept = min(1.0, engine.cache_bytes / (each * requests.samples))
    steps = (requests.samples - rows) * requests.response_tokens / rows + requests.longest
    mean_rows = requests.samples * requests.response_tokens / steps
    past = requests.prompt_tokens + requests.response_tokens / 2
    step = decode_step(engine, mean_rows, past, cluster, constants)
    of = f"{steps:,.0f} steps of {mean_rows:.0f} sequences on average"
    parts = [Seconds(name=part.name, seconds=part.seconds * steps, formula=f"{of} × {part.formula}") for part in step]
    # A turn's prompt is there, as far as the cache has room for all episodes.
    of_turns = requests.samples * requests.later_turns * (requests.prompt_tokens + requests.response_tokens / 2)
    filled = requests.prompts * requests.prompt_tokens + (1 - kept) * of_turns
    flops = 2 * model.computed * filled / engine.tensor
    seconds = flops / (cluster.device.matrix_flops * constants.prompt_matrix_share)
    formula = f"{filled:,.0f} tokens × 2 × {model.computed:,} parameters"
    if requests.later_turns:
        formula += f"; {kept:.0%} of the conversations stay in the cache between {requests.later_turns + 1} turns"
    parts.append(Seconds(name="prompts", seconds=seconds, formula=formula))
    parts.append(Seconds(name="start", seconds=constants.generate_start_s, formula="once a phase"))
    return PhaseTime(phase=Phase.GENERATE, role=engine.name, parts=tuple(parts))
