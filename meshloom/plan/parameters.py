"""Parameters of a model, counted from its config.json alone, by component.

Owns: what each family's layers hold, and what of it one token meets. Refuses to know: files of weights, dtypes, devices.
Always holds: a count is exact, tensor by tensor as transformers 5 builds the model (a test compares them), or the family is
refused; nothing is guessed.

A tied head is no parameter of its own. Layers that predict further tokens (DeepSeek's multi-token prediction) are in the
files of weights, with copies of both tables; transformers loads them only for speculative decoding, without the copies: they
are counted apart.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshloom.plan.decoder_numbers import DecoderNumbers, Layer, Layers

Config = Mapping[str, Any]
_MOST_LAYERS = 100_000


class UnknownFamily(ValueError):
    """config.json is of a family whose parameters cannot be counted here, or lacks a size."""


def is_counted(config: Config) -> bool:
    """Whether a model's parameters can be counted by its config.json."""
    try:
        count_parameters(config)
    except UnknownFamily:
        return False
    return True


def count_parameters(config: Config) -> DecoderNumbers:
    """A decoder's numbers, of a whole model or of the text part of a vision-language model.

    Args:
        config: config.json.

    Raises:
        UnknownFamily: if the family is not known here, or a size is missing.
    """
    text = config.get("text_config", config)
    family = str(text.get("model_type") or {"gemma3": "gemma3_text"}.get(str(config.get("model_type"))))
    if family not in _FAMILIES:
        raise UnknownFamily(f"model_type {family!r}: known are {', '.join(_FAMILIES)}")
    defaults, build = _FAMILIES[family]
    sizes = _Sizes(family, {**_COMMON, **defaults}, text)
    if sizes.number("num_hidden_layers") > _MOST_LAYERS:
        raise UnknownFamily(
            f"{sizes.number('num_hidden_layers'):,} layers are more than the {_MOST_LAYERS:,} that are counted"
        )
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return build(sizes, bool(sizes["tie_word_embeddings"] if tied is None else tied))


class _Sizes:
    """Values of config.json, with the family's defaults for those that are left out; a null is a value."""

    def __init__(self, family: str, defaults: Config, given: Config) -> None:
        self.family, self._defaults, self._given = family, defaults, given

    def __getitem__(self, key: str) -> Any:
        return self._given[key] if key in self._given else self._defaults.get(key)

    def number(self, *keys: str) -> int:
        """The first of several names that is there.

        Raises:
            UnknownFamily: if none is.
        """
        value = next((self._given[key] for key in keys if key in self._given), self._defaults.get(keys[0]))
        if not isinstance(value, int):
            raise UnknownFamily(f"config.json of {self.family} has no {keys[0]}")
        return value


def _decoder(sizes: _Sizes, layers: Iterable[Layer], tied: bool, *, further: int = 0, **widths: int) -> DecoderNumbers:
    hidden, vocabulary = sizes.number("hidden_size"), sizes.number("vocab_size")
    return DecoderNumbers(
        family=sizes.family,
        embedding=vocabulary * hidden,
        layers=Layers.of(layers),
        final_norm=hidden,
        head=0 if tied else vocabulary * hidden,
        further=further,
        hidden=hidden,
        vocabulary=vocabulary,
        num_heads=sizes.number("num_attention_heads"),
        **widths,
    )


def _grouped(sizes: _Sizes, tied: bool) -> DecoderNumbers:
    """Families with queries in groups over keys and values: all but DeepSeek's."""
    hidden, heads = sizes.number("hidden_size"), sizes.number("num_attention_heads")
    key_values = sizes.number("num_key_value_heads") if sizes["num_key_value_heads"] else heads
    head_dim = sizes.number("head_dim") if sizes["head_dim"] else hidden // heads
    query, key = heads * head_dim, key_values * head_dim
    attention = 2 * hidden * query + 2 * hidden * key
    attention += query + 2 * key if sizes["query_bias"] or sizes["attention_bias"] else 0
    attention += hidden if sizes["attention_bias"] else 0
    attention += heads if sizes["sinks"] else 0
    norms = sizes["norms_of_hidden"] * hidden + (2 * head_dim if sizes["norms_of_heads"] else 0)
    layers = (
        Layer(attention=attention, norms=norms, **_mlp(sizes, index))
        for index in range(sizes.number("num_hidden_layers"))
    )
    widths = {"query_width": query, "value_width": query, "key_value_width": key, "cached": 2 * key}
    return _decoder(sizes, layers, tied, num_key_value_heads=key_values, **widths)


