"""Tiny models of each supported family, with random weights, for tests."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
    # Large enough that different tokens get clearly different probabilities.
    "initializer_range": 0.15,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": lambda **changes: LlamaConfig(**{**_SHAPE, **changes}),
    "qwen2": lambda **changes: Qwen2Config(**{**_SHAPE, **changes}, tie_word_embeddings=True),
    "qwen3": lambda **changes: Qwen3Config(**{**_SHAPE, **changes}),
    "mistral": lambda **changes: MistralConfig(**{**_SHAPE, **changes}, sliding_window=8),
    "gemma3": lambda **changes: Gemma3TextConfig(
        **{**_SHAPE, **changes},
        sliding_window=8,
        layer_types=_SLIDING,
        query_pre_attn_scalar=16,
        final_logit_softcapping=5.0,
    ),
}
FAMILIES = list(CONFIGS)


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of three layers, in eval mode, with transformers' own attention; ``changes`` are to its configuration."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[family](**changes)).to(dtype).eval()


def tiny_reward_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A sequence classifier of three layers, with one output unless ``changes`` say another number of labels."""
    torch.manual_seed(seed)
    config = CONFIGS[family](**{"num_labels": 1, **changes})
    return AutoModelForSequenceClassification.from_config(config).eval()
