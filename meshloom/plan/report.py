"""Showing a plan: as text, on a terminal, as JSON.

Owns: the layout. Always holds: every line of the plan is shown with its formula and source.
"""

import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshloom.config.load import Explained
from meshloom.config.problems import Problem
from meshloom.plan.amounts import format_bytes
from meshloom.plan.build import Plan
from meshloom.plan.faults import shortened
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.picture import draw

_TEXT_COLUMNS = 150
_UNLIMITED = 100_000
_RATES = {"FLOP/s": (1e12, "TFLOP/s"), "bytes/s": (1e9, "GB/s")}


def plan_text(plan: Plan) -> str:
    """The plan as plain text, for ``plan.txt``."""
    return as_text(lambda console: print_plan(plan, console), _TEXT_COLUMNS)


def as_text(show: Callable[[Console], None], columns: int = _UNLIMITED) -> str:
    """What is shown, as plain text whose lines are as long as they need to be, or of so many columns."""
    out = io.StringIO()
    show(Console(file=out, width=columns, color_system=None, legacy_windows=False, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def plan_json(plan: Plan) -> str:
    """The plan as JSON."""
    data = dataclasses.asdict(dataclasses.replace(plan, layout=None, outlook=None))
    del data["layout"], data["outlook"]
    data["device_map"] = None if plan.layout is None else plan.layout.as_json()
    return json.dumps(data, indent=2, ensure_ascii=False)


def print_plan(plan: Plan, console: Console, derivations: Mapping[tuple[str, str], str] | None = None) -> None:
    """The plan on a terminal.

    Args:
        plan: to show.
        console: to print on.
        derivations: formulas with their numbers, by section and name of a line, shown below it (``plan.worked``).
    """
    for part in _parts(plan, derivations or {}):
        console.print(part, soft_wrap=isinstance(part, Text))


def print_explained(explained: Sequence[Explained], console: Console) -> None:
    """Each setting, its value and where it came from, on a terminal."""
    table = Table(
        title="settings", title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.add_column("setting", no_wrap=True)
    for heading in ("value", "from"):
        table.add_column(heading, overflow="fold")
    for line in explained:
        value = json.dumps(line.value, ensure_ascii=False)
        table.add_row(
            *(Text(cell, style="dim" if line.origin == "default" else "") for cell in (line.path, value, line.origin))
        )
    console.print(table)
    console.print()


def _parts(plan: Plan, derivations: Mapping[tuple[str, str], str]) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"Plan: {plan.title}", style="bold")]
    if plan.layout is not None and plan.layout.topology.num_devices > 1:
        parts += ["", Text(draw(plan.layout))]
    for section in dict.fromkeys(line.section for line in plan.lines):
        parts += ["", _table(section, [line for line in plan.lines if line.section == section], derivations)]
    for heading, style, problems in (("Warnings", "yellow", plan.warnings), ("Problems", "bold red", plan.problems)):
        if problems:
            parts += ["", Text(heading, style=style), *(_problem(problem) for problem in problems)]
    if plan.together:
        parts += [Text(f"  All problems of devices end with: {shortened(' '.join(plan.together))}")]
    return parts


def _problem(problem: Problem) -> Text:
    return Text("\n".join(f"  {line}" for line in str(problem).splitlines()))


def _table(section: str, lines: list[LedgerLine], derivations: Mapping[tuple[str, str], str]) -> Table:
    table = Table(
        title=section, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("from", overflow="fold", style="dim")
    for line in lines:
        origin = line.formula if line.source == DERIVED else f"{line.formula} ({line.source})"
        table.add_row(*(Text(cell) for cell in (line.name, value_text(line), origin)))
        if (derivation := derivations.get((section, line.name))) is not None:
            table.add_row("", "", Text(f"= {derivation}"))
    return table


def value_text(line: LedgerLine) -> str:
    """A line's value with its unit."""
    if line.value is None:
        return "–"
    if isinstance(line.value, str):
        return line.value
    if line.unit in _RATES:
        divisor, unit = _RATES[line.unit]
        return f"{line.value / divisor:,.4g} {unit}"
    if line.unit == "s":
        return f"{line.value:,.2f} s" if line.value >= 10 else f"{line.value:.3g} s"
    return format_bytes(line.value) if line.unit == "bytes" else f"{line.value:,} {line.unit}".rstrip()
