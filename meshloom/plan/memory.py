"""The memory ledger of one device: what a run must hold, and in which phase.

Owns: the lines of a plan on one device, each with its formula and origin. Refuses to know: how many bytes anything takes, which
``plan.sharded_memory`` counts for all plans, here of a model that is not cut. Always holds: weights are counted from the
model's files where there are any; a number that is an estimate says so.

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
from dataclasses import dataclass, replace
from pathlib import Path

from meshloom.config.settings import EvalSettings, KlPlace, SftSettings, TrainSettings
from meshloom.plan.compute import compiles, logits_chunk_bytes
from meshloom.plan.critic_memory import critic_lines
from meshloom.plan.decoder_numbers import DecoderNumbers, Layer, Layers
from meshloom.plan.ledger import (
    DERIVED,
    LedgerLine,
    longest_sample_tokens,
    most_computed_tokens,
    most_microbatch_tokens,
)
from meshloom.plan.memory_lines import BOTH, MemoryLines, checkpoint_bytes_each
from meshloom.plan.model_folder import ModelFolder
from meshloom.plan.parameters import UnknownFamily, count_parameters
from meshloom.plan.reference import has_own_reference
from meshloom.plan.residency import EngineRole, ModelRole, Phase
from meshloom.plan.sharded_memory import FLOAT32, engine_holdings, model_holdings
from meshloom.plan.shards import Cut, cached_values, part_of
from meshloom.plan.turns import kept_tokens

_SMALLEST_SLOT, _PAGE = 64, 64
_SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")

_OPTIONAL_KEYS = ("head_dim", "num_key_value_heads")

_GPU_FILES = ("/dev/nvidia0", "/dev/kfd")


MACHINE, GPU = "memory of this machine", "memory of the GPU"
CHECKPOINT = "checkpoint"
_QUARTER = "a quarter of the memory available on this machine now"


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

    def numbers(self, parameters: int) -> DecoderNumbers:
        """The decoder as the sharded ledger counts with it: layers of the Llama shape, and parameters as one table, since
        nothing is cut.

        Args:
            parameters: of the whole model.
        """
        key_value_heads = max(1, self.key_value_width // self.head_dim)
        layer = Layer(attention=0, norms=0, intermediate=self.intermediate)
        return DecoderNumbers(
            family="",
            embedding=parameters,
            layers=Layers(((layer, self.num_layers),)),
            final_norm=0,
            head=0,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            num_heads=self.query_width // self.head_dim,
            num_key_value_heads=key_value_heads,
            query_width=self.query_width,
            value_width=self.query_width,
            key_value_width=self.key_value_width,
            cached=2 * self.key_value_width,
        )

    def values_per_token_and_layer(self, *, compiled: bool) -> int:
        """Activations a layer keeps for one token."""
        return part_of(self.numbers(0), Cut(), compiled=compiled).layer_values


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
    critic: ModelFolder | None = None,
) -> tuple[LedgerLine, ...]:
    """Bytes that a run holds on its device.

    Args:
        settings: of the run.
        folder: its model.
        recompute: whether layers are recomputed in the backward pass.
        device_memory: bytes that a GPU has for the run; none if it was not asked.
        critic: folder of the critic's model; none where there is no critic.

    Raises:
        UnknownShape: if config.json lacks what the estimates need.
    """
    shape, width = ModelShape.of(folder), compute_bytes(settings.model.dtype, settings.device)
    model = folder.other_than_llama or shape.numbers(folder.num_parameters)
    ledger = MemoryLines()
    how = "in the headers of the safetensors files" if folder.has_weights else "by config.json"
    ledger.count("parameters", folder.num_parameters, f"counted {how}")
    actor = _actor(settings, folder, model, width, recompute)
    ledger.take(model_holdings(actor))
    ledger.held("weights", f"parameters × {width}")
    if not isinstance(settings, EvalSettings):
        _optimizer_lines(ledger, settings, actor)
        _update_lines(ledger, settings, actor)
    if not isinstance(settings, SftSettings):
        _engine_lines(ledger, settings, model, width)
    if isinstance(settings, TrainSettings) and settings.algorithm.kl is not KlPlace.NONE:
        if has_own_reference(settings):
            reference = replace(actor, name="reference", computes=(Phase.LOGPROB,))
            ledger.take(model_holdings(reference))
            ledger.held("weights", f"parameters × {width}", shown="reference weights")
        else:
            ledger.bytes("reference weights", 0, "the model without its adapters", phases=BOTH)
    if isinstance(settings, TrainSettings) and critic is not None:
        numbers = critic.other_than_llama or ModelShape.of(critic).numbers(critic.num_parameters)
        critic_lines(ledger, settings, actor, critic, numbers)
    ledger.peaks(generates=not isinstance(settings, SftSettings), updates=not isinstance(settings, EvalSettings))
    if on_gpu(settings.device):
        if device_memory is not None:
            given = settings.device_memory_bytes is not None
            origin = settings.provenance.of("device_memory_bytes") if given else "this GPU"
            formula = "device_memory_bytes" if given else "free when the run begins"
            ledger.bytes(GPU, device_memory, formula, source=origin)
    else:
        import psutil

        memory = psutil.virtual_memory()
        formula = f"as the system says; {memory.available / 2**30:.1f} GiB of it are available now"
        ledger.bytes(MACHINE, memory.total, formula, source="this machine")
    return tuple(ledger.lines)


def trainable_parameters(settings: TrainSettings | SftSettings, folder: ModelFolder) -> int:
    """All parameters, or those of the adapters: rank × (inputs + outputs) of each layer that gets one."""
    lora = settings.model.lora
    if lora is None:
        return folder.num_parameters
    return sum(lora.rank * sum(tensor.shape) for tensor in folder.linear_layers(lora.target_modules).values())


def _actor(
    settings: TrainSettings | SftSettings | EvalSettings,
    folder: ModelFolder,
    model: DecoderNumbers,
    width: int,
    recompute: bool,
) -> ModelRole:
    """The model that is trained, whole on the device; in an evaluation its weights alone."""
    gpu = on_gpu(settings.device)
    trains, trained, tokens = not isinstance(settings, EvalSettings), None, 1
    if not isinstance(settings, EvalSettings):
        trained = None if settings.model.lora is None else trainable_parameters(settings, folder)
        tokens = most_computed_tokens(settings, most_microbatch_tokens(settings))
    return ModelRole(
        name="actor",
        model=model,
        computes=(Phase.UPDATE,) if trains else (),
        width=width,
        trained=trained,
        tokens=tokens,
        recompute=recompute,
        compiled=compiles(settings.model, gpu=gpu),
        chunk_bytes=logits_chunk_bytes(settings.model, gpu=gpu),
        # On a GPU the bound is on logits in float32 and their gradient in the model's arithmetic; in float32 it is in place.
        logit_bytes=FLOAT32 + (width if gpu and width < FLOAT32 else 0),
    )


def _optimizer_lines(ledger: MemoryLines, settings: TrainSettings | SftSettings, actor: ModelRole) -> None:
    trained = actor.model.total if actor.trained is None else actor.trained
    if settings.model.lora is None:
        ledger.count("trained parameters", trained, "all parameters")
    else:
        ledger.count("trained parameters", trained, "Σ rank × (inputs + outputs) over the layers with adapters")
        ledger.held("adapter weights", f"trained parameters × {actor.width}")
    wide = actor.width == FLOAT32
    ledger.held("float32 masters", "the weights are float32 themselves" if wide else "trained parameters × 4")
    ledger.held("optimizer moments", "trained parameters × 2 × 4")
    ledger.held("gradients", "trained parameters × 4, float32")
    each = checkpoint_bytes_each(actor.width)
    ledger.bytes(CHECKPOINT, trained * each, f"trained parameters × {each}, on the disk")


def _update_lines(ledger: MemoryLines, settings: TrainSettings | SftSettings, actor: ModelRole) -> None:
    bound, origin = most_microbatch_tokens(settings), settings.provenance.of
    formula = "min(batch.tokens_per_microbatch, samples of an update or microbatch × longest sample)"
    if actor.tokens < bound:
        formula += f": {bound}; in whole groups of equal responses, each prompt once"
    line = LedgerLine(
        section="memory",
        name="tokens at once",
        value=actor.tokens,
        formula=formula,
        source=origin("batch.tokens_per_microbatch"),
        unit="tokens",
    )
    ledger.lines.append(line)
    given = "model.logits_chunk_bytes" if settings.model.logits_chunk_bytes else f"{actor.chunk_bytes // 2**20} MiB"
    formula = f"min({given}, tokens at once × vocabulary × {actor.logit_bytes})"
    ledger.held("logits", formula, source=origin("model.logits_chunk_bytes"))
    part = part_of(actor.model, actor.cut, compiled=actor.compiled)
    alike = part.kept_values == part.layers * part.layer_values
    values = f"layers × {part.layer_values}" if alike else f"{part.kept_values} of all layers"
    if actor.recompute:
        values = f"(layers × hidden + {part.layer_values + part.layer_gradients})"
    ledger.held("activations", f"estimate: tokens at once × {values} × {actor.width}")


def _longest_and_samples(settings: TrainSettings | EvalSettings) -> tuple[int, int]:
    """Tokens of the longest sample, and samples of a step; of an evaluation those that are generated at once."""
    rollout = settings.rollout
    if isinstance(settings, TrainSettings):
        samples = settings.batch.prompts_per_step * settings.batch.samples_per_prompt
        return longest_sample_tokens(settings), samples
    response = settings.validation.max_response_tokens or rollout.max_response_tokens
    return settings.data.max_prompt_tokens + response, rollout.max_sequences


def _engine_lines(
    ledger: MemoryLines, settings: TrainSettings | EvalSettings, model: DecoderNumbers, width: int
) -> None:
    """The engine: vLLM with weights of its own, which with the cache are gone while it sleeps; the embedded one without."""
    rollout, gpu, vllm = settings.rollout, on_gpu(settings.device), settings.rollout.engine == "vllm"
    longest, samples = _longest_and_samples(settings)
    sequences = min(rollout.max_sequences, samples)
    slot, given = longest if vllm else _slot(longest, gpu=gpu), rollout.kv_cache_bytes
    bound = given if given is not None or gpu else _quarter_of_free_bytes()
    model = model if vllm else model.with_whole_cache()
    engine = EngineRole(
        model=model,
        width=width,
        own_weights=vllm,
        sleeps=not vllm or (gpu and rollout.vllm.sleep),
        sequences=sequences,
        slot_tokens=slot,
        kept_tokens=kept_tokens(settings, samples=samples, sequences=sequences, slot=slot, longest=longest, gpu=gpu),
        cache_bytes=bound,
        fills_cache=vllm,
        keeps_logits=gpu and not vllm,
    )
    ledger.take(engine_holdings(engine))
    per_token = cached_values(model, 1) * width
    if vllm:
        ledger.held("engine's weights", "a copy of the weights", shown="vLLM's weights")
        of_value, formula = "bytes of a value", _vllm_cache(settings, longest)
    else:
        of_value, formula = str(width), f"sequences at once × slot of {slot} tokens × cache per token"
        if engine.kept_tokens:
            formula += f" + {engine.kept_tokens:,} tokens kept between turns × cache per token"
        if gpu:
            ledger.held("logits of a decode step", "sequences at once × vocabulary × 4")
        if given is not None:
            formula = f"min(rollout.kv_cache_bytes, {formula})"
        elif gpu:
            formula += "; at most nine tenths of the GPU's free memory"
        else:
            formula = f"min({_QUARTER}, {formula})"
    ledger.bytes("cache per token", per_token, f"2 × layers × key-value width × {of_value}")
    origin = DERIVED if given is None else settings.provenance.of("rollout.kv_cache_bytes")
    ledger.held("key-value cache", formula, source=origin)


def _quarter_of_free_bytes() -> int:
    """A quarter of the memory that is free on this machine."""
    import psutil

    return psutil.virtual_memory().available // 4


def _vllm_cache(settings: TrainSettings | EvalSettings, longest: int) -> str:
    """How vLLM's cache follows, in words."""
    if settings.rollout.kv_cache_bytes is not None:
        return "rollout.kv_cache_bytes"
    if not on_gpu(settings.device):
        return _QUARTER
    share = f"{settings.rollout.vllm.gpu_memory_utilization:g} of the GPU's memory, vLLM's weights included"
    return f"sequences at once × {longest} tokens × cache per token; vLLM takes {share}"


def _slot(longest: int, *, gpu: bool) -> int:
    """Tokens of the embedded engine's cache for one sequence: whole pages and one, or on the processor a power of two."""
    if gpu:
        return (-(-longest // _PAGE) + 1) * _PAGE
    slot = _SMALLEST_SLOT
    while slot < longest:
        slot *= 2
    return slot
