"""Validation: sample held-out prompts and count what is solved.

Owns: the numbers of a validation. Always holds: every prompt counts once, in a fixed order, with seeds of its own; a
sample without a valid reward is left out of the means and counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.config.settings import ValidationSettings
from meshloom.environments.protocol import FaultReason
from meshloom.loop.collect import Collector, sample_records
from meshloom.loop.component_watch import by_component, component_metrics
from meshloom.loop.stage import Draw
from meshloom.observe.statistics import pass_at_k, wilson_interval
from meshloom.observe.timing import PhaseClock
from meshloom.rewards.code.verdict import Verdict
from meshloom.samples import Samples, concat
from meshloom.samples.episodes import joined


@dataclass(frozen=True)
class Validation:
    """What a validation found."""

    metrics: dict[str, float]
    records: list[dict[str, Any]]

    @property
    def invalid(self) -> list[str | None]:
        """Why each sample's reward is invalid; none where it is a number. An episode of several samples counts once."""
        of = {(each["group"], each.get("episode", place)): each["invalid"] for place, each in enumerate(self.records)}
        return list(of.values())


@dataclass(frozen=True)
class Validator:
    """Samples all validation prompts.

    Args:
        collector: of the validation prompts, with its own sampling distribution.
        settings: threshold of success.
        deadline_s: for the whole validation.
        components: names of the reward's components.
        solving: the one that says what is solved; none: the whole reward.
    """

    collector: Collector
    settings: ValidationSettings
    deadline_s: float
    components: Sequence[str] = ()
    solving: str | None = None

    def run(self, step: int, clock: PhaseClock) -> Validation:
        """Validate the engine's present weights; ``step`` names the records."""
        prompts = self.collector.prompts
        draws = [Draw(number=i, prompt=i) for i in range(len(prompts))]
        collected = self.collector.collect(draws, deadline_s=self.deadline_s, clock=clock)
        metrics = {"prompts_dropped": float(len(collected.dropped))}
        if not collected.groups:
            return Validation(metrics, [])
        samples = concat(collected.groups)
        metrics |= validation_metrics(samples, threshold=self.settings.success_threshold, component=self.solving)
        metrics |= component_metrics(samples, self.components) | self.collector.scorer.take_counts()
        metrics |= self.collector.engine.take_prompts().metrics()
        return Validation(metrics, sample_records(samples, prompts, step=step, kind="validation"))


def validation_metrics(samples: Samples, *, threshold: float, component: str | None = None) -> dict[str, float]:
    """Accuracy with its 95 % Wilson interval, mean@k and pass@k for more than one sample a prompt, reward, length.

    The interval counts prompts, not samples: samples of one prompt are not independent. An episode of several samples counts
    once, but for lengths. With a component, it decides what is solved.
    """
    lengths, samples = length_metrics(samples), joined(samples)
    mean = {"reward_mean": float(samples["reward"][samples["valid"]].mean())} if bool(samples["valid"].any()) else {}
    invalid = float((~samples["valid"]).sum())
    samples = by_component(samples, component)
    valid = samples["valid"]
    metrics = {"reward_invalid": invalid, **lengths, **mean, **verdict_counts(samples)}
    if not bool(valid.any()):
        return metrics
    solved = (samples["reward"] >= threshold) & valid
    groups = samples["group"]
    counts = [(int(valid[groups == g].sum()), int(solved[groups == g].sum())) for g in groups.unique().tolist()]
    counts = [(n, c) for n, c in counts if n]
    shares = sum(c / n for n, c in counts)
    accuracy = shares / len(counts)
    low, high = wilson_interval(min(shares, len(counts)), len(counts))
    metrics |= {
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
    }
    k = min(n for n, _ in counts)
    if k > 1:
        metrics |= {
            "mean_at_k": accuracy,
            "pass_at_k": sum(pass_at_k(n, c, k) for n, c in counts) / len(counts),
            "k": k,
        }
    return metrics


def verdict_counts(batch: Samples) -> dict[str, float]:
    """How many programs came to each verdict there was; nothing where no programs are run."""
    lines = (line for remark in batch.meta.get("remark", ()) for line in remark.splitlines())
    told = Counter(line.partition(":")[0] for line in lines)
    return {f"code/{verdict}": float(told[verdict]) for verdict in Verdict if told[verdict]}


def length_metrics(samples: Samples) -> dict[str, float]:
    """Lengths of responses and prompts, and the share that was cut at the longest length."""
    masks = samples.column("mask")
    response = torch.stack([mask.sum() for mask in masks]).double()
    prompt = torch.stack([_before(mask) for mask in masks]).double()
    finish = samples.meta["finish"]
    return {
        "response_tokens_mean": float(response.mean()),
        "response_tokens_max": float(response.max()),
        "prompt_tokens_mean": float(prompt.mean()),
        "truncated_share": sum(f == "length" for f in finish) / len(finish),
        **episode_metrics(samples, samples.lengths.double() - response - prompt),
    }


def _before(mask: torch.Tensor) -> torch.Tensor:
    """Tokens before the model's first one."""
    return mask.long().argmax() if bool(mask.any()) else torch.tensor(len(mask))


def episode_metrics(samples: Samples, shown: torch.Tensor) -> dict[str, float]:
    """Turns and calls of tools, where samples are episodes.

    Args:
        samples: of a step or a validation.
        shown: tokens of the template and the environment between each sample's turns.
    """
    if "turns" not in samples.rows:
        return {}
    whole = joined(samples)
    calls, errors = (float(whole[name].sum()) for name in ("tool_calls", "tool_errors"))
    reasons = {reason.value for reason in FaultReason}
    failed = sum(text is not None and text.partition(":")[0] in reasons for text in whole.meta["invalid"])
    metrics = {
        "episodes": float(len(whole)),
        "turns_mean": float(whole["turns"].double().mean()),
        "environment_tokens_mean": float(shown.mean()),
        "environment_invalid": float(failed),
    }
    if calls:
        metrics |= {"tool_calls_mean": calls / len(whole), "tool_error_share": errors / calls}
    return metrics
