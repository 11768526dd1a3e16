"""Settings of generation: the sampling distribution, the engine, its cache and its limits.

Owns: their defaults, ranges and meaning. Refuses to know: engines, devices.
"""

from typing import Annotated, Literal

from pydantic import Field

from meshloom.config.base import Count, CountOrZero, NotNegative, Positive, Settings, Share


class SamplingSettings(Settings):
    """The distribution a token is drawn from."""

    temperature: NotNegative = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this (nucleus sampling)."""
    top_k: CountOrZero = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: Share = 0.0
    """Drop tokens less likely than this share of the most likely one."""


class RolloutSettings(Settings):
    """How responses are generated while training."""

    engine: Literal["torch"] = "torch"
    """``torch``: the embedded engine on the trainer's own weights."""
    sampling: SamplingSettings = SamplingSettings()
    """The sampling distribution of training samples."""
    max_response_tokens: Count = 512
    """Longest response, in tokens."""
    ignore_eos: bool = False
    """Generate exactly ``max_response_tokens`` tokens, for benchmarks."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's own end tokens."""
    max_sequences: Count = 256
    """Sequences decoded at once."""
    kv_cache_bytes: Count | None = None
    """Bound on the bytes of the key-value cache. Default: a quarter of the free memory."""
    prefill_tokens: Count = 8192
    """Prompt tokens computed in one pass."""
    deadline_s: Positive = 3600.0
    """Seconds a step's generation may take; unfinished samples are then dropped with their group and counted."""
