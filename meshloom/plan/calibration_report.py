"""What a calibration found, for people: the runs, predicted against measured, constants before and after, and what is open.

Owns: the layout. Always holds: each constant is shown once, with its new value or with the reason why it has none.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshloom.plan.calibration import Compared, MeasuredRun, held
from meshloom.plan.constants import Constants, unit_of
from meshloom.plan.fit_constants import Fit


def print_calibration(
    console: Console,
    runs: Sequence[MeasuredRun],
    before: Constants,
    found: Fit,
    rows: Sequence[Compared],
    left_out: Mapping[str, str],
) -> None:
    """Print a calibration.

    Args:
        console: to print on.
        runs: that were fitted.
        before: constants that the fit began with.
        found: what came of it.
        rows: predicted against measured.
        left_out: measured parts that were not fitted, and why.
    """
    for run in runs:
        lengths, device = run.lengths, run.cluster.device.name
        words = f"{run.steps} steps on {device}, prompts of {lengths.prompt:.0f} tokens, responses of {lengths.response:.0f}"
        console.print(Text(f"{run.name}: {words}, the longest {lengths.longest}"))
    console.print()
    console.print(_compared(rows))
    if any(run.peaks for run in runs):
        console.print()
        console.print(_memory(runs))
    console.print()
    console.print(_constants(before, found))
    reasons = {**found.unfitted, **left_out}
    if reasons:
        console.print()
        console.print(_reasons(reasons))


def _table(title: str, *headings: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return table


def _reasons(reasons: Mapping[str, str]) -> Table:
    """What was not fitted, by why."""
    table = _table("not fitted", "why", "what")
    for why in dict.fromkeys(reasons.values()):
        table.add_row(why, ", ".join(name for name in reasons if reasons[name] == why))
    return table


def _compared(rows: Sequence[Compared]) -> Table:
    numbers = ("measured s", "before s", "÷ measured", "after s", "÷  measured")
    table = _table("seconds of a step, predicted and measured", "run", "part", *numbers, numbers=numbers)
    for row in rows:
        table.add_row(
            row.run,
            row.part,
            f"{row.measured:.3f}",
            f"{row.before:.3f}",
            _ratio(row.before, row.measured),
            f"{row.after:.3f}",
            _ratio(row.after, row.measured),
            style="bold" if row.part == "step" else "",
        )
    return table


def _memory(runs: Sequence[MeasuredRun]) -> Table:
    numbers = ("predicted GiB", "measured GiB", "÷ measured")
    table = _table("peaks of memory, predicted and measured", "run", "phase", *numbers, numbers=numbers)
    for row in (row for run in runs for row in held(run)):
        gib = (f"{count / 2**30:.2f}" for count in (row.predicted, row.measured))
        table.add_row(row.run, row.part, *gib, _ratio(row.predicted, row.measured))
    return table


def _ratio(predicted: float, measured: float) -> str:
    return f"{predicted / measured:.2f}" if measured > 0 else "–"


def _constants(before: Constants, found: Fit) -> Table:
    table = _table("constants", "name", "before", "after", "unit", "how far it is known", numbers=("before", "after"))
    for name, gain in found.fitted.items():
        known = f"fitted; {gain:.0%} of the doubt is gone"
        if name in found.at_bound:
            known += "; stopped at what is physically possible"
        old, new = getattr(before, name), getattr(found.constants, name)
        table.add_row(name, f"{old:.4g}", f"{new:.4g}", unit_of(name), known)
    if not found.fitted:
        table.add_row("none could be fitted")
    return table
