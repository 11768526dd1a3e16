"""The greedy sample of a prompt, whose reward is the baseline of the prompt's other samples (ReMax).

Owns: where it is kept beside a group, and what a group without a valid baseline comes to. Refuses to know: how it is generated,
advantages. Always holds: it is trained on by nobody and is in no mean of the samples'; a group whose baseline is invalid has no
valid reward, with that reason.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from meshloom.loop.token_columns import episode_fields, prompt_length, version_range
from meshloom.samples import Samples

KIND = "greedy"
"""Of its records."""
NO_BASELINE = "no_baseline"
"""Why samples are invalid whose greedy sample is."""


@dataclass(frozen=True, kw_only=True)
class GreedySample:
    """A greedy sample.

    Args:
        response: its text.
        ids: its tokens.
        finish: how it ended.
        reward: none if it is invalid.
        invalid: why.
        parts: further numbers of its reward.
        printed: by the reward function.
        versions: oldest and newest of the weights that sampled it.
        episode: what its record has besides, where it is an episode: its prompt and its messages among it.
    """

    response: str
    ids: tuple[int, ...]
    finish: str
    reward: float | None
    invalid: str | None
    parts: Mapping[str, float]
    versions: tuple[int, int]
    printed: str = ""
    episode: Mapping[str, Any] = field(default_factory=dict)


def greedy_episode(samples: Samples) -> GreedySample:
    """An episode that was played greedily, in its last sample where its history was rewritten."""
    last = len(samples) - 1
    ids, mask, versions = (samples.column(name)[last] for name in ("ids", "mask", "version"))
    own, meta = prompt_length(mask), samples.meta
    shown = {"prompt": meta["shown"][last], "prompt_ids": ids[:own].tolist()}
    return GreedySample(
        response=meta["response"][last],
        ids=tuple(ids[own:].tolist()),
        finish=meta["finish"][last],
        reward=float(samples["reward"][last]) if bool(samples["valid"][last]) else None,
        invalid=meta["invalid"][last],
        parts=meta["parts"][last],
        printed=meta["printed"][0],
        versions=version_range(versions, mask),
        episode={**shown, **episode_fields(samples, last, own)},
    )


def with_baseline(group: Samples, greedy: GreedySample) -> Samples:
    """A group with the reward of its greedy sample as ``greedy_reward``; the sample itself stands at the first of the group."""
    count = len(group)
    meta = {**group.meta, KIND: [asdict(greedy), *[None] * (count - 1)]}
    valid = group["valid"]
    if greedy.reward is None:
        reason = f"{NO_BASELINE}: {greedy.invalid}"
        meta["invalid"] = [reason if own is None else own for own in group.meta["invalid"]]
        valid = torch.zeros_like(valid)
    rewards = torch.full((count,), greedy.reward or 0.0, dtype=torch.float64)
    return Samples(group.lengths, group.tokens, {**group.rows, "valid": valid, "greedy_reward": rewards}, meta)


def greedy_record(samples: Samples, sample: int) -> dict[str, Any] | None:
    """What a record has of the greedy sample that stands at a sample, beside what it has of its prompt."""
    greedy = samples.meta[KIND][sample] if KIND in samples.meta else None
    if greedy is None:
        return None
    return {
        "kind": KIND,
        "response": greedy["response"],
        "response_ids": list(greedy["ids"]),
        "reward": greedy["reward"],
        "invalid": greedy["invalid"],
        "advantage": None,
        "finish": greedy["finish"],
        "versions": list(greedy["versions"]),
        "parts": greedy["parts"],
        **({"printed": greedy["printed"]} if greedy.get("printed") else {}),
        **greedy["episode"],
    }


def baseline_metrics(samples: Samples) -> dict[str, float]:
    """The mean reward of greedy samples, how many are invalid, and their tokens; nothing where there are none."""
    found = _baselines(samples)
    rewards = [greedy["reward"] for greedy in found if greedy["reward"] is not None]
    if not found:
        return {}
    mean = {"greedy_reward_mean": sum(rewards) / len(rewards)} if rewards else {}
    return {
        **mean,
        "greedy_invalid": float(len(found) - len(rewards)),
        "greedy_tokens": greedy_tokens(samples),
    }


def greedy_tokens(samples: Samples) -> float:
    """Tokens of the model in the greedy samples beside a batch: generated with it, and trained on by nobody."""
    of_episodes = [greedy["episode"].get("own", [(0, len(greedy["ids"]))]) for greedy in _baselines(samples)]
    return float(sum(stop - start for own in of_episodes for start, stop in own))


def _baselines(samples: Samples) -> list[Mapping[str, Any]]:
    return [greedy for greedy in samples.meta.get(KIND, []) if greedy is not None]
