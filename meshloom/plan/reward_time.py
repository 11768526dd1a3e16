"""Seconds in which reward models score samples.

Owns: the passes over the samples, and whether they are made while others are generated. Refuses to know: rewards of functions
and judges, which are no work of the run's devices. Always holds: passes cost what the cost model says of others without
gradients; a model whose parameters cannot be counted is said to be left out.

A copy of each model is on every device of the role, and they share the samples. Batches are padded, so that attention is
computed over whole squares.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshloom.config.reward_settings import RewardModelSettings, reward_models
from meshloom.config.settings import TrainSettings
from meshloom.plan.arithmetic import Work
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.generated import in_rounds, prompts_at_once, samples_each
from meshloom.plan.layout import Layout, share_devices
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.memory import compute_bytes
from meshloom.plan.parameters import DecoderNumbers, UnknownFamily, count_parameters
from meshloom.plan.placement import Role
from meshloom.plan.residency import ModelRole, Phase
from meshloom.plan.reward_memory import reward_folder
from meshloom.plan.seconds import PhaseTime, Seconds
from meshloom.plan.sharded_memory import FLOAT32
from meshloom.plan.shards import Cut
from meshloom.plan.training_time import forward_time


def scored_work(samples: int, tokens: float) -> Work:
    """What a pass of a reward model computes.

    Args:
        samples: that are scored.
        tokens: of each, prompt and response.
    """
    every = round(samples * tokens)
    return Work(tokens=every, predictions=samples, pairs=round(samples * tokens**2), packed=every)


def score_time(
    settings: TrainSettings,
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    *,
    prompt_tokens: float,
    response_tokens: float,
) -> PhaseTime | None:
    """Scoring of a step's samples by the reward's models; none where it has none, or samples come with their rewards.

    Args:
        settings: of the run.
        layout: where its roles are.
        cluster: what the devices are.
        constants: of the cost model.
        prompt_tokens: of a sample, on average.
        response_tokens: likewise.
    """
    if layout.role(Role.REWARD) is None or settings.rollout.from_samples is not None:
        return None
    samples, tokens = prompts_at_once(settings) * samples_each(settings), prompt_tokens + response_tokens
    return in_rounds(pass_time(settings, layout, scored_work(samples, tokens), cluster, constants), settings)


def pass_time(settings: TrainSettings, layout: Layout, work: Work, cluster: Cluster, constants: Constants) -> PhaseTime:
    """Passes of all reward models over samples."""
    devices = len(layout.role(Role.REWARD).devices)
    parts: list[Seconds] = []
    for name, model in reward_models(settings.reward).items():
        if (numbers := _numbers(model)) is None:
            continue
        longest = -(-work.tokens // max(1, work.predictions))
        role = ModelRole(
            name=str(Role.REWARD),
            model=numbers,
            cut=Cut(replicate=devices),
            computes=(Phase.SCORE,),
            width=compute_bytes(model.dtype, settings.device),
            # Whole samples are in a batch, one that is longer by itself.
            tokens=max(1, model.tokens_per_batch // longest) * longest,
            recompute=False,
            compiled=False,
            chunk_bytes=0,
            logit_bytes=FLOAT32,
        )
        found = forward_time(role, work, cluster, constants, Phase.SCORE).parts
        parts += (replace(part, name=f"{part.name} of {name}") for part in found if part.name != "logits")
    return PhaseTime(phase=Phase.SCORE, role=str(Role.REWARD), parts=tuple(parts))


def scores_meanwhile(layout: Layout) -> bool:
    """Whether reward models score groups while others are generated: on devices that do not generate."""
    reward, rollout = layout.role(Role.REWARD), layout.role(Role.ROLLOUT)
    return reward is not None and rollout is not None and not share_devices(reward, rollout)


def score_assumptions(settings: TrainSettings, layout: Layout) -> Iterator[LedgerLine]:
    """What the seconds of reward models take for granted."""
    if layout.role(Role.REWARD) is None or not reward_models(settings.reward):
        return
    when = "once all samples of a rollout are there, as they share devices with the engine"
    if scores_meanwhile(layout):
        when = "while others are generated, as their devices do not generate: what is longer counts"
    formula = f"inputs of as many tokens as prompt and response; {when}; not measured"
    yield LedgerLine(section="assumptions", name="reward models", value="estimate", formula=formula, source=DERIVED)
    unknown = [name for name, model in reward_models(settings.reward).items() if _numbers(model) is None]
    if unknown:
        formula = f"{', '.join(unknown)}: parameters cannot be counted by config.json"
        yield LedgerLine(
            section="assumptions", name="not counted among them", value="0 s", formula=formula, source=DERIVED
        )


def _numbers(model: RewardModelSettings) -> DecoderNumbers | None:
    folder = reward_folder(model.path)
    if folder is None:
        return None
    try:
        return count_parameters(folder.config).with_scalar_head()
    except UnknownFamily:
        return None
