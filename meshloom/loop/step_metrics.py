"""Numbers of a step that come from its batch.

Owns: reward, length and speed metrics, and the warnings about rewards without spread. Always holds: an invalid reward is in no
mean.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.algorithms.groups import Groups
from meshloom.algorithms.shaping import has_spread
from meshloom.config.names import GROUP_ADVANTAGES
from meshloom.config.settings import TrainSettings
from meshloom.loop.baseline import greedy_tokens
from meshloom.loop.component_watch import by_component
from meshloom.loop.model_verbs import Model
from meshloom.loop.stage import StepDone
from meshloom.loop.validate import length_metrics, verdict_counts
from meshloom.observe.timing import PhaseClock
from meshloom.samples import Samples
from meshloom.samples.episodes import joined

ADVISE_AT, REPEAT_EVERY = 5, 50
"""Steps in a row without any spread of rewards after which the user is told again."""


@dataclass
class SpreadWatch:
    """Tells the user about steps that teach nothing: no group has any spread of rewards, or, where the estimator compares no
    groups or each has one sample, the batch has none.

    It tells of the first such step, of the fifth in a row, with advice, and of each fiftieth.

    Args:
        settings: of the run.
        notice: called with a sentence for the user.
    """

    settings: TrainSettings
    notice: Callable[[str], None]
    told: bool = False
    in_a_row: int = 0

    def look(self, batch: Samples) -> None:
        """Look at the rewards of a step."""
        settings, valid = self.settings, batch["valid"]
        grouped = settings.algorithm.advantage in GROUP_ADVANTAGES and settings.batch.samples_per_prompt > 1
        group = batch["group"] if grouped else torch.zeros_like(batch["group"])
        baseline = batch.rows.get("greedy_reward", batch["reward"])
        single = Groups(group, valid).single_S & (batch["reward"] != 0)  # has no baseline: it teaches its reward
        teaches = has_spread(batch["reward"], group, valid).any() or (batch["reward"] != baseline)[valid].any()
        if not grouped and (turns := batch.tokens.get("turn_reward")) is not None:
            # What is to come differs from turn to turn, so tokens are told apart even if samples are not.
            teaches |= turns.any()
        if bool(teaches or (grouped and single.any())):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        mean = float(batch["reward"][valid].mean()) if bool(valid.any()) else float("nan")
        if self.in_a_row == ADVISE_AT or self.in_a_row % REPEAT_EVERY == 0:
            self.notice(self._advice("group" if grouped else "batch", mean))
        elif not self.told:
            what = "no group has" if grouped else "the samples do not have"
            self.notice(f"warning: {what} any spread of rewards (mean {mean:.3g}); this step teaches nothing")
        self.told = True

    def _advice(self, unit: str, mean: float) -> str:
        solved = mean >= self.settings.validation.success_threshold
        cause = "the task may be too easy or the reward too lenient" if solved else ""
        return (
            f"warning: no {unit} has had any spread of rewards for {self.in_a_row} steps (mean {mean:.3g}); they taught "
            f"nothing: look at samples.jsonl: {cause or 'the task may be too hard or the reward too strict'}"
        )


def batch_metrics(batch: Samples, *, threshold: float, component: str | None = None) -> dict[str, float]:
    """Rewards, lengths and groups of a step; a component that is named decides what is solved. An episode of several samples
    counts once, but in ``samples`` and in lengths."""
    sizes = {"samples": len(batch), **length_metrics(batch)}
    batch = joined(batch)
    valid, reward = batch["valid"], batch["reward"]
    groups = batch["group"].unique()
    with_spread = batch["group"][has_spread(reward, batch["group"], valid)].unique()
    metrics = {
        **sizes,
        **invalid_metrics(batch),
        "groups_without_spread": len(groups) - len(with_spread),
    }
    if bool(valid.any()):
        values = reward[valid]
        metrics |= {
            "reward_mean": float(values.mean()),
            "reward_std": float(values.std(unbiased=False)),
        }
    judged = by_component(batch, component)
    if bool(judged["valid"].any()):
        metrics["solved_share"] = float((judged["reward"][judged["valid"]] >= threshold).double().mean())
    return metrics | _part_means(batch) | verdict_counts(batch)


def invalid_metrics(batch: Samples) -> dict[str, float]:
    """How many rewards are invalid, and how many for each reason there was."""
    reasons = Counter(text.partition(":")[0] for text in batch.meta["invalid"] if text is not None)
    by_reason = {f"reward_invalid/{reason}": float(count) for reason, count in sorted(reasons.items())}
    return {"reward_invalid": float((~batch["valid"]).sum()), **by_reason}


def _part_means(batch: Samples) -> dict[str, float]:
    """Means of the further numbers a reward function returned."""
    values: dict[str, list[float]] = {}
    for parts, valid in zip(batch.meta["parts"], batch["valid"].tolist(), strict=True):
        for name, value in parts.items() if valid else ():
            values.setdefault(name, []).append(value)
    return {f"reward/{name}": sum(column) / len(column) for name, column in sorted(values.items())}


def progress_metrics(done: StepDone[Any, Any]) -> dict[str, float]:
    """Where a run is after a step, and which prompts and groups it went on without."""
    return {
        "updates": done.version,
        "weights_version": done.version,
        "epoch": done.epoch,
        "prompts_retried": done.retried,
        "prompts_dropped": done.dropped,
        "groups_stale": done.stale,
    }


def speed_metrics(batch: Samples, clock: PhaseClock, actor: Model) -> dict[str, float]:
    """Tokens over the seconds of the step so far: all of them, and those the model generated, greedy baselines' among both; and
    the share of the device's peak that the updates reached."""
    phases = clock.seconds()
    seconds, greedy = max(sum(phases.values()), 1e-9), greedy_tokens(batch)
    return {
        "tokens_per_second": (batch.num_tokens + greedy) / seconds,
        "response_tokens_per_second": (float(batch["mask"].sum()) + greedy) / seconds,
        **actor.take_utilization(phases.get("update", 0.0)),
    }
