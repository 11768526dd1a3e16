"""Showing what a search for a placement came to.

Owns: the layout of the ranking. Refuses to know: how anything was found. Always holds: what is not chosen has a reason.
"""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshloom.plan.amounts import format_bytes
from meshloom.plan.faults import shortened
from meshloom.plan.ranking import Ranked, Ranking, Refused


def print_ranking(ranking: Ranking, console: Console) -> None:
    """The ranking on a terminal: what was chosen, what comes behind it and why, what was refused and why."""
    for part in _parts(ranking):
        console.print(part, soft_wrap=isinstance(part, Text))
    console.print()


def _parts(ranking: Ranking) -> Iterable[RenderableType]:
    if ranking.ranked:
        yield _table(ranking.ranked)
        yield Text(f"  {_how_many(ranking)}", style="dim")
        yield Text(f"  chosen: {shortened(' '.join(ranking.ranked[0].change)) or 'the settings as they are'}")
    if ranking.kept:
        yield Text(f"  kept, as they were given: {shortened(', '.join(ranking.kept))}")
    if ranking.refused:
        yield ""
        yield _refused(ranking.refused)


def _how_many(ranking: Ranking) -> str:
    few = ranking.considered == 1
    looked = "one arrangement" if few else f"{ranking.considered:,} arrangements, {ranking.weighed:,} of them forecast"
    if few:
        return looked
    if ranking.complete:
        return f"{looked}; the others take longer even if memory were no matter"
    return f"{looked}; the search ended early, among the others may be faster ones"


def _table(ranked: Iterable[Ranked]) -> Table:
    table = _empty("placements, by the time of a step", "", "step", "left", "arrangement and budget", "why here")
    for one in ranked:
        left = "–" if one.margin_bytes is None else format_bytes(one.margin_bytes)
        where = Text(one.arrangement)
        where.append(f"\n{one.budget}", style="dim")
        why = Text(one.reason)
        if one.planned_only:
            why.append(f"\nplanned only: {', '.join(one.planned_only)}", style="dim")
        table.add_row(str(one.place), f"{one.step_s:,.4g} s", left, where, why)
    return table


def _refused(refused: Iterable[Refused]) -> Table:
    table = _empty("refused", "what", "why")
    for one in refused:
        table.add_row(Text(one.what), Text(one.why))
    return table


def _empty(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in ("step", "left") else "left")
    return table
