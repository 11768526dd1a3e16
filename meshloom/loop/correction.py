"""What is done about the gap between sampler and trainer in an update.

Owns: which tokens a run leaves out and how it weighs the others, by its settings. Refuses to know: formulas
(``algorithms.correction``). Always holds: what is left out is known before the first microbatch, so that denominators count
what takes part; the gap is measured over all that was sampled, whatever is left out.

Legend: T tokens of a microbatch or of a batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.algorithms.correction import Level, banded_weights, kept_tokens, sampler_gap, truncated_weights
from meshloom.config.settings import CorrectionSettings
from meshloom.samples import Samples


def with_kept(batch: Samples, settings: CorrectionSettings) -> Samples:
    """The batch with ``kept``, the tokens that are not rejected, where the settings reject any; needs ``old_logprob``."""
    if settings.reject == "none" or settings.reject_threshold is None:
        return batch
    kept_T = kept_tokens(
        batch["old_logprob"],
        batch["sampler_logprob"],
        batch["mask"],
        batch.lengths,
        measure=settings.reject,
        level=Level(settings.reject_level),
        bound=settings.reject_threshold,
    )
    return batch.with_tokens(kept=kept_T)


def learned(samples: Samples) -> Samples:
    """The samples with those without a valid reward and tokens that are rejected out of the mask: they must not count in a
    denominator. ``sampled`` is then what the model sampled, for what is measured of it."""
    valid_T = torch.repeat_interleave(samples["valid"], samples.lengths)
    mask_T = samples["mask"] & valid_T
    if "kept" not in samples.tokens:
        return samples.with_tokens(mask=mask_T)
    return samples.with_tokens(mask=mask_T & samples["kept"], sampled=mask_T)


def rejection_metrics(batch: Samples) -> dict[str, float]:
    """Share of a step's tokens, of valid samples, that were rejected, and their gap, even where no update is left to measure
    it; nothing where none may be rejected."""
    if "kept" not in batch.tokens:
        return {}
    own_T = batch["mask"] & torch.repeat_interleave(batch["valid"], batch.lengths)
    if not bool(own_T.any()):
        return {"rejected_share": 0.0}
    gap = sampler_gap(batch["old_logprob"], batch["sampler_logprob"], own_T).summary()
    kept = float((batch["kept"] & own_T).sum() / own_T.sum())
    return {"rejected_share": 1.0 - kept, "sampler_gap": gap["mean_abs"], "sampler_gap_k3": gap["k3"]}


@dataclass(frozen=True, kw_only=True)
class WeightSums:
    """Sums over tokens, as tensors of one number; ``+`` merges microbatches.

    Args:
        num_tokens: tokens that were weighed.
        weight_sum: of their weights.
        num_changed: of these, tokens whose weight a bound changed.
    """

    num_tokens: Tensor
    weight_sum: Tensor
    num_changed: Tensor

    def __add__(self, other: "WeightSums") -> "WeightSums":
        return WeightSums(
            num_tokens=self.num_tokens + other.num_tokens,
            weight_sum=self.weight_sum + other.weight_sum,
            num_changed=self.num_changed + other.num_changed,
        )

    def summary(self) -> dict[str, float]:
        """Their mean, and the share that a bound changed; empty without tokens."""
        count = float(self.num_tokens)
        if not count:
            return {}
        return {
            "correction_weight": float(self.weight_sum) / count,
            "correction_bounded_share": float(self.num_changed) / count,
        }


def weighed(
    trainer_T: Tensor, microbatch: Samples, sampled_T: Tensor, settings: CorrectionSettings
) -> tuple[Tensor, WeightSums] | None:
    """Weights of the tokens [T] and what they come to, where the settings weigh any.

    Args:
        trainer_T: log-probs of the trainer before the step, without gradient.
        microbatch: whole samples.
        sampled_T: what the model sampled, rejected tokens among it: a sample's product is over all of its tokens.
        settings: how.
    """
    if settings.weights == "none":
        return None
    sampler_T, lengths_S, level = microbatch["sampler_logprob"], microbatch.lengths, Level(settings.level)
    bound = settings.threshold
    free_T = truncated_weights(trainer_T, sampler_T, sampled_T, lengths_S, level=level, cap=float("inf"))
    if settings.weights == "truncated":
        weights_T = truncated_weights(trainer_T, sampler_T, sampled_T, lengths_S, level=level, cap=bound)
    else:
        weights_T = banded_weights(
            trainer_T, sampler_T, sampled_T, lengths_S, level=level, low=settings.low, high=bound
        )
    mask_T = microbatch["mask"]
    sums = WeightSums(
        num_tokens=mask_T.sum(),
        weight_sum=torch.where(mask_T, weights_T, 0.0).sum(),
        num_changed=(mask_T & (weights_T != free_T)).sum(),
    )
    return weights_T, sums
