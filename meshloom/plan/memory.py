"""The memory ledger of one device: what a run must hold, and in which phase.

Owns: the bytes of weights, optimizer, cache and activations, each with its formula. Refuses to know: how anything is
allocated. Always holds: weights are counted from the model's files; a number that is an estimate says so.

The estimate of activations counts what a layer of the Llama shape keeps for its backward pass, in values per token: 4 hidden
(both norms' inputs and outputs), 3 query widths (projected, rotated, attention's output), 3 key-value widths (key, rotated key,
value) and 4 intermediate (gate, up, activated gate, their product). Attention's scores are not kept. Families with more norms
keep more (measured in float32: Llama 1.1, Qwen3 1.3, Gemma 3 1.6 times the estimate). The code of a compiled layer keeps one
hidden and one intermediate less, which it computes again (measured: Llama and Qwen2 1.0, Qwen3 1.1, Gemma 3 1.15 times).
Layers that are recomputed keep their input, and one of them at a time the whole with the gradients of its MLP.

The peak while updating, compiled in bfloat16 on a GPU without recompute, against the most bytes that were allocated there
(Qwen2.5): 0.5B 19.7 for 20 GiB and 1.5B 46.1 for 46 GiB at 16,380 tokens, before the optimizer has moments; with them at 32,768
tokens 38.3 for 38 GiB and 89.0 for 91 GiB: 2 % off at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from meshloom.config.settings import EvalSettings, KlPlace, SftSettings, TrainSettings
from meshloom.plan.compute import compiles, logits_chunk_bytes
from meshloom.plan.ledger import (
    DERIVED,
    LedgerLine,
    longest_sample_tokens,
    most_computed_tokens,
    most_microbatch_tokens,
)
from meshloom.plan.model_folder import ModelFolder
from meshloom.plan.parameters import UnknownFamily, count_parameters

_FLOAT32 = 4
_SMALLEST_SLOT, _PAGE = 64, 64
_SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")

_OPTIONAL_KEYS = ("head_dim", "num_key_value_heads")

_GPU_FILES = ("/dev/nvidia0", "/dev/kfd")


MACHINE, GPU = "memory of this machine", "memory of the GPU"
GENERATING, UPDATING = "peak while generating", "peak while updating"
"""Names of the lines that are compared."""
CHECKPOINT = "checkpoint"
_PHASES = {"g": "generate", "u": "update"}


class UnknownShape(ValueError):
    """config.json lacks what an estimate needs."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder."""

    num_layers: int
    hidden: int
    head_dim: int
    query_width: int
    key_value_width: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, folder: ModelFolder) -> "ModelShape":
        """Sizes from config.json.

        Raises:
            UnknownShape: if it lacks one.
        """
        config = folder.text_config
        missing = [key for key in _SHAPE_KEYS if not isinstance(config.get(key), int)]
        missing += [key for key in _OPTIONAL_KEYS if not isinstance(config.get(key) or 0, int)]
        if missing:
            return cls._by_family(folder, missing)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            head_dim=head_dim,
            query_width=heads * head_dim,
            key_value_width=(config.get("num_key_value_heads") or heads) * head_dim,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
        )

    @classmethod
    def _by_family(cls, folder: ModelFolder, missing: Sequence[str]) -> "ModelShape":
        """Sizes of a family that is known, whose config.json leaves some at their defaults."""
        try:
            model = count_parameters(folder.config)
        except UnknownFamily as error:
            raise UnknownShape(f"config.json has no {', '.join(missing)}") from error
        return cls(
            num_layers=len(model.layers),
            hidden=model.hidden,
            head_dim=model.query_width // model.num_heads,
            query_width=model.query_width,
            key_value_width=model.key_value_width,
            intermediate=max(layer.intermediate for layer, _ in model.layers.runs),
            vocabulary=model.vocabulary,
        )

    @property
    def gradients_per_token(self) -> int:
        """Gradients of activations that a layer's backward pass has at once for one token."""
        return self.hidden + 2 * self.intermediate

    def values_per_token_and_layer(self, *, compiled: bool) -> int:
        """Activations a layer keeps for one token."""
        narrow = 3 * (self.hidden + self.query_width + self.key_value_width + self.intermediate)
        return narrow if compiled else narrow + self.hidden + self.intermediate


