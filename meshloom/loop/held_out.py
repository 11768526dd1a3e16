"""The loss of a supervised run on worked examples that nobody learns from.

Owns: that number. Refuses to know: when it is measured, where the model is. Always holds: it is the mean over all response
tokens of all examples, summed in float64 whatever passes computed them, so neither microbatches nor meshes change it but for
the rounding of a log-probability.
"""

import math
from collections.abc import Sequence

from meshloom.config.errors import RunFault
from meshloom.data.prompts import Supervised
from meshloom.loop.model_verbs import Model
from meshloom.loop.sft_data import as_samples

_AT_ONCE = 1024
"""Examples that a model is asked about in one call: as many log-probs wait on a device at most."""
_LARGEST = 700.0
"""Of a loss whose perplexity is a number."""


def held_out_metrics(model: Model, examples: Sequence[Supervised]) -> dict[str, float]:
    """What a model makes of examples, without gradients.

    Returns:
        ``loss``: mean −log π over all response tokens; ``perplexity``: exp of it; ``samples`` and ``response_tokens_mean``.

    Raises:
        RunFault: if the loss is not finite.
    """
    total, count = 0.0, 0
    for start in range(0, len(examples), _AT_ONCE):
        batch = as_samples(examples[start : start + _AT_ONCE])
        logprob_T, mask_T = model.forward(batch, temperature=1.0)[0], batch["mask"]
        total -= float(logprob_T[mask_T].double().sum())
        count += int(mask_T.sum())
    loss = total / count
    if not math.isfinite(loss):
        raise RunFault(
            f"the loss on held-out rows is {loss}",
            where="optimizer.lr",
            why="the model's weights are broken, or training has driven them so far that they overflow",
            fix="a smaller optimizer.lr, more optimizer.warmup_updates or a smaller optimizer.max_grad_norm, in a new run",
        )
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, _LARGEST)),
        "samples": float(len(examples)),
        "response_tokens_mean": count / len(examples),
    }
