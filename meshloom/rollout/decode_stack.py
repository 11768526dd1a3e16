"""A model's layers as the few operations a decode step needs, on the trainer's own weights.

Owns: which model families have this form, and the order of operations in a layer. Refuses to know: pages, sampling,
graphs. Always holds: weights are read where the trainer updates them, never copied; matrices that read the same input
(queries, keys and values; gate and up) lie side by side in one storage, so one product serves them.

Legend: T tokens, H query heads, K key-value heads, D width of a head, E hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from meshloom.rollout.paged_ops import NO_NORMS, HeadNorms, HeadShape, NormKind, Ops, Pool, Rope, TermNorms
from meshloom.rollout.peers import Alone, Peers
from meshloom.train.head import decoder_of, plain_model

_FAMILIES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer, Gemma3DecoderLayer)
_MOVING_ROPES = ("dynamic", "longrope")
_SMALLEST_HEAD = 16

Attend = Callable[[int, Tensor], Tensor]
"""From a layer's number and its rotated projections [T, (H + 2K) × D] to the attention output [T, H × D]."""


class Projection:
    """Linear layers that read the same input, as one product where they are plain.

    Args:
        parts: the layers, in the order their outputs are wanted. Layers with adapters are called one by one.
        peers: devices whose products are added up, each of them with its part of the inputs.
    """

    def __init__(self, parts: Sequence[nn.Module], peers: Peers | None = None) -> None:
        self._parts, self._peers = parts, peers or Alone()
        self.is_plain = (
            all(type(part) is nn.Linear for part in parts) and len({part.bias is None for part in parts}) == 1
        )
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def join(self) -> None:
        """Lay the weights side by side, unless they are already; their parameters then are views of one storage."""
        if self.is_plain:
            self._weight = _joined([part.weight for part in self._parts])
            self._bias = None if self._parts[0].bias is None else _joined([part.bias for part in self._parts])

    def __call__(self, x: Tensor) -> Tensor:
        if self._weight is not None and self._peers.count == 1:
            return linear(x, self._weight, self._bias)
        if self._weight is not None:
            total = self._peers.add_up(linear(x, self._weight))
            return total if self._bias is None else total + self._bias
        return torch.cat([part(x) for part in self._parts], -1)

    @property
    def weight(self) -> Tensor | None:
        """The weights side by side, where their product with the input is all of it but for ``bias``."""
        return self._weight if self._peers.count == 1 else None

    @property
    def bias(self) -> Tensor | None:
        return self._bias


@torch.no_grad()
def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    first = parameters[0]
    rows = sum(len(parameter) for parameter in parameters)
    at = first.data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.data_ptr() != at:
            break
        at += parameter.nbytes
    else:
        if first.untyped_storage().nbytes() >= first.storage_offset() * first.itemsize + at - first.data_ptr():
            return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, piece in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = piece
    return whole


@dataclass(frozen=True)
class _Layer:
    norm_in: Tensor
    qkv: Projection
    norms: HeadNorms | None
    out: Projection
    norm_before_mlp: Tensor
    gate_up: Projection
    down: Projection
    norms_after: TermNorms
    """Of what attention and the MLP add to the residual."""
    kind: str
    """Which rotary embedding it uses."""
    window: int | None


def reason_against(model: nn.Module) -> str | None:
    """Why a model cannot be decoded in this form; none if it can."""
    decoder = decoder_of(model)
    config = decoder.config
    layers = decoder._modules.get("layers")
    if layers is None or not all(isinstance(layer, _FAMILIES) for layer in layers):
        return f"the layers of {type(plain_model(model)).__name__} are not of a family known to it"
    if not isinstance(decoder.embed_tokens, nn.Embedding):
        return f"its embedding is in a {type(decoder.embed_tokens).__name__}, past which tokens are looked up"
    if len(list(decoder.layers.named_parameters(remove_duplicate=False))) > len(list(decoder.layers.parameters())):
        return "its layers share weights, which cannot lie in two places"
    attention = decoder.layers[0].self_attn
    width = attention.head_dim
    if width < _SMALLEST_HEAD or width & (width - 1):
        return f"heads of width {width} are not a power of two of at least {_SMALLEST_HEAD}"
    ropes = config.rope_parameters or {}
    kinds = [part.get("rope_type") for part in ropes.values() if isinstance(part, dict)] or [ropes.get("rope_type")]
    if moving := sorted(set(kinds).intersection(_MOVING_ROPES)):
        return f"its rotary embedding ({moving[0]}) changes with the length"
    if _activation(config) not in ("silu", "swish", "gelu_pytorch_tanh"):
        return f"its activation {_activation(config)} is not known"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead"
    return None


