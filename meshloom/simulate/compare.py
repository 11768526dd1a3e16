"""Variants of a run, simulated and shown side by side.

Owns: the order of the work, the table, the JSON. Refuses to know: how time passes. Always holds: the same command and seed give
the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshloom.config.problems import require_none
from meshloom.config.settings import TrainSettings
from meshloom.plan.auto import choose
from meshloom.plan.build import build_plan
from meshloom.plan.faults import overrides
from meshloom.plan.forecast import Lengths
from meshloom.plan.generated import SPREAD_SHARE, is_greedy, samples_each
from meshloom.simulate.costs import Costs
from meshloom.simulate.lengths import LengthSource, parse_distribution, read_recorded
from meshloom.simulate.outcome import Options, Outcome, simulate
from meshloom.simulate.variants import Variant, given_case, variants

_EVENTS, _MOST_STEPS, _LEAST_STEPS = 100_000, 100, 5


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is simulated.

    Args:
        steps: that are counted; none for a number that takes seconds.
        lengths: distribution of response tokens; none for the longest, always.
        lengths_from: a samples file, or the folder of its run, instead.
        prompt_tokens: of a prompt; none for the longest that is let in.
        reward_s: distribution of the seconds that scoring takes.
        lags: in steps.
        rollout_devices: numbers of devices that generation may have of its own; none for a choice.
        in_flight: whether weights move in the midst of samples.
        seed: of the lengths.
        spread: share of groups whose rewards differ, for dynamic sampling.
    """

    steps: int | None = None
    lengths: str | None = None
    lengths_from: Path | None = None
    prompt_tokens: int | None = None
    reward_s: str = "0"
    lags: tuple[int, ...] = (0, 1, 2)
    rollout_devices: tuple[int, ...] | None = None
    in_flight: bool = False
    seed: int = 0
    spread: float = SPREAD_SHARE


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found.

    Args:
        title: of the run.
        lengths: of samples, in words.
        steps: that were counted.
        seed: of the lengths.
        in_flight: whether weights move in the midst of samples.
        found: variants with what they came to; none for those that were not simulated.
    """

    title: str
    lengths: str
    steps: int
    seed: int
    in_flight: bool
    found: tuple[tuple[Variant, Outcome | None], ...]


def compare(settings: TrainSettings, question: Question) -> Comparison:
    """Simulate the variants of a run.

    Raises:
        UserError: if the plan refuses the run, or the question cannot be answered.
    """
    settings = _placed(settings)
    build_plan(settings, None).require()
    case = given_case(settings)
    settings = case.settings
    source = _source(settings, question)
    prompt, response, longest = source.means()
    mean = Lengths(prompt=prompt, response=response, longest=longest)
    samples = settings.batch.prompts_per_step * settings.batch.samples_per_prompt
    steps = question.steps or max(_LEAST_STEPS, min(_MOST_STEPS, _EVENTS // samples))
    # Not the processors of this machine: the same command gives the same numbers everywhere.
    workers = settings.reward.workers or samples
    options = Options(steps=steps, workers=workers, in_flight=question.in_flight)
    found: list[tuple[Variant, Outcome | None]] = []
    for variant in variants(case, question.lags, question.rollout_devices):
        costs = None if variant.refused else Costs.of(variant.look, mean)
        found.append((variant, None if costs is None else simulate(costs, source, options)))
    words = f"prompts of {prompt:,.0f}, responses of {response:,.0f} tokens, the longest {longest:,}"
    return Comparison(
        title=f"simulate {settings.run_dir}",
        lengths=f"{_words(question)}: {words}",
        steps=steps,
        seed=question.seed,
        in_flight=question.in_flight,
        found=tuple(found),
    )


def _placed(settings: TrainSettings) -> TrainSettings:
    """The settings that a search has chosen, where they ask for one.

    Raises:
        UserError: if it can choose nothing.
    """
    if not settings.placement.auto:
        return settings
    ranking = choose(settings)
    require_none(ranking.problems, f"simulate {settings.run_dir}")
    return ranking.chosen or settings


def _source(settings: TrainSettings, question: Question) -> LengthSource:
    longest = settings.rollout.max_response_tokens
    responses = (
        read_recorded(question.lengths_from)
        if question.lengths_from is not None
        else parse_distribution(question.lengths or f"fixed:{longest}", "--lengths")
    )
    return LengthSource(
        seed=question.seed,
        samples_per_prompt=samples_each(settings),
        is_greedy=is_greedy(settings),
        spread=question.spread,
        longest=longest,
        prompt=question.prompt_tokens or settings.data.max_prompt_tokens,
        responses=responses,
        reward_s=parse_distribution(question.reward_s, "--reward-s"),
    )


def _words(question: Question) -> str:
    if question.lengths_from is not None:
        return f"as in {question.lengths_from}"
    return question.lengths or "every sample the longest"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Plain values."""
    variants = []
    for variant, outcome in comparison.found:
        numbers: dict[str, Any] | None = None if outcome is None else asdict(outcome)
        if numbers is not None:
            numbers["lags"] = {str(lag): share for lag, share in numbers["lags"].items()}
        variants.append(
            {
                "name": variant.name,
                "overrides": list(overrides(variant.change)),
                "refused": variant.refused or None,
                "outcome": numbers,
            }
        )
    return {
        "title": comparison.title,
        "lengths": comparison.lengths,
        "steps": comparison.steps,
        "seed": comparison.seed,
        "weights": "in-flight" if comparison.in_flight else "between",
        "variants": variants,
    }


