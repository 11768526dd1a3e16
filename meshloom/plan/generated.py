"""What is generated for a step: rounds of dynamic sampling, greedy baselines.

Owns: how many prompts and samples are generated, and the share of groups with spread that is assumed. Refuses to know:
how long anything takes. Always holds: what is counted follows the rules of ``loop.sieve`` and ``loop.collect``; groups beyond a
step's need are trained on in the next, so in the long run only groups without spread are generated for nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshloom.config.names import GREEDY_ADVANTAGES
from meshloom.config.settings import TrainSettings
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.seconds import PhaseTime

SPREAD_SHARE = 0.5
"""Share of groups whose rewards differ: an assumption, as it depends on the task and on how far it is learned."""


def is_greedy(settings: TrainSettings) -> bool:
    """Whether each prompt has a greedy sample beside its own."""
    return settings.algorithm.advantage in GREEDY_ADVANTAGES


def samples_each(settings: TrainSettings) -> int:
    """Samples that are generated of a prompt."""
    return settings.batch.samples_per_prompt + is_greedy(settings)


def prompts_at_once(settings: TrainSettings) -> int:
    """Prompts that are generated together: those of a step, or of a round."""
    given, step = settings.algorithm.filter_groups, settings.batch.prompts_per_step
    return (given.prompts_per_round or step) if given.enabled else step


def rounds_per_step(settings: TrainSettings, spread: float = SPREAD_SHARE) -> float:
    """Rounds of generation a step takes in the long run.

    Args:
        settings: of the run.
        spread: share of groups whose rewards differ.
    """
    given = settings.algorithm.filter_groups
    if not given.enabled:
        return 1.0
    needed = settings.batch.prompts_per_step / max(spread, 1e-9) / prompts_at_once(settings)
    return min(needed, float(given.max_rounds))


def in_rounds(phase: PhaseTime, settings: TrainSettings) -> PhaseTime:
    """A round of generation as the generation of a step."""
    rounds = rounds_per_step(settings)
    if rounds == 1:
        return phase
    parts = (
        replace(part, seconds=part.seconds * rounds, formula=f"{rounds:g} rounds × ({part.formula})")
        for part in phase.parts
    )
    return replace(phase, parts=tuple(parts))


def generation_lines(settings: TrainSettings) -> Iterator[LedgerLine]:
    """What is generated beyond a step's own samples, for the batch ledger; nothing where nothing is."""
    if settings.rollout.from_samples is not None:
        formula = "nothing is generated: samples are read from rollout.from_samples"
        yield _line("samples generated per step", 0, formula, "samples")
        return
    if is_greedy(settings):
        formula = "prompts that are generated: a greedy sample of each is their baseline, scored and not trained on"
        yield _line("greedy samples of a prompt", 1, formula, "samples")
        generated, longest = rounds_per_step(settings) * prompts_at_once(settings), settings.rollout.max_response_tokens
        formula = f"prompts generated per step × rollout.max_response_tokens ({longest}); prompts are the others' own"
        yield _line("most greedy tokens per step", round(generated * longest), formula, "tokens")
    if not settings.algorithm.filter_groups.enabled:
        return
    rounds, at_once = rounds_per_step(settings), prompts_at_once(settings)
    path = "algorithm.filter_groups"
    name = "prompts per round"
    source = settings.provenance.of(f"{path}.prompts_per_round")
    yield LedgerLine(section="batch", name=name, value=at_once, formula=path, source=source, unit="prompts")
    most = settings.algorithm.filter_groups.max_rounds
    formula = (
        f"prompts per step ÷ {SPREAD_SHARE:g} ÷ prompts per round, if that share of groups has spread; at most {most}"
    )
    yield _line("rounds per step", round(rounds, 3), formula, "rounds")
    formula = "rounds per step × prompts per round; groups beyond prompts per step are trained on in the next step"
    yield _line("prompts generated per step", round(rounds * at_once, 1), formula, "prompts")


def _line(name: str, value: float, formula: str, unit: str) -> LedgerLine:
    return LedgerLine(section="batch", name=name, value=value, formula=formula, source=DERIVED, unit=unit)
