"""The names of metrics and phases: one name for one thing in tables, charts, logs and docs.

Owns: each canonical metric's label, unit, better direction and one-line meaning, and the phases of a step. Refuses to
know: how a metric is computed. Always holds: what is not listed here may still be logged and is shown under "other".
"""
# ruff: noqa: E501 -- the table of metrics reads best with one metric a line

from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """What a number counts; decides how it is written for people."""

    NONE = ""
    COUNT = "count"
    SHARE = "share"
    """0 to 1, written in percent."""
    TOKENS = "tokens"
    NATS = "nats"
    RATE = "rate"
    """Very small numbers, in scientific notation."""
    TOKENS_PER_SECOND = "tokens/s"
    BYTES = "bytes"
    SECONDS = "seconds"


class Better(StrEnum):
    """The direction in which a metric improves, where there is one."""

    UP = "up"
    DOWN = "down"
    NEITHER = ""


class Section(StrEnum):
    """Which part of the report a metric belongs to."""

    LEARNING = "learning"
    BEHAVIOUR = "behaviour"
    OPTIMIZATION = "optimization"
    SPEED = "speed"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A canonical metric.

    Args:
        name: its key in records.
        label: short text for people.
        unit: what it counts.
        better: the direction that is better.
        section: its part of the report.
        meaning: one sentence.
    """

    name: str
    label: str
    unit: Unit
    better: Better
    section: Section
    meaning: str


def _metric(name: str, label: str, unit: Unit, better: Better, section: Section, meaning: str) -> Metric:
    return Metric(name=name, label=label, unit=unit, better=better, section=section, meaning=meaning)


U, B, S = Unit, Better, Section

_ALL = (
    _metric("reward_mean", "Reward", U.NONE, B.UP, S.LEARNING, "Mean reward of the samples that have a valid one."),
    _metric("reward_std", "Reward spread", U.NONE, B.NEITHER, S.LEARNING, "Standard deviation of the valid rewards."),
    _metric("solved_share", "Solved", U.SHARE, B.UP, S.LEARNING, "Share of samples whose reward reaches the threshold of success."),
    _metric("accuracy", "Accuracy", U.SHARE, B.UP, S.LEARNING, "Share of held-out problems solved; the band is the 95 % Wilson interval."),
    _metric("accuracy_low", "Accuracy, low", U.SHARE, B.UP, S.LEARNING, "Lower end of the accuracy's 95 % Wilson interval."),
    _metric("accuracy_high", "Accuracy, high", U.SHARE, B.UP, S.LEARNING, "Upper end of the accuracy's 95 % Wilson interval."),
    _metric("mean_at_k", "mean@k", U.SHARE, B.UP, S.LEARNING, "Share of samples solved, over k samples of each held-out problem."),
    _metric("pass_at_k", "pass@k", U.SHARE, B.UP, S.LEARNING, "Share of held-out problems that one of k samples solves (unbiased estimator)."),
    _metric("loss", "Loss", U.NONE, B.DOWN, S.OPTIMIZATION, "The number that is minimised, all its terms together; on held-out rows the mean over all their response tokens."),
    _metric("perplexity", "Perplexity", U.NONE, B.DOWN, S.LEARNING, "exp of the loss on held-out rows."),
    _metric("reward_invalid", "Invalid rewards", U.COUNT, B.DOWN, S.LEARNING, "Samples whose reward function failed, timed out or gave no number; they are not trained on."),
    _metric("samples", "Samples", U.COUNT, B.NEITHER, S.LEARNING, "Samples of the step, invalid ones among them."),
    _metric("groups_without_spread", "Groups without spread", U.COUNT, B.DOWN, S.LEARNING, "Groups whose samples all got the same reward and so teach nothing."),
    _metric("greedy_reward_mean", "Greedy reward", U.NONE, B.UP, S.LEARNING, "Mean reward of the greedy samples that are the baseline of their prompts' others."),
    _metric("greedy_invalid", "Invalid baselines", U.COUNT, B.DOWN, S.LEARNING, "Groups whose greedy sample has no valid reward; they are not trained on."),
    _metric("greedy_tokens", "Greedy tokens", U.TOKENS, B.NEITHER, S.SPEED, "Response tokens of the step's greedy samples: generated beside the others, and not trained on."),
    _metric("rollout_rounds", "Rounds", U.COUNT, B.DOWN, S.LEARNING, "Rounds of generation that dynamic sampling took for the step."),
    _metric("groups_filtered", "Groups replaced", U.COUNT, B.DOWN, S.LEARNING, "Groups without spread that dynamic sampling replaced by new ones."),
    _metric("groups_missing", "Groups missing", U.COUNT, B.DOWN, S.LEARNING, "Groups that the step had too few, as dynamic sampling had used up its rounds."),
    _metric("groups_surplus", "Groups waiting", U.COUNT, B.NEITHER, S.LEARNING, "Groups with spread beyond what the step needed, which wait for the next one."),
    _metric("response_tokens_mean", "Response length", U.TOKENS, B.NEITHER, S.BEHAVIOUR, "Mean length of the responses."),
    _metric("response_tokens_max", "Longest response", U.TOKENS, B.NEITHER, S.BEHAVIOUR, "Length of the longest response."),
    _metric("truncated_share", "Truncated", U.SHARE, B.DOWN, S.BEHAVIOUR, "Share of responses cut off at the longest allowed length."),
    _metric("prompt_tokens_mean", "Prompt length", U.TOKENS, B.NEITHER, S.BEHAVIOUR, "Mean length of the prompts."),
    _metric("prompt_tokens_computed", "Prompt tokens, computed", U.TOKENS, B.NEITHER, S.SPEED, "Tokens of prompts that the engine computed; in an episode each turn's prompt is the conversation so far."),
    _metric("prompt_tokens_reused", "Prompt tokens, reused", U.TOKENS, B.UP, S.SPEED, "Tokens of prompts whose keys and values the engine still had, of an earlier turn or another prompt."),
    _metric("episodes", "Episodes", U.COUNT, B.NEITHER, S.BEHAVIOUR, "Episodes with an environment; one may be several samples where a template rewrites history."),
    _metric("turns_mean", "Turns", U.NONE, B.NEITHER, S.BEHAVIOUR, "Mean turns of the model in an episode."),
    _metric("environment_tokens_mean", "Environment's tokens", U.TOKENS, B.NEITHER, S.BEHAVIOUR, "Mean tokens that template, tools and environment put between the turns of a sample; they are not trained on."),
    _metric("environment_invalid", "Failed environments", U.COUNT, B.DOWN, S.BEHAVIOUR, "Episodes whose environment failed, was late or gave no reward, or whose history the template rewrote; they are not trained on."),
    _metric("tool_calls_mean", "Tool calls", U.NONE, B.NEITHER, S.BEHAVIOUR, "Mean calls of tools in an episode."),
    _metric("tool_error_share", "Tool errors", U.SHARE, B.DOWN, S.BEHAVIOUR, "Share of the calls that were answered with an error: malformed, unknown, refused arguments, raised, or late."),
    _metric("entropy", "Entropy", U.NATS, B.NEITHER, S.BEHAVIOUR, "Mean entropy of the sampling distribution; near 0 the model no longer explores."),
    _metric("kl_reference", "KL to reference", U.NATS, B.NEITHER, S.BEHAVIOUR, "How far the policy has moved from the reference, in nats a token."),
    _metric("sampler_gap", "Sampler–trainer gap", U.NATS, B.DOWN, S.BEHAVIOUR, "Mean |Δ log-prob| of a token between the engine that sampled it and the trainer; near 0 when both agree."),
    _metric("sampler_gap_k3", "Sampler–trainer gap, k3", U.NATS, B.DOWN, S.BEHAVIOUR, "The same gap as a divergence (k3 estimator)."),
    _metric("effective_sample_share", "Effective samples", U.SHARE, B.UP, S.BEHAVIOUR, "Effective sample size of the sampler–trainer importance weights, as a share of the tokens."),
    _metric("rejected_share", "Rejected", U.SHARE, B.DOWN, S.BEHAVIOUR, "Share of tokens that the correction left out of the step, as sampler and trainer disagree on them."),
    _metric("correction_weight", "Correction weight", U.NONE, B.NEITHER, S.BEHAVIOUR, "Mean importance weight between sampler and trainer that the losses were multiplied with."),
    _metric("correction_bounded_share", "Bounded weights", U.SHARE, B.DOWN, S.BEHAVIOUR, "Share of tokens whose importance weight was cut off or set to 0."),
    _metric("kl_reward", "KL in the reward", U.NATS, B.NEITHER, S.BEHAVIOUR, "Divergence from the reference that was taken from the rewards, in nats a token, mean over samples."),
    _metric("kl_coefficient", "KL weight", U.RATE, B.NEITHER, S.OPTIMIZATION, "Weight that the divergence had in the step's rewards."),
    _metric("policy_loss", "Policy loss", U.NONE, B.NEITHER, S.OPTIMIZATION, "The policy's term of the loss; its size says little, its finiteness much."),
    _metric("ratio_mean", "Ratio, mean", U.NONE, B.NEITHER, S.OPTIMIZATION, "Mean probability ratio between the policy and the one that sampled; 1 when they agree."),
    _metric("ratio_max", "Ratio, largest", U.NONE, B.NEITHER, S.OPTIMIZATION, "Largest probability ratio of a token."),
    _metric("clip_share", "Clipped", U.SHARE, B.NEITHER, S.OPTIMIZATION, "Share of tokens whose ratio was clipped and that give no gradient."),
    _metric("grad_norm", "Gradient norm", U.NONE, B.NEITHER, S.OPTIMIZATION, "Norm of the gradient before clipping, mean over the step's updates."),
    _metric("learning_rate", "Learning rate", U.RATE, B.NEITHER, S.OPTIMIZATION, "Learning rate of the step's last update."),
    _metric("explained_variance", "Explained variance", U.SHARE, B.UP, S.LEARNING, "Share of the returns' variance that the critic foretold; 0 for values that say no more than their mean, below 0 for worse."),
    _metric("value_mean", "Value, mean", U.NONE, B.NEITHER, S.BEHAVIOUR, "Mean of the critic's values before the model's tokens."),
    _metric("return_mean", "Return, mean", U.NONE, B.NEITHER, S.BEHAVIOUR, "Mean of what the critic should have said."),
    _metric("value_loss", "Value loss", U.NONE, B.DOWN, S.OPTIMIZATION, "The critic's loss, mean over the step's updates."),
    _metric("value_clip_share", "Values clipped", U.SHARE, B.NEITHER, S.OPTIMIZATION, "Share of tokens whose value moved further from the old one than the bound."),
    _metric("critic_grad_norm", "Critic's gradient norm", U.NONE, B.NEITHER, S.OPTIMIZATION, "Norm of the critic's gradient before clipping, mean over the step's updates."),
    _metric("critic_learning_rate", "Critic's learning rate", U.RATE, B.NEITHER, S.OPTIMIZATION, "Learning rate of the critic's last update of the step."),
    _metric("updates", "Updates", U.COUNT, B.NEITHER, S.OPTIMIZATION, "Optimizer updates made so far."),
    _metric("tokens_per_second", "Throughput, all tokens", U.TOKENS_PER_SECOND, B.UP, S.SPEED, "Prompt and response tokens of the step, with those of greedy baselines, divided by the step's seconds."),
    _metric("response_tokens_per_second", "Throughput, response tokens", U.TOKENS_PER_SECOND, B.UP, S.SPEED, "Response tokens of the step, with those of greedy baselines, divided by the step's seconds."),
    _metric("mfu", "Matrix utilization", U.SHARE, B.UP, S.SPEED, "Operations of the updates' forward and backward passes, attention left out, as a share of what the device could do in the seconds of the updates."),
    _metric("mfu_attention", "Utilization by attention", U.SHARE, B.NEITHER, S.SPEED, "What attention adds to the matrix utilization."),
    _metric("peak_memory_bytes", "Peak memory", U.BYTES, B.DOWN, S.SPEED, "Most memory held so far."),
    _metric("weights_version", "Weights version", U.COUNT, B.NEITHER, S.OPTIMIZATION, "Version of the weights after the step."),
    _metric("reference_version", "Reference version", U.COUNT, B.NEITHER, S.OPTIMIZATION, "Version of the weights that the reference took last; 0 before it is refreshed."),
    _metric("lag_versions", "Lag", U.COUNT, B.NEITHER, S.OPTIMIZATION, "Versions that the step's oldest token was behind the weights it began to train."),
    _metric("epoch", "Epoch", U.NONE, B.NEITHER, S.OPTIMIZATION, "Passes over the prompts so far."),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a step whose time is measured."""

    name: str
    label: str
    meaning: str


