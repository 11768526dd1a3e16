"""Names of algorithms and verifiers that settings may use.

Owns: the accepted names, so that a misspelt one is refused without torch. Refuses to know: what stands behind a name.
Always holds: ``meshloom.algorithms`` and ``meshloom.rewards.verifiers`` have exactly these; tests compare them.
"""

from enum import StrEnum


class RewardForm(StrEnum):
    """How a reward function of the user's own is called."""

    REQUEST = "request"
    """With one sample: a ``meshloom.rewards.RewardRequest``."""
    VERL = "verl"
    """With one sample: ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info``."""
    VERL_BATCH = "verl_batch"
    """With the lists of a group: ``data_sources``, ``solution_strs``, ``ground_truths``, ``extra_infos``."""
    TRL = "trl"
    """With the lists of a group: ``prompts``, ``completions``, ``completion_ids``, and columns of the rows."""


class Recipe(StrEnum):
    """Named algorithms; what each chooses is in ``config.recipes``."""

    PPO = "ppo"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    GMPO = "gmpo"
    DPPO = "dppo"


class Advantage(StrEnum):
    """Advantage estimators."""

    GRPO = "grpo"
    RLOO = "rloo"
    OPO = "opo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    GPG = "gpg"
    GRPO_PASSK = "grpo_passk"
    REMAX = "remax"
    GAE = "gae"


class PolicyLoss(StrEnum):
    """Policy losses."""

    PPO = "ppo"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    GPG = "gpg"
    GMPO = "gmpo"
    DPPO_TV = "dppo_tv"
    DPPO_KL = "dppo_kl"


class KlEstimator(StrEnum):
    """Estimators of the divergence; ``+`` keeps the value and takes the gradient of k2."""

    K1 = "k1"
    ABS = "abs"
    K2 = "k2"
    K3 = "k3"
    K1_PLUS = "k1+"
    ABS_PLUS = "abs+"
    K2_PLUS = "k2+"
    K3_PLUS = "k3+"


class Verifier(StrEnum):
    """Named verifiers, and named shapes of a response."""

    EXACT_MATCH = "exact_match"
    REGEX = "regex"
    MATH_VERIFY = "math_verify"
    REASONING_GYM = "reasoning_gym"
    TAG_FORMAT = "tag_format"
    REGEX_FORMAT = "regex_format"
    LENGTH_PENALTY = "length_penalty"
    REPETITION_PENALTY = "repetition_penalty"
    CODE = "code"


GREEDY_ADVANTAGES = frozenset({Advantage.REMAX})
"""Estimators that need the reward of a greedy sample of each prompt."""

VALUE_ADVANTAGES = frozenset({Advantage.GAE})
"""Estimators that ask a critic for values."""

GROUP_ADVANTAGES = frozenset(
    {
        Advantage.GRPO,
        Advantage.RLOO,
        Advantage.OPO,
        Advantage.REINFORCE_PLUS_PLUS_BASELINE,
        Advantage.GPG,
        Advantage.GRPO_PASSK,
    }
)
"""Estimators that compare a sample with the others of its prompt."""

FIXED_REDUCTIONS: dict[str, str] = {
    PolicyLoss.GSPO: "seq-mean-token-mean",
    PolicyLoss.SAPO: "seq-mean-token-mean",
    PolicyLoss.GMPO: "seq-mean-token-mean",
}
"""Policy losses that are defined with one reduction, whatever ``algorithm.reduction`` says: it is then that of the terms of
divergence and entropy, and of the critic."""
