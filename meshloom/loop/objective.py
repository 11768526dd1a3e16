"""The loss of an update, put together from an algorithm's choices.

Owns: which terms a loss has, and what is measured about them. Refuses to know: models, devices, steps. Always holds:
denominators are those of the whole update; when a step has one update on samples of the current weights, the proximal
policy is the trainer's own and no second pass is made.

Legend: T tokens of a microbatch, S samples.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshloom.algorithms.advantages import ADVANTAGES, AdvantageInputs
from meshloom.algorithms.correction import SamplerGap, sampler_gap
from meshloom.algorithms.kl import KL_ESTIMATORS
from meshloom.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs, PolicySettings
from meshloom.algorithms.reduce import Denominators, denominators, entropy_term, kl_term, reduce
from meshloom.algorithms.segments import sample_counts, sample_sums
from meshloom.algorithms.shaping import place_turn_rewards, subtract_kl
from meshloom.config.errors import RunFault
from meshloom.config.settings import AlgorithmSettings, KlPlace
from meshloom.loop.correction import weighed
from meshloom.samples import Samples
from meshloom.samples.episodes import joined
from meshloom.train.model import LossParts


def reward_divergence(samples: Samples, settings: AlgorithmSettings) -> Tensor | None:
    """Divergence of each token from the reference [T], where it is in the reward; needs ``old_logprob`` and
    ``reference_logprob``."""
    if settings.kl is not KlPlace.REWARD:
        return None
    estimator = KL_ESTIMATORS.find(settings.kl_estimator)
    return estimator(samples["old_logprob"], samples["reference_logprob"], samples["mask"])


def mean_divergence(kl_T: Tensor, samples: Samples) -> tuple[float, int]:
    """Mean over valid samples of the mean over their tokens, and how many samples that are."""
    kl_S = sample_sums(torch.where(samples["mask"], kl_T, 0.0), samples.lengths)
    mean_S = kl_S / sample_counts(samples["mask"], samples.lengths).clamp(min=1)
    valid_S = samples["valid"]
    return (float(mean_S[valid_S].mean()) if bool(valid_S.any()) else 0.0), int(valid_S.sum())


def with_advantages(
    samples: Samples, settings: AlgorithmSettings, kl_T: Tensor | None = None, kl_coefficient: float = 0.0
) -> Samples:
    """The batch with ``advantages`` for each token and ``advantage`` (their mean) for each sample.

    Reads ``reward``, ``valid``, ``group`` and, where there are such, ``greedy_reward``, ``turn_reward`` and a critic's
    ``values``, with which come ``returns``. An episode of several samples is judged as one.

    Args:
        samples: of the step.
        settings: the algorithm's choices.
        kl_T: divergence that is taken from the rewards, if any.
        kl_coefficient: its weight.
    """
    own, samples = samples, joined(samples)
    mask_T, lengths_S = samples["mask"], samples.lengths
    turns_T = samples.tokens.get("turn_reward", torch.zeros(len(mask_T), dtype=torch.float64))
    rewards_T = place_turn_rewards(samples["reward"], turns_T, mask_T, lengths_S)
    if kl_T is not None:
        rewards_T = subtract_kl(rewards_T, kl_T, mask_T, kl_coefficient)
    inputs = AdvantageInputs(
        token_rewards_T=rewards_T,
        mask_T=mask_T,
        lengths_S=lengths_S,
        group_S=samples["group"],
        valid_S=samples["valid"],
        greedy_reward_S=samples.rows.get("greedy_reward"),
        values_T=samples.tokens.get("values"),
        gamma=settings.gamma,
        lam=settings.lam,
        normalize_by_std=settings.normalize_by_std,
    )
    found = ADVANTAGES.find(settings.advantage)(inputs)
    sums_S = sample_sums(torch.where(mask_T, found.advantages_T, 0.0), own.lengths)
    mean_S = sums_S / sample_counts(mask_T, own.lengths).clamp(min=1)
    own = own.with_tokens(advantages=found.advantages_T).with_rows(advantage=mean_S)
    if inputs.values_T is None or found.returns_T is None:
        return own
    return own.with_tokens(returns=found.returns_T)


@dataclass(frozen=True)
class PolicyObjective:
    """A policy loss with its divergence and entropy terms; made once for each update.

    Args:
        settings: the algorithm's choices.
        totals: denominators of the update.
        version: of the weights before the step.
    """

    settings: AlgorithmSettings
    totals: Denominators
    version: int

    @classmethod
    def of(cls, update: Samples, settings: AlgorithmSettings, version: int) -> "PolicyObjective":
        totals = denominators(update["mask"], update.lengths, constant=settings.reduction_constant)
        return cls(settings, totals, version)

    def read(self, update: Samples) -> Samples:
        """The update with what the actor and this loss read of it, and no other column of tokens."""
        names = ["ids", "mask", "sampled", "sampler_logprob", "version", "reference_logprob", "advantages"]
        names += [] if self.settings.proximal == "sampler" else ["old_logprob"]
        return replace(update, tokens={name: update.tokens[name] for name in names if name in update.tokens}, meta={})

    def __call__(self, microbatch: Samples, logprob_T: Tensor, entropy_T: Tensor) -> LossParts:
        """This microbatch's share of the loss, and what the step's metrics need."""
        settings, totals = self.settings, self.totals
        mask_T, lengths_S = microbatch["mask"], microbatch.lengths
        old_T = microbatch.tokens.get("old_logprob", logprob_T.detach())
        if settings.proximal == "sampler":
            old_T = microbatch["sampler_logprob"]
        # Where the sampler is the proximal policy, the trainer's own are those of the step's first update.
        trainer_T = logprob_T.detach() if settings.proximal == "sampler" else old_T.detach()
        sampled_T = microbatch.tokens.get("sampled", mask_T)
        weighing = weighed(trainer_T, microbatch, sampled_T, settings.correction)
        loss = POLICY_LOSSES.find(settings.policy_loss)
        inputs = PolicyInputs(
            logprob_T=logprob_T,
            old_logprob_T=old_T,
            advantages_T=microbatch["advantages"].to(logprob_T.dtype),
            mask_T=mask_T,
            lengths_S=lengths_S,
            correction_weights_T=None if weighing is None else weighing[0].to(logprob_T.dtype),
        )
        bounds = PolicySettings(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            tau_positive=settings.tau_positive,
            tau_negative=settings.tau_negative,
        )
        outputs = loss(inputs, bounds)
        mode = settings.reduction
        policy = reduce(outputs.per_token_T, mask_T, lengths_S, loss.reduction or mode, totals)
        total = policy
        stats = {
            "policy_loss": policy.detach(),
            "policy": outputs.stats,
            "entropy": (entropy_T.detach() * mask_T).sum(),
            "gap": sampler_gap(trainer_T, microbatch["sampler_logprob"], sampled_T),
            "fresh_gap": self._fresh_gap(trainer_T, microbatch, sampled_T),
        }
        if weighing is not None:
            stats["weights"] = weighing[1]
        if "reference_logprob" in microbatch.tokens:
            kl_T = KL_ESTIMATORS.find(settings.kl_estimator)(logprob_T, microbatch["reference_logprob"], mask_T)
            stats["kl"] = kl_T.detach().sum()
            if settings.kl is KlPlace.LOSS:
                coefficient = settings.kl_coefficient
                total = total + kl_term(kl_T, mask_T, lengths_S, mode, totals, coefficient=coefficient)
        if settings.entropy_coefficient:
            coefficient = settings.entropy_coefficient
            total = total + entropy_term(entropy_T, mask_T, lengths_S, mode, totals, coefficient=coefficient)
        return LossParts(total, stats)

    def _fresh_gap(self, trainer_T: Tensor, microbatch: Samples, sampled_T: Tensor) -> SamplerGap:
        """The gap of tokens that were sampled with the weights before the step: without the part that is their age."""
        fresh_T = sampled_T & (microbatch["version"] == self.version)
        return sampler_gap(trainer_T, microbatch["sampler_logprob"], fresh_T)


def check_sampler_gap(report: dict[str, Any], bound: float | None) -> None:
    """Stop before the first optimizer step of a batch whose sampler and trainer disagree.

    Args:
        report: of the first update.
        bound: on the mean distance of their log-probs; none: any will do.

    Raises:
        RunFault: if it is larger.
    """
    gap = report["fresh_gap"].summary().get("mean_abs", 0.0)
    if bound is not None and gap > bound:
        raise RunFault(
            f"sampler and trainer disagree: mean |Δ log-prob| is {gap:.3g}",
            where="algorithm.max_sampler_gap",
            why=f"more than {bound:g}; the actor was not changed by this step",
            fix="use the same dtype and temperature for both, top_p 1, top_k 0 and min_p 0, or raise the bound",
        )


def update_metrics(updates: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics of a step from what its updates reported: means over tokens; losses are means over updates.

    The sampler's gap is that of the first update, before any weight changed.
    """
    policy, gap = sum((u["policy"] for u in updates[1:]), updates[0]["policy"]).summary(), updates[0]["gap"].summary()
    tokens = max(sum(float(u["policy"].num_tokens) for u in updates), 1.0)
    metrics = {
        "loss": sum(float(u["loss"]) for u in updates) / len(updates),
        "policy_loss": sum(float(u["policy_loss"]) for u in updates) / len(updates),
        "entropy": sum(float(u["entropy"]) for u in updates) / tokens,
        "ratio_mean": policy["ratio_mean"],
        "ratio_max": policy["ratio_max"],
        "clip_share": policy["clipped_share"],
        "sampler_gap": gap["mean_abs"],
        "sampler_gap_k3": gap["k3"],
        "effective_sample_share": gap["effective_share"],
    }
    if "weights" in updates[0]:
        metrics |= sum((u["weights"] for u in updates[1:]), updates[0]["weights"]).summary()
    if "kl" in updates[0]:
        metrics["kl_reference"] = sum(float(u["kl"]) for u in updates) / tokens
    return metrics