def show(comparison: Comparison, console: Console) -> None:
    """A table on a terminal."""
    how = "in the midst of samples" if comparison.in_flight else "between rollouts"
    head = f"{comparison.steps} steps each, seed {comparison.seed}; {comparison.lengths}; weights move {how}"
    for part in (
        Text(f"Simulation: {comparison.title}", style="bold"),
        Text(head, style="dim"),
        Text(""),
        _table(comparison),
    ):
        console.print(part, soft_wrap=isinstance(part, Text))
    for part in _remarks(comparison):
        console.print(part, soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("variant", overflow="fold")
    for heading in ("s a step", "speed", "tokens/s", "slots used", "waits", "sync"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("idle", "lag of samples"):
        table.add_column(heading, overflow="fold")
    given = comparison.found[0][1]
    fastest = min((outcome.step_s for _, outcome in comparison.found if outcome is not None), default=0.0)
    for variant, outcome in comparison.found:
        if outcome is None:
            why = variant.refused or "its engine cannot be counted"
            table.add_row(Text(variant.name, style="dim"), "–", *[""] * 5, Text(why, style="dim"), "")
            continue
        style = "bold" if outcome.step_s == fastest else ""
        table.add_row(Text(variant.name, style=style), *_cells(outcome, given))
    return table


def _cells(outcome: Outcome, given: Outcome | None) -> Sequence[RenderableType]:
    return (
        f"{outcome.step_s:,.2f}",
        "" if given is None else f"× {given.step_s / outcome.step_s:.2f}",
        f"{outcome.tokens_per_second:,.0f}",
        f"{outcome.slots_used:.0%}",
        f"{outcome.waited_s:,.2f} s",
        f"{outcome.sync_s:,.2f} s",
        "; ".join(f"{roles} {share:.0%}" for roles, share in outcome.idle.items()),
        _shares(outcome.lags),
    )


def _shares(lags: Mapping[int, float]) -> str:
    return ", ".join(f"{lag}: {share:.0%}" for lag, share in lags.items())


def _remarks(comparison: Comparison) -> list[Text]:
    """What the columns mean, and what was given up."""
    lines = [
        "",
        "slots used: share of the engine's slots that decode; waits: of training, for a rollout; sync: from the wish to move",
        "weights until they are there, the wait for samples among it; idle: share of the time in which devices do nothing;",
        "lag: versions that samples are older than the weights they begin to train. Estimates, by the plan's cost model.",
    ]
    rounds = [
        (variant, outcome) for variant, outcome in comparison.found if outcome is not None and outcome.rounds != 1
    ]
    lines += [f"{variant.name}: {outcome.rounds:.2f} rounds of generation a step" for variant, outcome in rounds]
    lines += [
        f"{variant.name}: {outcome.warmup_step_s:,.2f} s a step before, while the critic alone learns "
        f"(critic.warmup_steps={variant.look.settings.critic.warmup_steps})"
        for variant, outcome in comparison.found
        if outcome is not None and outcome.warmup_step_s is not None
    ]
    given_up = [(variant, outcome) for variant, outcome in comparison.found if outcome is not None and outcome.dropped]
    lines += [
        f"{variant.name}: {outcome.dropped} groups missed rollout.deadline_s twice" for variant, outcome in given_up
    ]
    return [Text(line, style="dim") for line in lines]
