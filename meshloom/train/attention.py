"""Attention of a transformers model over our own layouts: packed samples in training, a key-value cache in generation.

Owns: the attention function that a model's layers call, and packed causal attention. Refuses to know: how a model
computes queries, keys and values. Always holds: attention never crosses samples; a layer that is called without a layout
is an error, so a model family that does not hand its keyword arguments down is refused instead of trained wrongly.

Legend: H query heads, K key-value heads, T tokens end to end, D width of a head.
"""

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.plan.compute import AttentionChoice, AttentionName, NotPossible, choose_attention
from meshloom.plan.layer_kinds import layers_of_other_kinds
from meshloom.train import attention_op
from meshloom.train.attention_kernels import Bounds, Kernel, flash_attn_kernel

NAME, NAME_IN_GRAPH = "meshloom", "meshloom_in_graph"


class AttentionLayout(Protocol):
    """Where a layer's keys and values are and which queries may see them."""

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention output of the tokens at hand, [T, H, D]. ``window``: a token sees itself and window − 1 before it."""
        ...


class PreparedLayout(AttentionLayout, Protocol):
    """A layout that compiled layers attend through."""

    operands: attention_op.Operands | None


@torch.compiler.disable
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: AttentionLayout | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer: query [1, H, T, D], key and value [1, K, T, D].

    Never inside compiled code, which would be another one for each layer and each layout.
    """
    _require_plain(module, layout, dropout, unused)
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], scale=scaling, window=sliding_window)
    return out.unsqueeze(0), None


