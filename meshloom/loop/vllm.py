"""The vLLM engine of a run: its options from the settings, and its weights from the trained model.

Owns: what of a run's settings vLLM is opened with. Refuses to know: vLLM.
"""

from pathlib import Path

import torch

from meshloom.config.settings import RolloutSettings
from meshloom.rollout.kv_cache import quarter_of_free_bytes
from meshloom.rollout.stopping import Decode
from meshloom.rollout.vllm_build import VllmOptions, open_vllm
from meshloom.rollout.vllm_engine import VllmEngine
from meshloom.rollout.vllm_world import VllmWorld
from meshloom.train.model import TrainedModel
from meshloom.weights.feed import TrainerFeed


def vllm_engine(
    model: TrainedModel, rollout: RolloutSettings, *, longest: int, eos_ids: tuple[int, ...], decode: Decode
) -> VllmEngine:
    """vLLM with the weights of a trained model.

    Args:
        model: trained, on the device that vLLM shall use.
        rollout: settings of generation.
        longest: prompt and response together, in tokens, if the settings name no bound.
        eos_ids: tokens that end a sample.
        decode: from token ids to text, for stop strings.

    Raises:
        UserError: if vLLM is not installed, or refuses to start.
    """
    cache_bytes = rollout.kv_cache_bytes
    if cache_bytes is None and model.device.type == "cpu":
        cache_bytes = quarter_of_free_bytes(model.device)
    path, dtype = Path(model.settings.path), model.head.weight.dtype
    options = vllm_options(rollout, path, dtype, model.device, longest=longest, cache_bytes=cache_bytes)
    feed = TrainerFeed(model, rollout.vllm.max_probe_gap)
    return VllmEngine(open_vllm(options), feed=feed, eos_ids=eos_ids, decode=decode)


def vllm_options(
    rollout: RolloutSettings,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    longest: int,
    cache_bytes: int | None,
    world: VllmWorld | None = None,
) -> VllmOptions:
    """What vLLM is opened with.

    Args:
        rollout: settings of generation.
        path: folder of the model.
        dtype: of weights and arithmetic.
        device: that it shall use.
        longest: prompt and response together, in tokens, if the settings name no bound.
        cache_bytes: of the cache; none: what is left of the share of the GPU's memory.
        world: of the replica, over several devices.
    """
    settings = rollout.vllm
    return VllmOptions(
        model_path=path,
        dtype=dtype,
        device=device,
        max_sequences=rollout.max_sequences,
        max_model_len=settings.max_model_len or longest,
        prefill_tokens=rollout.prefill_tokens,
        kv_cache_bytes=cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        sleep=settings.sleep,
        arguments=settings.arguments,
        world=world,
    )
