"""Settings of generation: the sampling distribution, the engine, its cache and its limits.

Owns: their defaults, ranges and meaning. Refuses to know: engines, devices.
"""

from typing import Annotated, Literal

from pydantic import Field

from meshloom.config.base import Count, CountOrZero, NotNegative, Place, Positive, Settings, Share

VLLM_TEMPERATURES = (0.01, 2.0)
"""Lowest and highest temperature at which vLLM samples as it is told, 0 apart."""

ENGINES_NOT_OFFERED = {
    "sglang": "SGLang could not be run where meshloom is tested, and an engine that has never run is not offered"
}
"""Engines that a user may look for, and why they are not there."""


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


class VllmSettings(Settings):
    """What only vLLM has; read with ``rollout.engine: vllm``."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of the GPU's memory that vLLM takes for its weights and cache while it generates. ``rollout.kv_cache_bytes`` bounds
    the cache alone, and is used instead where it is given. On the processor only ``rollout.kv_cache_bytes`` counts."""
    enforce_eager: bool = False
    """Neither compile nor capture graphs: a start that is a minute faster, and slower steps."""
    max_model_len: Count | None = None
    """Longest prompt and response together, in tokens. Default: the longest that the data settings and
    ``rollout.max_response_tokens`` allow."""
    sleep: bool = True
    """Give vLLM's memory back while the trainer updates; on a GPU only."""
    max_probe_gap: Positive | None = None
    """Stop the run when, after a movement of weights, mean |Δ log-prob| of a few fixed tokens between vLLM and trainer exceeds
    this. Default: 0.02 in float32, 0.25 in bfloat16."""
    arguments: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Further arguments of vLLM's own ``EngineArgs``, by their names there."""


class RolloutSettings(Settings):
    """How responses are generated while training."""

    engine: Literal["torch", "vllm"] = "torch"
    """``torch``: the embedded engine, on the trainer's own weights where it can. ``vllm``: vLLM in the same processes, with
    weights of its own, which are moved there after each step (extra: vllm)."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM."""
    sampling: SamplingSettings = SamplingSettings()
    """The sampling distribution of training samples."""
    max_response_tokens: Count = 512
    """Longest response, in tokens."""
    ignore_eos: bool = False
    """Generate exactly ``max_response_tokens`` tokens, for benchmarks."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's own end tokens."""
    max_sequences: Count = 512
    """Sequences decoded at once."""
    kv_cache_bytes: Count | None = None
    """Bound on the bytes of the key-value cache. Default: on a GPU nine tenths of what is free when it generates, as far as it
    can be used; on the processor a quarter of the free memory."""
    prefill_tokens: Count = 8192
    """Prompt tokens computed in one pass."""
    from_samples: Place | None = None
    """Train on the samples of this file (``samples.jsonl`` of a run or of ``meshloom rollout``), or run folder, instead of
    generating."""
    deadline_s: Positive = 3600.0
    """Seconds a step's generation may take; unfinished samples are then dropped with their group and counted."""
