"""The time of a plan's page: a step as a timeline, and which role waits for which.

Owns: its drawing. Refuses to know: how seconds are estimated. Always holds: one scale for all roles; time is said to be an
estimate.
"""

from collections.abc import Iterator

from meshloom.observe.format import seconds_text
from meshloom.observe.markup import Markup, el, join, void
from meshloom.plan.forecast import Forecast
from meshloom.plan.layout import Layout
from meshloom.plan.schedule import Schedule, Span

_HEIGHT = 30
_LABELLED = 9.0
"""Share of the width, in percent, from which a stretch has room for its name."""
_TICKS = 6


def timeline(plan_layout: Layout, forecast: Forecast, found: Schedule) -> Markup:
    """A step, a row for each role.

    Args:
        plan_layout: for the roles and their order.
        forecast: for the seconds of the whole step.
        found: when they work.
    """
    roles = [str(role.role) for role in plan_layout.roles if found.of(role.role)]
    if any(span.role == "offload" for span in found.spans):
        roles.append("offload")
    scale = max(found.end, forecast.step_s, 1e-9)
    rows = (_row(role, found, scale) for role in roles)
    shared = "generation goes on while the others train" if found.lagged else "phases follow each other"
    head = el(
        "p",
        el("span", f"a step takes about {seconds_text(forecast.step_s)}"),
        el("span", f"{shared}; as if every sample were the longest"),
        class_="told",
    )
    axis = el("div", el("span"), _axis(scale), el("span"), class_="bar-row axis")
    picture = el("figure", head, el("div", rows, axis, class_="bars"), class_="time card")
    return join([picture, _waits(roles, found)])


def _row(role: str, found: Schedule, scale: float) -> Markup:
    spans = found.of(role)
    busy = sum(span.seconds for span in spans)
    waits = [_wait(wait.start, wait.stop, wait.on, scale) for wait in found.waits(role)] if role != "offload" else []
    shapes = [*waits, *(shape for span in spans for shape in _span(span, scale))]
    text = "; ".join(f"{span.phase or 'moves'} from {span.start:.2f} to {span.stop:.2f} s" for span in spans)
    picture = el("svg", shapes, width="100%", height=_HEIGHT, role="img", aria_label=f"{role}: {text}")
    numbers = el(
        "span", el("b", seconds_text(busy)), el("span", f"{busy / scale:.0%} busy", class_="left"), class_="bar-numbers"
    )
    return el("div", el("span", role, class_="bar-name"), picture, numbers, class_="bar-row")


def _span(span: Span, scale: float) -> Iterator[Markup]:
    share = 100 * span.seconds / scale
    name = "offload" if span.phase is None else str(span.phase)
    told = el("title", f"{span.role}: {name}, {seconds_text(span.seconds)}")
    css = f"phase-{name.replace('-', '_')}"
    x = f"{100 * span.start / scale:.3f}%"
    yield el("rect", told, class_=css, x=x, y=2, width=f"{max(share, 0.15):.3f}%", height=_HEIGHT - 4, rx=3)
    if share >= _LABELLED:
        middle = f"{100 * (span.start + span.seconds / 2) / scale:.3f}%"
        text = f"{name} {seconds_text(span.seconds)}" if share >= 2 * _LABELLED else name
        yield el("text", text, class_="span-name", x=middle, y=_HEIGHT / 2 + 4, text_anchor="middle")


def _wait(start: float, stop: float, on: tuple[str, ...], scale: float) -> Markup:
    who = f" for {', '.join(on)}" if on else ""
    told = el("title", f"waits {seconds_text(stop - start)}{who}")
    x, width = f"{100 * start / scale:.3f}%", f"{100 * (stop - start) / scale:.3f}%"
    return el("rect", told, class_="waits", x=x, y=_HEIGHT / 2 - 3, width=width, height=6)


def _axis(scale: float) -> Markup:
    step = _round_step(scale)
    shapes: list[Markup] = []
    for at in range(int(scale / step) + 1):
        share = 100 * at * step / scale
        x = f"{share:.3f}%"
        anchor = "start" if at == 0 else "end" if share > 97 else "middle"
        shapes.append(void("line", class_="grid", x1=x, x2=x, y1=0, y2=5))
        shapes.append(el("text", f"{at * step:g} s", class_="tick", x=x, y=18, text_anchor=anchor))
    return el("svg", shapes, width="100%", height=22, aria_hidden="true")


def _round_step(scale: float) -> float:
    """A step of 1, 2 or 5 that makes a few ticks."""
    power = 10.0 ** _floor_log10(scale / _TICKS)
    return next((power * digit for digit in (1, 2, 5, 10) if power * digit * _TICKS >= scale), power * 10)


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _waits(roles: list[str], found: Schedule) -> Markup:
    """How long each role waits, and for whom."""
    rows: list[Markup] = []
    for role in (role for role in roles if role != "offload"):
        waits = found.waits(role)
        seconds = sum(wait.stop - wait.start for wait in waits)
        on = ", ".join(dict.fromkeys(name for wait in waits for name in wait.on)) or "–"
        share = f"{seconds / found.end:.0%}" if found.end else "–"
        name = el("td", el("span", role, class_=f"role role-{role}"))
        rows.append(
            el(
                "tr",
                name,
                el("td", seconds_text(seconds), class_="number"),
                el("td", share, class_="number"),
                el("td", on),
            )
        )
    numbers = (el("th", text, class_="number") for text in ("waits", "of a step"))
    head = el("tr", el("th", "role"), numbers, el("th", "for"))
    return el("div", el("table", el("thead", head), el("tbody", rows), class_="ledger waits"), class_="table-frame")
