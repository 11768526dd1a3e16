"""vLLM on the ranks of a run: each replica of the rollout is an engine in its ranks' own processes.

Owns: what of a run's settings and layout a rank's vLLM is opened with. Refuses to know: how weights come (``loop.vllm_mover``).
Always holds: no weight is read from the model's folder; ranks of one replica open the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshloom.config.settings import TrainSettings
from meshloom.loop.build import decoder, set_end_tokens
from meshloom.loop.movers import Ends
from meshloom.loop.vllm import vllm_options
from meshloom.loop.vllm_mover import VllmMover, VllmSide
from meshloom.rollout.kv_cache import quarter_of_free_bytes
from meshloom.rollout.vllm_build import VllmOptions, open_vllm
from meshloom.rollout.vllm_engine import VllmEngine
from meshloom.rollout.vllm_world import VllmWorld
from meshloom.train.load import pick_dtype
from meshloom.train.load_sharded import build_empty, load_whole


def build_vllm(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    ends: Ends,
    replica: Sequence[int],
) -> VllmMover:
    """This rank's vLLM, if it has one, and what brings the weights; due on all ranks of the run at once.

    Args:
        settings: of the run.
        tokenizer: of the model.
        ends: of the movements; all replicas take.
        replica: ranks of this rank's replica; none if it has no vLLM.

    Raises:
        UserError: if vLLM is not installed, or refuses to start.
    """
    if not replica:
        return VllmMover(ends, None)
    folder, dtype = Path(settings.model.path), pick_dtype(settings.model.dtype, ends.device)
    model = build_empty(folder, dtype) or load_whole(folder, dtype)
    eos_ids = set_end_tokens(model, settings.data, tokenizer)
    world = VllmWorld(replica, ends.device)
    neighbours = sum(ends.nodes[rank] == ends.nodes[replica[world.rank]] for rank in ends.takers)
    options = _options(settings, dtype, world, neighbours)
    if not ends.share_ranks:
        options = replace(options, sleep=False)  # there is nobody to make room for
    opened = open_vllm(options)
    side = _side(model, dtype, world, settings.rollout.vllm.max_probe_gap)
    mover = VllmMover(ends, side)
    mover.engine = VllmEngine(opened, feed=mover, eos_ids=eos_ids, decode=decoder(tokenizer))
    return mover


def _options(settings: TrainSettings, dtype: torch.dtype, world: VllmWorld, neighbours: int) -> VllmOptions:
    """As on one device; on the processor the ranks of a machine share the memory that is free."""
    rollout, device, cache_bytes = settings.rollout, world.device, settings.rollout.kv_cache_bytes
    if cache_bytes is None and device.type == "cpu":
        cache_bytes = min(world.gathered(quarter_of_free_bytes(device) // neighbours))
    longest = max(rollout.max_response_tokens, settings.validation.max_response_tokens or 0)
    return vllm_options(
        rollout,
        Path(settings.model.path),
        dtype,
        device,
        longest=settings.data.max_prompt_tokens + longest,
        cache_bytes=cache_bytes,
        world=world,
    )


def _side(model: PreTrainedModel, dtype: torch.dtype, world: VllmWorld, max_gap: float | None) -> VllmSide:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return VllmSide(
        world=world,
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        tied={name: own for name, own in names.items() if own != name},
        dtype=dtype,
        vocabulary=len(model.get_input_embeddings().weight),
        max_gap=max_gap,
    )
