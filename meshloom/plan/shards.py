"""What one device has of a model that is cut: parameters before and after sharding, and the width of its work.

Owns: how the axes of a mesh divide parameters, activations and cache. Refuses to know: bytes, phases, which role it is.
Always holds: with all degrees one a device has the whole model; the parts of all devices together have every parameter, the
copies of replicas, of what tensor parallelism does not divide, and of a tied table that two stages need.

Pipeline stages take neighbouring layers, the first ones one more where they do not come out even; the first has the
embedding, the last the norm and the head. Tensor parallelism divides attention, MLP, experts and tables; norms and routers
are whole, and in a model that is trained or asked also tables whose rows do not divide, and keys and values with fewer heads
than devices (``train.tensor_parallel``). What is left is sharded over ``fsdp`` and ``sequence`` together: devices that share a
sequence need the same weights.
"""

from dataclasses import dataclass
from functools import lru_cache

from meshloom.plan.decoder_numbers import DecoderNumbers, Layer, Layers


def ceil_div(number: int, parts: int) -> int:
    """The share of the device that has most."""
    return -(-number // parts)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Degrees of a model's mesh; one is no cut. ``stages_per_device``: of each device of the pipeline."""

    replicate: int = 1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1
    stages_per_device: int = 1

    @property
    def shards(self) -> int:
        """Devices that hold one copy of a stage's tensor-parallel part together."""
        return self.fsdp * self.sequence

    @property
    def replicas(self) -> int:
        """Groups of devices that get different samples."""
        return self.replicate * self.fsdp

    @property
    def devices(self) -> int:
        return self.replicate * self.shards * self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a model that one device of a pipeline has: a stage, or all of its stages.

    Args:
        layers: of it.
        parameters: that the device works with when all shards are gathered.
        largest_layer: parameters of the largest layer, gathered.
        root: parameters outside of layers (tables, last norm), gathered.
        sharded: parameters that the device holds.
        hidden: width of the residual stream, of which each device has all.
        layer_values: activations that the stage's widest layer keeps of a token.
        layer_gradients: gradients of activations that are alive at once in the backward pass of such a layer, of a token.
        kept_values: activations that all layers of the stage keep of a token.
        vocabulary: rows of the head on this device; 0 in a stage without it.
    """

    layers: int
    parameters: int
    largest_layer: int
    root: int
    sharded: int
    hidden: int
    layer_values: int
    layer_gradients: int
    kept_values: int
    vocabulary: int


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """Layers of a stage, by their index."""
    each, more = divmod(num_layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def device_layers(num_layers: int, devices: int, device: int, stages_per_device: int = 1) -> list[range]:
    """Layers of each stage of a pipeline's device, by their index: device d of p has the stages d, p + d, 2p + d, …"""
    stages = devices * stages_per_device
    return [stage_layers(num_layers, stages, stage) for stage in range(device, stages, devices)]


@lru_cache(maxsize=4096)
def part_of(model: DecoderNumbers, cut: Cut, *, compiled: bool, stage: int = 0, of_engine: bool = False) -> Part:
    """What a device of a stage has.

    Args:
        model: in numbers.
        cut: of the model.
        compiled: whether its layers are compiled, which keeps fewer activations.
        stage: of the pipeline; where devices have several, the device's first.
        of_engine: whether an engine samples with it, which pads tables and copies single heads.
    """
    first, last = stage == 0, stage == cut.pipeline - 1
    stretches = device_layers(len(model.layers), cut.pipeline, stage, cut.stages_per_device)
    between = (model.layers.between(stretch.start, stretch.stop) for stretch in stretches)
    layers = Layers(tuple(run for each in between for run in each.runs))
    needs_table = first or (last and model.tied)
    tables = (model.embedding if needs_table else 0) + (model.head if last else 0)
    over_tables = cut.tensor if of_engine or model.embedding // model.hidden % cut.tensor == 0 else 1
    root = ceil_div(tables, over_tables) + (model.final_norm if last else 0)
    keys = _whole_keys(model, cut.tensor)
    own_keys = keys // model.num_key_value_heads if of_engine else keys  # an engine's device has the head that it needs

    def size(layer: Layer) -> int:
        return ceil_div(layer.cut_by_tensor - keys, cut.tensor) + own_keys + layer.norms + layer.router

    def width(layer: Layer) -> int:
        return values_per_token(model, layer, cut.tensor, compiled=compiled)

    whole = layers.sum(size) + root
    return Part(
        layers=len(layers),
        parameters=whole,
        largest_layer=max((size(layer) for layer, _ in layers.runs), default=0),
        root=root,
        sharded=ceil_div(whole, cut.shards),
        hidden=model.hidden,
        layer_values=max((width(layer) for layer, _ in layers.runs), default=0),
        layer_gradients=max((gradients_per_token(model, layer, cut.tensor) for layer, _ in layers.runs), default=0),
        kept_values=layers.sum(width),
        vocabulary=ceil_div(model.vocabulary, over_tables) if last else 0,
    )


def _whole_keys(model: DecoderNumbers, tensor: int) -> int:
    """Parameters of a layer's keys and values where each device has all of them, as its heads do not divide; biases apart. A
    latent vector has no heads."""
    has_heads = model.cached == 2 * model.key_value_width
    return 2 * model.hidden * model.key_value_width if has_heads and model.num_key_value_heads % tensor else 0


def gradients_per_token(model: DecoderNumbers, layer: Layer, tensor: int) -> int:
    """Gradients of activations that a layer's backward pass has at once for one token, on a device: of its MLP's gate and of
    what is beside it, and of what leaves it. An estimate (that of ``plan.memory``)."""
    return model.hidden + ceil_div(2 * layer.intermediate, tensor)


def values_per_token(model: DecoderNumbers, layer: Layer, tensor: int, *, compiled: bool) -> int:
    """Activations a layer keeps for one token, on a device (the count is that of ``plan.memory``).

    Norms' inputs and outputs are whole on each device; what is inside attention and MLP is divided. A layer of experts also
    keeps what it sends to each expert that a token meets, and what comes back (measured in float32: Mixtral 1.1, Qwen3-MoE and
    DeepSeek-V3 1.2 to 1.3 times the estimate, Llama 1.1).
    """
    norms, mlp = (3, 3) if compiled else (4, 4)
    inside = 2 * model.query_width + model.value_width + 3 * model.key_value_width + mlp * layer.intermediate
    sent = 2 * layer.experts_met * model.hidden
    return norms * model.hidden + ceil_div(inside, tensor) + sent


def cached_values(model: DecoderNumbers, tensor: int) -> int:
    """Values that a device's cache keeps of one token in all layers; heads that are fewer than devices are on several."""
    heads = model.num_key_value_heads
    return len(model.layers) * (model.cached // heads) * ceil_div(heads, tensor)
