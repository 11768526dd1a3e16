"""Which engine samples, told from config.json alone.

Owns: the plan's form of the rule by which the embedded engine is chosen (``meshloom.rollout.embedded``). Refuses to know: how
an engine works. Always holds: what it names is what a run gets; a test holds it against the models themselves.
"""

from collections.abc import Mapping
from typing import Any

from meshloom.config.settings import EvalSettings, TrainSettings
from meshloom.plan.ledger import LedgerLine
from meshloom.plan.model_folder import ModelFolder

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_MOVING_ROPES = ("dynamic", "longrope")
_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")
_SMALLEST_HEAD = 16

PAGED, LAYERS, VLLM = "pages and graphs", "the model's own layers", "vllm"
"""Names of the engines in the plan."""


def engine_line(settings: TrainSettings | EvalSettings, folder: ModelFolder, head_dim: int, *, gpu: bool) -> LedgerLine:
    """The plan's line about the engine.

    Args:
        settings: of the run.
        folder: its model.
        head_dim: width of a head.
        gpu: whether the model computes on a GPU.
    """
    if settings.rollout.engine == "vllm":
        value, formula = VLLM, "the package, with weights of its own"
    elif not gpu:
        value, formula = LAYERS, "called for each token, on the processor"
    elif (why := _reason(settings, folder, head_dim)) is not None:
        value, formula = LAYERS, f"called for each token: {why}"
    else:
        value, formula = PAGED, "pages of keys and values, decode steps captured in graphs, 16 ahead of the host"
    source = settings.provenance.of("rollout.engine")
    return LedgerLine(section="compute", name="engine", value=value, formula=formula, source=source)


def _reason(settings: TrainSettings | EvalSettings, folder: ModelFolder, head_dim: int) -> str | None:
    lora = settings.model.lora
    if lora is not None and any("embed_tokens".endswith(target) for target in lora.target_modules):
        return "its embedding has an adapter"
    return reason_against_pages(folder.text_config, head_dim)


def reason_against_pages(config: Mapping[str, Any], head_dim: int) -> str | None:
    """Why a model cannot be decoded from pages; none if it can.

    Args:
        config: of the language model, as in config.json.
        head_dim: width of a head.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        return f"{family} is not a family that pages are known for"
    if head_dim < _SMALLEST_HEAD or head_dim & (head_dim - 1):
        return f"heads of width {head_dim} are not a power of two of at least {_SMALLEST_HEAD}"
    if moving := sorted(_rope_kinds(config).intersection(_MOVING_ROPES)):
        return f"its rotary embedding ({moving[0]}) changes with the length"
    given = config.get("hidden_activation" if family == "gemma3_text" else "hidden_act")
    if given is not None and given not in _ACTIVATIONS:
        return f"its activation {given} is not known"
    if config.get("use_bidirectional_attention"):
        return "its attention looks ahead"
    return None


def _rope_kinds(config: Mapping[str, Any]) -> set[str]:
    """Kinds of rotary embeddings: of all layers, or of each kind of layer."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [given, *(entry for entry in given.values() if isinstance(entry, Mapping))]
    return {str(rope.get("rope_type") or rope.get("type")) for rope in ropes}