def _activation(config: object) -> str:
    names = vars(config)
    return names["hidden_activation"] if "hidden_activation" in names else names["hidden_act"]


def form_of(model: nn.Module) -> tuple[Any, ...]:
    """What a stack and a captured step hold of a model, beside the values of its weights: where these are, and which
    adapters take part."""
    addresses = [p.data_ptr() for p in model.parameters()]
    if isinstance(model, PreTrainedModel):
        return tuple(addresses)
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return *addresses, *((m.disable_adapters, *m.active_adapters, "merged", *m.merged_adapters) for m in layers)


class DecodeStack:
    """The layers of a model that ``reason_against`` has nothing against.

    Args:
        model: a causal language model, or one in a peft wrapper.
        ops: the operations.
        page: tokens of a page.
        peers: devices that hold the model together.
    """

    def __init__(self, model: nn.Module, ops: Ops, page: int, peers: Peers | None = None) -> None:
        self.peers: Peers = peers or Alone()
        self._decoder: PreTrainedModel = decoder_of(model)
        self._ops, config = ops, self._decoder.config
        attention = self._decoder.layers[0].self_attn
        keys = max(1, config.num_key_value_heads // self.peers.count)
        self.shape = HeadShape(config.num_attention_heads // self.peers.count, keys, attention.head_dim, page)
        self.scale: float = attention.scaling
        first = self._decoder.layers[0]
        self._gemma = isinstance(first, Gemma3DecoderLayer)
        self._norm = NormKind(config.rms_norm_eps, self._gemma)
        self._is_gelu = _activation(config) == "gelu_pytorch_tanh"
        self._layers = [self._layer(layer) for layer in self._decoder.layers]
        self._ropes: dict[str, Rope] = {}

    def _layer(self, layer: nn.Module) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = isinstance(layer, (Qwen3DecoderLayer, Gemma3DecoderLayer))
        kind = NormKind(self._norm.eps, self._gemma)
        before_mlp = layer.pre_feedforward_layernorm if self._gemma else layer.post_attention_layernorm
        return _Layer(
            norm_in=layer.input_layernorm.weight.detach(),
            qkv=Projection([attention.q_proj, attention.k_proj, attention.v_proj]),
            norms=HeadNorms(attention.q_norm.weight.detach(), attention.k_norm.weight.detach(), kind)
            if has_norms
            else None,
            out=Projection([attention.o_proj], self.peers),
            norm_before_mlp=before_mlp.weight.detach(),
            gate_up=Projection([mlp.gate_proj, mlp.up_proj]),
            down=Projection([mlp.down_proj], self.peers),
            norms_after=_norms_after(layer) if self._gemma else NO_NORMS,
            kind=attention.layer_type if self._gemma else "",
            window=_window(layer),
        )

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def calls_modules(self) -> bool:
        """Whether some layer's own forward is called, as those with adapters are."""
        return any(
            not projection.is_plain
            for layer in self._layers
            for projection in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )

    @property
    def window_of(self) -> list[int | None]:
        """Window of each layer's attention: a token sees itself and window − 1 before it."""
        return [layer.window for layer in self._layers]

    def bind(self, positions: int) -> None:
        """See that the weights lie side by side, and that the rotary tables reach ``positions``."""
        for layer in self._layers:
            for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
                projection.join()
        if not self._ropes or len(next(iter(self._ropes.values())).cos) < positions:
            self._ropes = {kind: self._rope(kind, positions) for kind in {layer.kind for layer in self._layers}}

    @torch.no_grad()
    def _rope(self, kind: str, positions: int) -> Rope:
        weight = self._decoder.embed_tokens.weight
        place = torch.arange(positions, device=weight.device)[None]
        like = torch.empty(0, dtype=weight.dtype, device=weight.device)
        tables = self._decoder.rotary_emb(like, place, kind) if kind else self._decoder.rotary_emb(like, place)
        cos, sin = (table[0, :, : self.shape.head_dim // 2].contiguous() for table in tables)
        return Rope(cos, sin)

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, places_T: Tensor, pool: Pool, attend: Attend, keep_key: bool
    ) -> Tensor:
        """Last hidden states of tokens, [T, E]; their keys and values are written to their places in the pool.

        Args:
            ids_T: tokens.
            positions_T: place of each in its sequence.
            places_T: page × P + place in the page, or −1 for a token that is not kept.
            pool: the pages.
            attend: the attention.
            keep_key: whether ``attend`` reads the rotated keys from the projections.
        """
        table = self._decoder.embed_tokens
        residual = self.peers.embed(ids_T, table.weight)
        if self._gemma:
            residual = residual * table.embed_scale.to(residual.dtype)
        x = self._ops.rms_norm(residual, self._layers[0].norm_in, self._norm)
        ends = [layer.norm_in for layer in self._layers[1:]] + [self._decoder.norm.weight.detach()]
        for number, (layer, norm_next) in enumerate(zip(self._layers, ends, strict=True)):
            qkv = self._qkv(layer, x, pool, positions_T, places_T, number, keep_key)
            seen = self._term(layer.out, attend(number, qkv), whole=keep_key)
            x, seen = self._ops.norm_of_sum(residual, seen, layer.norm_before_mlp, self._norm, layer.norms_after)
            x = self._term(layer.down, self._gated(layer.gate_up, x), whole=keep_key)
            x = self._ops.norm_of_kept_sum(residual, seen, x, norm_next, self._norm, layer.norms_after)
        return x

    def _qkv(
        self, layer: _Layer, x: Tensor, pool: Pool, positions_T: Tensor, places_T: Tensor, number: int, keep_key: bool
    ) -> Tensor:
        """Projections whose queries (and keys, with ``keep_key``) are rotated; keys and values are in the pool."""
        weight, rope = layer.qkv.weight, self._ropes[layer.kind]
        # The prompts' attention reads keys and values where the projection has them.
        found = None if weight is None or keep_key else self._ops.pieces(x, weight)
        qkv, bias = (layer.qkv(x), None) if found is None else (found, layer.qkv.bias)
        return self._ops.rope_store(
            qkv, self.shape, rope, positions_T, places_T, pool, number, layer.norms, keep_key, bias
        )

    def _term(self, projection: Projection, x: Tensor, *, whole: bool) -> Tensor:
        """What a projection adds to the residual, perhaps in pieces unless it must be whole."""
        weight = projection.weight
        found = None if whole or weight is None or projection.bias is not None else self._ops.pieces(x, weight)
        return projection(x) if found is None else found

    def _gated(self, projection: Projection, x: Tensor) -> Tensor:
        if projection.weight is None or projection.bias is not None:
            return self._ops.gated(projection(x), self._is_gelu)
        return self._ops.gated_product(x, projection.weight, self._is_gelu)


def _norms_after(layer: nn.Module) -> TermNorms:
    return TermNorms(layer.post_attention_layernorm.weight.detach(), layer.post_feedforward_layernorm.weight.detach())


def _window(layer: nn.Module) -> int | None:
    """The window of a layer's attention, where its family has one."""
    if isinstance(layer, LlamaDecoderLayer):
        return None
    if isinstance(layer, MistralDecoderLayer):
        return layer.self_attn.config.sliding_window
    return layer.self_attn.sliding_window