def compute_bytes(dtype: str, device: str) -> int:
    """Bytes of a value of the model's arithmetic; ``auto`` is bfloat16 on a GPU and float32 elsewhere."""
    if dtype != "auto":
        return {"float32": 4, "bfloat16": 2}[dtype]
    return 2 if on_gpu(device) else 4


def on_gpu(device: str) -> bool:
    """Whether a run computes on a GPU; ``auto`` takes one where the machine has one."""
    return device.startswith("cuda") or (device == "auto" and any(Path(file).exists() for file in _GPU_FILES))


def memory_ledger(
    settings: TrainSettings | SftSettings | EvalSettings,
    folder: ModelFolder,
    *,
    recompute: bool,
    device_memory: int | None = None,
) -> tuple[LedgerLine, ...]:
    """Bytes that a run holds on its device.

    Args:
        settings: of the run.
        folder: its model.
        recompute: whether layers are recomputed in the backward pass.
        device_memory: bytes that a GPU has for the run; none if it was not asked.

    Raises:
        UnknownShape: if config.json lacks what the estimates need.
    """
    shape, width = ModelShape.of(folder), compute_bytes(settings.model.dtype, settings.device)
    ledger = _Memory()
    how = "in the headers of the safetensors files" if folder.has_weights else "by config.json"
    ledger.count("parameters", folder.num_parameters, f"counted {how}")
    ledger.bytes("weights", folder.num_parameters * width, f"parameters × {width}", phases="gu")
    if not isinstance(settings, EvalSettings):
        _optimizer_lines(ledger, settings, folder, width)
        _update_lines(ledger, settings, shape, width, recompute)
    if not isinstance(settings, SftSettings):
        if settings.rollout.engine == "vllm":
            _vllm_lines(ledger, settings, folder.num_parameters * width, cache_bytes_per_token(shape, width))
        else:
            _cache_line(ledger, settings, shape, width)
    if isinstance(settings, TrainSettings) and settings.algorithm.kl is not KlPlace.NONE:
        if settings.model.lora is None:
            ledger.bytes("reference weights", folder.num_parameters * width, f"parameters × {width}", phases="gu")
        else:
            ledger.bytes("reference weights", 0, "the model without its adapters", phases="gu")
    ledger.peaks(generates=not isinstance(settings, SftSettings), updates=not isinstance(settings, EvalSettings))
    if on_gpu(settings.device):
        if device_memory is not None:
            given = settings.device_memory_bytes is not None
            origin = settings.provenance.of("device_memory_bytes") if given else "this GPU"
            formula = "device_memory_bytes" if given else "free when the run begins"
            ledger.bytes(GPU, device_memory, formula, phases="", source=origin)
    else:
        memory = psutil.virtual_memory()
        formula = f"as the system says; {memory.available / 2**30:.1f} GiB of it are available now"
        ledger.bytes(MACHINE, memory.total, formula, phases="", source="this machine")
    return tuple(ledger.lines)


class _Memory:
    """Collects lines and adds up phases: g generate, u update."""

    def __init__(self) -> None:
        self.lines: list[LedgerLine] = []
        self.sums = {"g": 0, "u": 0}

    def count(self, name: str, value: int, formula: str) -> None:
        self.lines.append(LedgerLine(section="memory", name=name, value=value, formula=formula, source="model.path"))

    def bytes(self, name: str, value: int, formula: str, *, phases: str, source: str = DERIVED) -> None:
        when = tuple(_PHASES[phase] for phase in phases)
        line = LedgerLine(
            section="memory", name=name, value=value, formula=formula, source=source, unit="bytes", phases=when
        )
        self.lines.append(line)
        for phase in phases:
            self.sums[phase] += value

    def peaks(self, *, generates: bool, updates: bool) -> None:
        parts = "sum of what the phase holds; libraries and fragmentation come on top"
        if generates:
            self.bytes(GENERATING, self.sums["g"], parts, phases="")
        if updates:
            self.bytes(UPDATING, self.sums["u"], parts, phases="")


