"""Real vLLM for the contract tests: tiny models of the shapes it has kernels for, opened once for each set of options."""

import functools
import tempfile
from pathlib import Path

import torch

from meshloom.config.settings import ModelSettings
from meshloom.rollout.protocol import Request, SamplingParams
from meshloom.rollout.vllm_build import OpenVllm, VllmOptions, open_vllm
from meshloom.rollout.vllm_engine import VllmEngine
from meshloom.train.attention import use_layouts
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.weights.feed import TrainerFeed
from tests.models import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 32_000}
"""vLLM's attention knows heads of 32 and more, and its Qwen2 only those that together are as wide as the hidden states."""
BYTES_PER_TOKEN = 2 * 3 * 2 * 32 * 4
_LEAST_CACHE_TOKENS = 700


@functools.cache
def model_folder(family: str) -> Path:
    """Folder of a tiny model; only its configuration is read."""
    folder = Path(tempfile.mkdtemp(prefix="meshloom-vllm-")) / family
    tiny_model(family, torch.float32, **SHAPE).save_pretrained(folder)
    return folder


def opened(family: str, max_sequences: int, kv_cache_bytes: int, prefill_tokens: int) -> OpenVllm:
    """vLLM, as long as it lives: the end of a run in this process takes vLLM's groups away from all of its engines."""
    from vllm.distributed import model_parallel_is_initialized

    if not model_parallel_is_initialized():
        _opened.cache_clear()
    return _opened(family, max_sequences, kv_cache_bytes, prefill_tokens)


@functools.cache
def _opened(family: str, max_sequences: int, kv_cache_bytes: int, prefill_tokens: int) -> OpenVllm:
    # Small caches serve short sequences only: vLLM wants room for the longest.
    roomy = kv_cache_bytes >= 32_000 * BYTES_PER_TOKEN
    return open_vllm(
        VllmOptions(
            model_path=model_folder(family),
            dtype=torch.float32,
            device=DEVICE,
            max_sequences=max_sequences,
            max_model_len=32_000 if roomy else 160,
            prefill_tokens=prefill_tokens,
            kv_cache_bytes=max(kv_cache_bytes, _LEAST_CACHE_TOKENS * BYTES_PER_TOKEN),
            enforce_eager=True,
            sleep=False,
        )
    )


def trained(family: str) -> TrainedModel:
    """The trainer's side."""
    model = tiny_model(family, torch.float32, **SHAPE).to(DEVICE)
    use_layouts(model)
    return TrainedModel(model, ModelSettings(path=str(model_folder(family))), MicrobatchBound(1000), None)


def vllm_engine(
    family: str,
    dtype: torch.dtype | None = None,
    *,
    max_sequences: int = 8,
    kv_cache_bytes: int = 10**8,
    prefill_tokens: int = 64,
    **options,
) -> tuple[VllmEngine, torch.nn.Module]:
    """An engine of float32, whatever ``dtype`` says: vLLM knows no float64."""
    vllm, model = opened(family, max_sequences, kv_cache_bytes, prefill_tokens), trained(family)
    engine = VllmEngine(vllm, feed=TrainerFeed(model), **{"eos_ids": (1,), "decode": None} | options)
    # What is compiled on first use would count against deadlines.
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    list(engine.generate([Request(id=0, prompt_ids=[3], params=params, seeds=[0, 1])], deadline_s=600))
    return engine, model.module
