"""How a model computes, by rule: which attention kernel, compiled or not, how much of the logits at once.

Owns: the rules, for the plan and for the trainer alike. Refuses to know: how a kernel is called. Always holds: a rule needs
what the settings say and what the device is, so the plan can tell before a device is touched.
"""

from importlib.util import find_spec
from typing import Literal

from meshloom.config.settings import EvalSettings, ModelSettings, SftSettings, TrainSettings
from meshloom.plan.ledger import LedgerLine

AttentionChoice = Literal["auto", "varlen", "flash_attn", "sdpa"]
AttentionName = Literal["varlen", "flash_attn", "sdpa"]

_WIDEST_HEAD = 256
_CHUNK_BYTES, _GPU_CHUNK_BYTES = 64 * 2**20, 256 * 2**20


class NotPossible(ValueError):
    """A kernel was asked for by name that does not take this arithmetic, device or head."""


def choose_attention(
    choice: AttentionChoice, *, gpu: bool, narrow: bool, head_dim: int, flash_attn: bool
) -> AttentionName:
    """The kernel for a model.

    Args:
        choice: the setting.
        gpu: whether the model computes on a CUDA device.
        narrow: whether its arithmetic is bfloat16 or float16.
        head_dim: width of a head.
        flash_attn: whether the package flash-attn can be used.

    Raises:
        NotPossible: says why, if a kernel asked for by name cannot be used.
    """
    reasons = {
        "not on a GPU": not gpu,
        "float32 arithmetic": not narrow,
        f"heads of {head_dim} values; it takes multiples of 8 up to {_WIDEST_HEAD}": bool(head_dim % 8)
        or head_dim > _WIDEST_HEAD,
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    if choice == "sdpa" or (choice == "auto" and against is not None):
        return "sdpa"
    if against is not None:
        raise NotPossible(against)
    if choice == "flash_attn" and not flash_attn:
        raise NotPossible("the package flash-attn cannot be imported")
    # Torch's own kernel is the same one, and a compiled layer keeps it in its graph.
    return "varlen" if choice == "auto" else choice


def logits_chunk_bytes(model: ModelSettings, *, gpu: bool) -> int:
    """Bound on the bytes of logits and of their gradient alive at once."""
    return model.logits_chunk_bytes or (_GPU_CHUNK_BYTES if gpu else _CHUNK_BYTES)


def compiles(model: ModelSettings, *, gpu: bool) -> bool:
    """Whether training passes run compiled layers."""
    return gpu if model.compile == "auto" else model.compile


def compute_ledger(
    settings: TrainSettings | SftSettings | EvalSettings, head_dim: int, *, gpu: bool, narrow: bool
) -> tuple[LedgerLine, ...]:
    """How the model computes, as far as can be seen without importing torch.

    Raises:
        NotPossible: if the settings ask for an attention kernel that cannot be used.
    """
    model, origin = settings.model, settings.provenance.of
    installed = find_spec("flash_attn") is not None
    name = choose_attention(model.attention, gpu=gpu, narrow=narrow, head_dim=head_dim, flash_attn=installed)
    lines = [_line("attention", name, _ATTENTION[name], origin("model.attention"))]
    if not isinstance(settings, EvalSettings):
        on = compiles(model, gpu=gpu)
        words = "each layer, in training passes; auto: on a GPU"
        lines.append(_line("compiled", "yes" if on else "no", words, origin("model.compile")))
    return tuple(lines)


def _line(name: str, value: str, formula: str, source: str) -> LedgerLine:
    return LedgerLine(section="compute", name=name, value=value, formula=formula, source=source)


_ATTENTION = {
    "varlen": "torch's variable-length kernel, all samples in one call",
    "flash_attn": "the flash-attn package, all samples in one call",
    "sdpa": "scaled_dot_product_attention, one call for each run of equal lengths",
}
