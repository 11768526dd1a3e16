"""The placements that a search looked at, on a plan's page: in their order, each with the reason for its place.

Owns: their drawing. Refuses to know: how they were found. Always holds: what was chosen stands first, with the overrides that
make it.
"""

from collections.abc import Iterator

from meshloom.observe.format import bytes_text, plural, seconds_text
from meshloom.observe.markup import Markup, el, join, void
from meshloom.plan.ranking import Ranked, Ranking

_HEADS = ("", "a step", "", "left", "arrangement", "why here")


def ranking_table(ranking: Ranking) -> Markup:
    """What was chosen, what comes behind it, and what was refused."""
    longest = max((one.step_s for one in ranking.ranked), default=0.0)
    parts: list[Markup] = []
    if ranking.ranked:
        head = el("tr", (el("th", text) for text in _HEADS))
        rows = (_row(one, longest) for one in ranking.ranked)
        table = el("table", el("thead", head), el("tbody", rows), class_="ledger ranking")
        parts.append(el("div", table, class_="table-frame"))
        chosen = " ".join(ranking.ranked[0].change) or "the settings as they are"
        parts.append(el("p", "Chosen: ", el("code", chosen), class_="together card"))
    parts += _told(ranking)
    return join(parts)


def _told(ranking: Ranking) -> Iterator[Markup]:
    looked = f"{plural(ranking.considered, 'arrangement')} looked at, {ranking.weighed:,} of them forecast"
    early = "" if ranking.complete else "; the search ended early"
    kept = f"; kept as they were given: {', '.join(ranking.kept)}" if ranking.kept else ""
    yield el("p", f"{looked}{early}{kept}", class_="note told-below")
    if ranking.refused:
        rows = (el("tr", el("th", one.what), el("td", one.why)) for one in ranking.refused)
        table = el("table", el("tbody", rows), class_="ledger pairs")
        summary = el("summary", "refused", el("span", f"{len(ranking.refused)}"))
        yield el("details", summary, el("div", table, class_="table-frame"), class_="fold")


def _row(one: Ranked, longest: float) -> Markup:
    width = f"{100 * one.step_s / longest:.2f}%" if longest else "0%"
    bar = el("svg", void("rect", class_="rank", x=0, y=5, width=width, height=12, rx=3), width="100%", height=22)
    left = "–" if one.margin_bytes is None else bytes_text(one.margin_bytes)
    planned = el("div", f"planned only: {', '.join(one.planned_only)}", class_="entries") if one.planned_only else None
    return el(
        "tr",
        el("td", one.place),
        el("td", seconds_text(one.step_s), class_="number"),
        el("td", bar, class_="rank-bar"),
        el("td", left, class_="number"),
        el("td", one.arrangement, el("div", one.budget, class_="entries")),
        el("td", one.reason, planned),
        class_="chosen" if one.place == 1 else None,
    )