def _attention_in_graph(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: PreparedLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The same; in compiled code one operator, if the kernel takes such heads. Layouts there have ``operands``."""
    if torch.compiler.is_compiling() and attention_op.takes_head(query.shape[-1]):
        _require_plain(module, layout, dropout, others)
        assert layout is not None and layout.operands is not None
        query_THD, key_TKD, value_TKD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        out = attention_op.attend(query_THD, key_TKD, value_TKD, layout.operands, scale=scaling, window=sliding_window)
        return out.unsqueeze(0), None
    others |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "layout": layout}
    return _attention(module, query, key, value, attention_mask, **others)


def _require_plain(
    module: torch.nn.Module, layout: AttentionLayout | None, dropout: float, unused: dict[str, Any]
) -> None:
    """Refuse what no kernel here computes.

    Raises:
        UserError: that says what the model's attention does.
    """
    name = type(module).__name__
    if layout is None:
        raise _unsupported(f"{name} of this model family does not hand down where its samples begin and end")
    if unused.get("softcap") is not None:
        raise _unsupported(f"{name} of this model family caps attention scores (attn_logit_softcapping)")
    if unused.get("s_aux") is not None:
        raise _unsupported(f"{name} of this model family has attention sinks")
    if dropout:
        raise UserError(
            "the model drops attention scores out, which makes sampler and trainer disagree",
            where="model.path",
            fix="set attention_dropout to 0 in the model's config.json",
        )


def _unsupported(what: str, why: str = "no attention kernel here computes that") -> UserError:
    fix = "take a model of another family, such as Llama, Qwen2, Qwen3 or Gemma 3"
    return UserError(what, where="model.path", why=why, fix=fix)


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(NAME_IN_GRAPH, _attention_in_graph)


def use_layouts(model: PreTrainedModel, *, in_graph: bool = False) -> None:
    """Make a model's layers attend through the ``layout`` keyword of its forward.

    Args:
        model: whose layers.
        in_graph: compiled layers attend by one operator inside their code; only for layouts that were prepared for it.

    Raises:
        UserError: if some of its layers would mix tokens past it, and so samples that stand side by side.
    """
    name, why = type(model).__name__, "samples that are computed side by side would run into each other"
    if others := layers_of_other_kinds(model.config.get_text_config().to_dict()):
        raise _unsupported(f"{name} has layers of the kind {', '.join(others)}", why)
    if model._is_stateful or not model._supports_attention_backend:
        what = f"{name} mixes tokens in ways of its own, not by the attention that transformers lets one choose"
        raise _unsupported(what, why)
    ahead = [vars(module)["is_causal"] for module in model.get_decoder().modules() if "is_causal" in vars(module)]
    if ahead and not any(ahead):
        raise _unsupported(f"the tokens of {name} attend to later ones", "it cannot say what token comes next")
    model.set_attn_implementation(NAME_IN_GRAPH if in_graph else NAME)


class PackedAttention:
    """Causal attention over samples that stand end to end; no score is computed between samples.

    The kernel follows from the choice and from what the queries are (``meshloom.plan.compute``). ``sdpa`` computes
    neighbours of equal length in one call, each longer run in its own; the others take all samples in one.

    Args:
        lengths: tokens of each sample, in their order.
        choice: the setting ``model.attention``.
    """

    def __init__(self, lengths: list[int], choice: AttentionChoice = "auto") -> None:
        self.choice = choice
        self.bounds = Bounds(lengths)
        self.operands: attention_op.Operands | None = None
        self.runs: list[tuple[int, int]] = []
        for length in lengths:
            count = self.runs.pop()[1] if self.runs and self.runs[-1][0] == length else 0
            self.runs.append((length, count + 1))
        self._masks: dict[tuple[int, int], Tensor] = {}

    def prepare(self, device: torch.device) -> None:
        """Make the operands that compiled layers attend with."""
        self.operands = attention_op.Operands.of(self.bounds, self.bounds, None, device)

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        if (kernel := kernel_for(self.choice, query_HTD)) is not None:
            query_THD, key_TKD, value_TKD = (x.transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD))
            return kernel(query_THD, key_TKD, value_TKD, self.bounds, self.bounds, None, scale=scale, window=window)
        sizes = [length * count for length, count in self.runs]
        grouped = query_HTD.shape[0] != key_KTD.shape[0]
        if grouped and query_HTD.is_cuda:
            # In float32 a GPU has a kernel that keeps no scores only for heads that are not grouped.
            key_KTD, value_KTD = (
                x.repeat_interleave(query_HTD.shape[0] // x.shape[0], 0) for x in (key_KTD, value_KTD)
            )
            grouped = False
        outputs = []
        parts = zip(
            self.runs, query_HTD.split(sizes, 1), key_KTD.split(sizes, 1), value_KTD.split(sizes, 1), strict=True
        )
        for (length, count), q, k, v in parts:
            q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
            mask = self._window_mask(length, window, q) if window is not None and window < length else None
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _window_mask(self, length: int, window: int, like: Tensor) -> Tensor:
        if (length, window) not in self._masks:
            place = torch.arange(length, device=like.device)
            distance = place[:, None] - place[None, :]
            self._masks[length, window] = (distance >= 0) & (distance < window)
        return self._masks[length, window]


def kernel_for(choice: AttentionChoice, query: Tensor) -> Kernel | None:
    """The kernel that takes all samples in one call; none where ``scaled_dot_product_attention`` is used."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    name = kernel_name(choice, gpu=query.is_cuda, narrow=narrow, head_dim=query.shape[-1])
    if name == "flash_attn":
        return flash_attn_kernel()
    return attention_op.attend_packed if name == "varlen" else None


def attends_in_graph(choice: AttentionChoice, weight: Tensor) -> bool:
    """Whether compiled layers of a model with such weights attend by one operator: where torch's own kernel is used."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return choice != "sdpa" and kernel_name(choice, gpu=weight.is_cuda, narrow=narrow, head_dim=8) == "varlen"


@cache
def kernel_name(choice: AttentionChoice, *, gpu: bool, narrow: bool, head_dim: int) -> AttentionName:
    """The kernel that is used, on what is installed.

    Raises:
        UserError: if the one that was asked for cannot be.
    """
    flash = gpu and choice == "flash_attn" and flash_attn_kernel() is not None
    try:
        return choose_attention(choice, gpu=gpu, narrow=narrow, head_dim=head_dim, flash_attn=flash)
    except NotPossible as error:
        raise UserError(
            f"{choice} cannot compute this model's attention",
            where="model.attention",
            why=str(error),
            fix="model.attention=auto",
        ) from error