def checkpoint_bytes_each(width: int) -> int:
    """Bytes of a checkpoint for each trained parameter: it as it is, its master where there is one, and both moments."""
    return width + (0 if width == _FLOAT32 else _FLOAT32) + 2 * _FLOAT32


def trainable_parameters(settings: TrainSettings | SftSettings, folder: ModelFolder) -> int:
    """All parameters, or those of the adapters: rank × (inputs + outputs) of each layer that gets one."""
    lora = settings.model.lora
    if lora is None:
        return folder.num_parameters
    return sum(lora.rank * sum(tensor.shape) for tensor in folder.linear_layers(lora.target_modules).values())


def _optimizer_lines(ledger: _Memory, settings: TrainSettings | SftSettings, folder: ModelFolder, width: int) -> None:
    trained = trainable_parameters(settings, folder)
    if settings.model.lora is None:
        ledger.count("trained parameters", trained, "all parameters")
    else:
        ledger.count("trained parameters", trained, "Σ rank × (inputs + outputs) over the layers with adapters")
        ledger.bytes("adapter weights", trained * width, f"trained parameters × {width}", phases="gu")
    if width == _FLOAT32:
        ledger.bytes("float32 masters", 0, "the weights are float32 themselves", phases="gu")
    else:
        ledger.bytes("float32 masters", trained * _FLOAT32, "trained parameters × 4", phases="gu")
    ledger.bytes("optimizer moments", 2 * trained * _FLOAT32, "trained parameters × 2 × 4", phases="gu")
    ledger.bytes("gradients", trained * _FLOAT32, "trained parameters × 4, float32", phases="u")
    each = checkpoint_bytes_each(width)
    ledger.bytes(CHECKPOINT, trained * each, f"trained parameters × {each}, on the disk", phases="")


def _update_lines(
    ledger: _Memory, settings: TrainSettings | SftSettings, shape: ModelShape, width: int, recompute: bool
) -> None:
    bound, gpu = most_microbatch_tokens(settings), on_gpu(settings.device)
    tokens = most_computed_tokens(settings, bound)
    formula = "min(batch.tokens_per_microbatch, samples of an update or microbatch × longest sample)"
    if tokens < bound:
        formula += f": {bound}; in whole groups of equal responses, each prompt once"
    origin = settings.provenance.of("batch.tokens_per_microbatch")
    line = LedgerLine(
        section="memory", name="tokens at once", value=tokens, formula=formula, source=origin, unit="tokens"
    )
    ledger.lines.append(line)
    chunk = logits_chunk_bytes(settings.model, gpu=gpu)
    # On a GPU the bound is on logits in float32 and their gradient in the model's arithmetic, which is in place in float32.
    each = _FLOAT32 + (width if gpu and width < _FLOAT32 else 0)
    given = "model.logits_chunk_bytes" if settings.model.logits_chunk_bytes else f"{chunk // 2**20} MiB"
    formula = f"min({given}, tokens at once × vocabulary × {each})"
    logits, origin = min(chunk, tokens * shape.vocabulary * each), settings.provenance.of("model.logits_chunk_bytes")
    ledger.bytes("logits", logits, formula, phases="u", source=origin)
    layer = shape.values_per_token_and_layer(compiled=compiles(settings.model, gpu=gpu))
    if recompute:
        whole = layer + shape.gradients_per_token
        values = tokens * (shape.num_layers * shape.hidden + whole)
        formula = f"estimate: tokens at once × (layers × hidden + {whole}) × {width}"
    else:
        values = tokens * shape.num_layers * layer
        formula = f"estimate: tokens at once × layers × {layer} × {width}"
    ledger.bytes("activations", values * width, formula, phases="u")


