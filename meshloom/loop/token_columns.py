"""What a record has of each token of a response beside its id, so that a run can train on it once more.

Owns: its form. Always holds: a float32 comes back to the last bit from nine significant digits.
"""

from itertools import pairwise
from typing import Any

import torch

from meshloom.samples import Samples


def token_columns(samples: Samples, sample: int, prompt_tokens: int) -> dict[str, Any]:
    """Columns of a sample's response.

    ``logprobs``: log-probability of each token where it was sampled. ``token_versions``: of the weights that sampled each,
    where they differ. ``own``: stretches (from, to) of tokens that are the model's own, where not all are.
    """
    start, stop = _of_response(samples, sample, prompt_tokens)
    mask, versions = samples["mask"][start:stop], samples["version"][start:stop]
    found: dict[str, Any] = {}
    if "sampler_logprob" in samples.tokens:
        found["logprobs"] = [float(f"{value:.9g}") for value in samples["sampler_logprob"][start:stop].tolist()]
    if bool((versions != versions[0]).any()):
        found["token_versions"] = versions.tolist()
    if not bool(mask.all()):
        found["own"] = stretches(mask)
    return found


def episode_columns(samples: Samples, sample: int, prompt_tokens: int) -> dict[str, Any]:
    """What a sample's response has besides where samples are episodes.

    ``episode``: which of its draw. ``own``: as of ``token_columns``, always. ``turn_rewards``: of each token, where a turn had
    one.
    """
    start, stop = _of_response(samples, sample, prompt_tokens)
    rewards = samples["turn_reward"][start:stop]
    found = {"episode": int(samples["episode"][sample]), "own": stretches(samples["mask"][start:stop])}
    return found | ({"turn_rewards": rewards.tolist()} if bool(rewards.any()) else {})


def episode_fields(samples: Samples, sample: int, prompt_tokens: int) -> dict[str, Any]:
    """What a record has besides where a sample is an episode: its messages, and what its tokens are."""
    if "messages" not in samples.meta:
        return {}
    counts = {name: int(samples.rows[name][sample]) for name in ("turns", "tool_calls", "tool_errors")}
    return {"messages": samples.meta["messages"][sample], **episode_columns(samples, sample, prompt_tokens), **counts}


def prompt_length(mask_T: torch.Tensor) -> int:
    """Tokens of a sample before its response, which begins with the first that is the model's own; the last one, if none is."""
    return int(mask_T.long().argmax()) if bool(mask_T.any()) else len(mask_T) - 1


def version_range(version_T: torch.Tensor, mask_T: torch.Tensor) -> tuple[int, int]:
    """Oldest and newest version of the weights that sampled a sample's own tokens; of its last one, if none is."""
    own = version_T[mask_T] if bool(mask_T.any()) else version_T[-1:]
    return int(own.min()), int(own.max())


def _of_response(samples: Samples, sample: int, prompt_tokens: int) -> tuple[int, int]:
    """Where the tokens of a sample's response are in the columns."""
    stop = int(samples.lengths[: sample + 1].sum())
    return stop - int(samples.lengths[sample]) + prompt_tokens, stop


def stretches(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where a mask is true, as (from, to)."""
    padded = torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)])
    turns = (padded[1:] != padded[:-1]).nonzero().squeeze(1).tolist()
    return list(pairwise(turns))[::2]
