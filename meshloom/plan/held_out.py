"""The loss on held-out rows in the plan of a supervised run: how often, and how long it takes.

Owns: those lines. Refuses to know: seconds of a pass (``plan.training_time``), how anything is executed. Always holds: it is
counted as ``loop.sft`` measures it, and is no part of a step.
"""

from collections.abc import Iterator

from meshloom.config.settings import SftSettings
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.count import count_rows
from meshloom.plan.forecast import Lengths
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.residency import ModelRole, Phase
from meshloom.plan.time import forward_time

TIMES, SECONDS = "measurements of the loss on held-out rows", "loss on held-out rows"


def times_measured(settings: SftSettings, steps: int | None) -> int | None:
    """How often a run measures it, where it has held-out rows; none if its steps are not known."""
    if settings.data.validation is None:
        return 0
    if steps is None:
        return None
    given = settings.validation
    every, between = given.every_steps, steps // given.every_steps if given.every_steps else 0
    is_last_besides = given.after_training and steps and (not every or steps % every)
    return given.before_training + between + bool(is_last_besides)


def held_out_lines(settings: SftSettings, steps: int | None) -> Iterator[LedgerLine]:
    """For the batch ledger; nothing without held-out rows."""
    if settings.data.validation is None:
        return
    given = settings.validation
    when = [
        *["before training"] * given.before_training,
        *[f"every {given.every_steps} steps"] * bool(given.every_steps),
        *["after the last"] * given.after_training,
    ]
    formula = f"{', '.join(when) or 'never'}; each once over all validation rows"
    source = settings.provenance.of("validation.every_steps")
    count = times_measured(settings, steps)
    yield LedgerLine(section="batch", name=TIMES, value=count, formula=formula, source=source, unit="")


def held_out_time(
    settings: SftSettings, role: ModelRole, lengths: Lengths, cluster: Cluster, constants: Constants
) -> LedgerLine | None:
    """Seconds of each measurement; none where there are no held-out rows, or nobody knows how many.

    Args:
        settings: of the run.
        role: the model in numbers.
        lengths: of samples.
        cluster: what the devices are.
        constants: of the cost model.
    """
    source = settings.data.validation
    rows = None if source is None else count_rows(source)
    if not rows:
        return None
    found = forward_time(role, lengths.work(rows, 1), cluster, constants, Phase.LOGPROB)
    seconds = sum(part.seconds for part in found.parts)
    formula = f"each time: {rows:,} validation rows, forward alone; beside the steps"
    return LedgerLine(section="time", name=SECONDS, value=round(seconds, 6), formula=formula, source=DERIVED, unit="s")