def cache_bytes_per_token(shape: ModelShape, width: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.key_value_width * width


def _longest_and_sequences(settings: TrainSettings | EvalSettings) -> tuple[int, int]:
    """Tokens of the longest sample, and samples that are generated at once."""
    rollout = settings.rollout
    if isinstance(settings, TrainSettings):
        samples = settings.batch.prompts_per_step * settings.batch.samples_per_prompt
        return longest_sample_tokens(settings), min(rollout.max_sequences, samples)
    response = settings.validation.max_response_tokens or rollout.max_response_tokens
    return settings.data.max_prompt_tokens + response, rollout.max_sequences


def _vllm_lines(
    ledger: _Memory, settings: TrainSettings | EvalSettings, weight_bytes: int, bytes_per_token: int
) -> None:
    """vLLM has weights of its own; with the cache they are gone while it sleeps."""
    rollout, gpu = settings.rollout, on_gpu(settings.device)
    phases = "g" if gpu and rollout.vllm.sleep else "gu"
    ledger.bytes("vLLM's weights", weight_bytes, "a copy of the weights", phases=phases)
    ledger.bytes("cache per token", bytes_per_token, "2 × layers × key-value width × bytes of a value", phases="")
    if rollout.kv_cache_bytes is not None:
        origin = settings.provenance.of("rollout.kv_cache_bytes")
        ledger.bytes("key-value cache", rollout.kv_cache_bytes, "rollout.kv_cache_bytes", phases=phases, source=origin)
    elif gpu:
        longest, sequences = _longest_and_sequences(settings)
        share = f"{rollout.vllm.gpu_memory_utilization:g} of the GPU's memory, vLLM's weights included"
        formula = f"sequences at once × {longest} tokens × cache per token; vLLM takes {share}"
        ledger.bytes("key-value cache", sequences * longest * bytes_per_token, formula, phases=phases)
    else:
        formula = "a quarter of the memory available on this machine now"
        ledger.bytes("key-value cache", psutil.virtual_memory().available // 4, formula, phases=phases)


def _cache_line(ledger: _Memory, settings: TrainSettings | EvalSettings, shape: ModelShape, width: int) -> None:
    rollout = settings.rollout
    longest, sequences = _longest_and_sequences(settings)
    if on_gpu(settings.device):
        slot = (-(-longest // _PAGE) + 1) * _PAGE
        logits = sequences * shape.vocabulary * _FLOAT32
        ledger.bytes("logits of a decode step", logits, "sequences at once × vocabulary × 4", phases="g")
    else:
        slot = _SMALLEST_SLOT
        while slot < longest:
            slot *= 2
    per_token = cache_bytes_per_token(shape, width)
    ledger.bytes("cache per token", per_token, f"2 × layers × key-value width × {width}", phases="")
    wanted = sequences * slot * per_token
    formula = f"sequences at once × slot of {slot} tokens × cache per token"
    if rollout.kv_cache_bytes is None and on_gpu(settings.device):
        ledger.bytes("key-value cache", wanted, f"{formula}; at most nine tenths of the GPU's free memory", phases="g")
    elif rollout.kv_cache_bytes is None:
        quarter = psutil.virtual_memory().available // 4
        formula = f"min(a quarter of the memory available on this machine now, {formula})"
        ledger.bytes("key-value cache", min(wanted, quarter), formula, phases="g")
    else:
        origin = settings.provenance.of("rollout.kv_cache_bytes")
        bounded = min(wanted, rollout.kv_cache_bytes)
        ledger.bytes("key-value cache", bounded, f"min(rollout.kv_cache_bytes, {formula})", phases="g", source=origin)