PHASES: dict[str, Phase] = {
    phase.name: phase
    for phase in (
        Phase(name="generate", label="Generate", meaning="sampling responses"),
        Phase(name="score", label="Score", meaning="waiting for rewards"),
        Phase(name="log_prob", label="Log-probs", meaning="under the trainer's weights"),
        Phase(name="reference", label="Reference", meaning="log-probs of the reference"),
        Phase(name="values", label="Values", meaning="what the critic expects"),
        Phase(name="critic", label="Critic", meaning="updates of the critic"),
        Phase(name="update", label="Update", meaning="forward, backward and optimizer"),
        Phase(name="sync", label="Weights", meaning="moving weights to the engine"),
        Phase(name="validate", label="Validate", meaning="evaluation on held-out problems"),
        Phase(name="save", label="Save", meaning="waiting for checkpoints"),
    )
}
"""The phases of a step by name, in the order they run."""

MEMORY_PHASES = ("generate", "log_prob", "reference", "values", "critic", "update")
"""Phases whose memory is recorded, and that a plan has a ledger of."""

_OF_PHASES = tuple(
    _metric(f"{name}/{phase.name}", f"{label}, {phase.label.lower()}", U.BYTES, B.DOWN, S.SPEED, meaning)
    for name, label, meaning in (
        ("peak_memory_bytes", "Peak memory", "Most bytes of tensors on the GPU at once in this phase of the step."),
        (
            "reserved_memory_bytes",
            "Reserved memory",
            "Most bytes that the allocator held of the GPU in this phase of the step.",
        ),
    )
    for phase in (PHASES[phase] for phase in MEMORY_PHASES)
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*_ALL, *_OF_PHASES)}
"""All canonical metrics by name, in the order they are shown."""