def _mlp(sizes: _Sizes, index: int) -> dict[str, int]:
    """The MLP of a layer, dense or of experts."""
    hidden = sizes.number("hidden_size")
    if not _is_sparse(sizes, index):
        width = sizes.number("intermediate_size")
        biases = 2 * width + hidden if sizes["mlp_bias"] else 0
        return {"mlp": 3 * hidden * width + biases, "intermediate": width}
    number, met = (
        sizes.number("num_local_experts", "num_experts", "n_routed_experts"),
        sizes.number("num_experts_per_tok"),
    )
    width = sizes.number("moe_intermediate_size" if sizes["moe_intermediate_size"] else "intermediate_size")
    shared = sizes.number("n_shared_experts") if sizes["n_shared_experts"] else 0
    biases = 2 * width + hidden if sizes["expert_bias"] else 0
    return {
        "experts": number * (3 * hidden * width + biases),
        "shared_experts": shared * 3 * hidden * width,
        "router": number * (hidden + (1 if sizes["expert_bias"] else 0)),
        "experts_met": met,
        "num_experts": number,
        "intermediate": (met + shared) * width,
    }


def _is_sparse(sizes: _Sizes, index: int) -> bool:
    if sizes.family == "qwen3_moe":
        return index not in (sizes["mlp_only_layers"] or ()) and (index + 1) % sizes.number("decoder_sparse_step") == 0
    if sizes.family == "deepseek_v3":
        return index >= sizes.number("first_k_dense_replace")
    return sizes.family in ("mixtral", "gpt_oss")


def _latent(sizes: _Sizes, tied: bool) -> DecoderNumbers:
    """DeepSeek-V3: keys and values come from one latent vector a token (arXiv:2412.19437, section 2.1)."""
    hidden, heads, rank = (sizes.number(key) for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    rotary, value = sizes.number("qk_rope_head_dim"), heads * sizes.number("v_head_dim")
    query = heads * (sizes.number("qk_nope_head_dim") + rotary)
    bias = bool(sizes["attention_bias"])
    attention = hidden * (rank + rotary) + rank * (query - heads * rotary + value) + value * hidden
    attention += rank + rotary + hidden if bias else 0
    norms = 2 * hidden + rank
    low = None if sizes["q_lora_rank"] is None else sizes.number("q_lora_rank")
    if low is None:
        attention += hidden * query
    else:
        attention += hidden * low + low * query + (low if bias else 0)
        norms += low
    count = sizes.number("num_hidden_layers")
    layers = (Layer(attention=attention, norms=norms, **_mlp(sizes, index)) for index in range(count))
    further = next((sizes.number(key) for key in ("num_nextn_predict_layers", "num_mtp_layers") if sizes[key]), 0)
    one = Layer(attention=attention, norms=norms, **_mlp(sizes, count)).total
    # Each joins the norms of embedding and hidden state in one projection, and has a norm of its own after its layer.
    each = one + 3 * hidden + 2 * hidden * hidden
    widths = {
        "query_width": query,
        "value_width": value,
        "key_value_width": (query + value) // 2,
        "cached": rank + rotary,
    }
    return _decoder(sizes, layers, tied, further=further * each, num_key_value_heads=1, **widths)


# What transformers takes where config.json leaves a size out, and what else the layers of a family have.
_COMMON: Config = {"norms_of_hidden": 2}
_BASE: Config = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_QWEN: Config = {**_BASE, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936}
_MISTRAL: Config = {**_BASE, "intermediate_size": 14336, "num_key_value_heads": 8}
_FAMILIES: dict[str, tuple[Config, Callable[[_Sizes, bool], DecoderNumbers]]] = {
    "llama": ({**_BASE, "intermediate_size": 11008}, _grouped),
    "mistral": (_MISTRAL, _grouped),
    "mixtral": ({**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2}, _grouped),
    "qwen2": ({**_QWEN, "query_bias": True}, _grouped),
    "qwen3": ({**_QWEN, "head_dim": 128, "norms_of_heads": True}, _grouped),
    "qwen3_moe": (
        {
            **_QWEN,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "norms_of_heads": True,
        },
        _grouped,
    ),
    "gemma3_text": (
        {
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "vocab_size": 262208,
            "tie_word_embeddings": True,
            "norms_of_hidden": 4,
            "norms_of_heads": True,
        },
        _grouped,
    ),
    "gpt_oss": (
        {
            "hidden_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "vocab_size": 201088,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "sinks": True,
            "expert_bias": True,
        },
        _grouped,
    ),
    "deepseek_v3": (
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "vocab_size": 129280,
            "num_local_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
        },
        _latent,
    ),
}
