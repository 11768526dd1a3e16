"""The page of a plan: one HTML file that needs nothing else.

Owns: its sections and their order. Refuses to know: how a plan is made. Always holds: every line of the plan is on it with its
formula and source; what a user wrote reaches it as text; it runs no script.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.load import explain, flatten
from meshloom.config.problems import Problem
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.config.verl import Translation
from meshloom.observe.atomic import replace_file
from meshloom.observe.format import plural, seconds_text
from meshloom.observe.markup import Markup, assemble, el, join
from meshloom.observe.plan_bars import memory_bars
from meshloom.observe.plan_devices import device_map
from meshloom.observe.plan_ranking import ranking_table
from meshloom.observe.plan_timeline import timeline
from meshloom.plan.build import Plan
from meshloom.plan.ledger import DERIVED, MICROBATCHES, LedgerLine
from meshloom.plan.ranking import Ranking
from meshloom.plan.report import value_text
from meshloom.plan.schedule import schedule
from meshloom.plan.worked import worked

_BATCH, _TIME = ("batch", "batch over devices"), ("time", "assumptions")
_CHAIN = (
    ("prompts per step", "prompts a step"),
    ("samples per step", "samples"),
    ("samples per update", "samples an update"),
    ("samples per device per update", "on each device"),
    ("samples per replica per update", "on each replica"),
    ("update microbatches per device", "microbatches at most"),
    ("update microbatches per replica", "microbatches at most"),
    (MICROBATCHES, "microbatches at most"),
    ("updates per step", "updates a step"),
    ("steps", "steps"),
    ("updates of the run", "updates in all"),
)
"""Lines of the batch ledger that lead from prompts to updates, and what stands below their numbers."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a page shows.

    Args:
        plan: of the run.
        settings: that it is of.
        translation: of the verl command that they are from; none if they are not.
        ranking: of placements, where they were searched.
        notes: on hardware that is not here.
    """

    plan: Plan
    settings: TrainSettings | SftSettings | EvalSettings
    translation: Translation | None = None
    ranking: Ranking | None = None
    notes: tuple[str, ...] = ()


def write_plan_page(file: Path, planned: Planned) -> None:
    """Write a plan's page.

    Args:
        file: to write or to replace.
        planned: what it shows.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        replace_file(file, [plan_page(planned).encode("utf-8", "replace")])
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{file} cannot be written: {why}", where="--html", fix="name a file in a folder") from error


def plan_page(planned: Planned) -> str:
    """The page as HTML."""
    sections = tuple(_sections(planned))
    main = join([_head(planned, sections), (section.markup for section in sections), _foot()])
    return assemble("plan.html", f"Plan: {planned.plan.title}", ("base.css", "plan.css"), main=main)


@dataclass(frozen=True)
class _Section:
    id: str
    title: str
    markup: Markup


def _section(name: str, title: str, note: str, *children: object) -> _Section:
    told = el("p", note, class_="note") if note else None
    head = el("div", el("h2", title, id=f"{name}-title"), told, class_="section-head")
    return _Section(name, title, el("section", head, children, id=name, aria_labelledby=f"{name}-title"))


def _sections(planned: Planned) -> Iterator[_Section]:
    plan, settings = planned.plan, planned.settings
    formulas = worked(plan.lines, flatten(settings))
    if plan.problems or plan.warnings:
        yield _findings(plan)
    if planned.ranking is not None:
        yield _section("placements", "Placements", "by the time of a step", ranking_table(planned.ranking))
    if plan.layout is not None:
        topology = plan.layout.topology
        note = "one device" if topology.num_devices == 1 else _devices_text(plan)
        yield _section("devices", "Devices", note, device_map(plan.layout))
    batch = [line for line in plan.lines if line.section in _BATCH]
    yield _section("batch", "Batch", "from prompts to updates", _chain(batch), _tables(batch, formulas, is_open=True))
    memory = [line for line in plan.lines if line.section.startswith("memory")]
    if memory:
        note = "what a device holds in each phase; touch a piece for its name"
        yield _section("memory", "Memory", note, memory_bars(plan), _tables(memory, formulas))
    took = [line for line in plan.lines if line.section in _TIME]
    if took:
        yield _section("time", "Time", "an estimate of a step", _timeline(planned), _tables(took, formulas))
    shown = {line.section for line in (*batch, *memory, *took)}
    rest = [line for line in plan.lines if line.section not in shown]
    if rest:
        yield _section("inputs", "Inputs and arithmetic", "", _tables(rest, formulas, is_open=True))
    if planned.translation is not None:
        yield _verl(planned.translation)
    yield _section("settings", "Settings", "each value and where it was given", _settings(planned))


def _head(planned: Planned, sections: Sequence[_Section]) -> Markup:
    plan = planned.plan
    links = (el("a", section.title, href=f"#{section.id}") for section in sections)
    brand = el("div", el("span", "meshloom plan"), el("nav", links, aria_label="Sections"), class_="brand")
    kind, _, folder = plan.title.partition(" ")
    if plan.problems:
        verdict = el("span", f"cannot run: {plural(len(plan.problems), 'problem')}", class_="pill failed")
    else:
        verdict = el("span", "can run", class_="pill finished")
    warned = el("span", plural(len(plan.warnings), "warning"), class_="pill stopped") if plan.warnings else None
    pills = el("p", verdict, warned, el("span", f"meshloom {kind}", class_="reason"), class_="pills")
    facts = (el("div", el("dt", name), el("dd", text)) for name, text in _facts(planned))
    notes = (el("p", note, class_="note") for note in planned.notes)
    return el("header", brand, el("h1", folder), pills, el("dl", facts, class_="facts"), notes)


def _facts(planned: Planned) -> Iterator[tuple[str, str]]:
    plan, settings = planned.plan, planned.settings
    values = {line.name: line.value for line in plan.lines}
    parameters = values.get("parameters")
    counted = f", {parameters / 1e9:.3g} B parameters" if isinstance(parameters, int) and parameters else ""
    yield "Model", Path(settings.model.path).name + counted
    yield "Devices", _devices_text(plan)
    memory = settings.device_memory_bytes or _memory_of_a_device(plan)
    if memory:
        yield "Memory of each", f"{memory / 2**30:,.1f} GiB"
    if plan.updates is not None and plan.steps is not None:
        yield "Length", f"{plural(plan.steps, 'step')}, {plural(plan.updates, 'update')}"
    forecast = None if plan.outlook is None else plan.outlook.forecast
    if forecast is not None:
        yield "A step takes about", seconds_text(forecast.step_s)
        if plan.steps:
            yield "The run about", seconds_text(forecast.step_s * plan.steps)


def _devices_text(plan: Plan) -> str:
    if plan.layout is None or plan.layout.topology.num_devices == 1:
        return "one"
    topology = plan.layout.topology
    if topology.num_nodes == 1:
        return f"{topology.devices_per_node:,} of one node"
    return f"{topology.num_devices:,}: {topology.num_nodes:,} nodes × {topology.devices_per_node:,}"


def _memory_of_a_device(plan: Plan) -> int | None:
    groups = () if plan.outlook is None else plan.outlook.groups
    return next((group.ledger.memory_bytes for group in groups), None)


def _findings(plan: Plan) -> _Section:
    cards = [_problem(problem, "problem") for problem in plan.problems]
    cards += [_problem(problem, "warning") for problem in plan.warnings]
    together = None
    if plan.together:
        together = el("p", "All problems of devices end with ", _code(plan.together), class_="together card")
    title = "Problems and warnings" if plan.problems and plan.warnings else "Problems" if plan.problems else "Warnings"
    tried = any(problem.suggestions for problem in plan.problems)
    note = "changes shown as code were tried" if tried else "" if plan.problems else "it runs, but is likely not meant"
    return _section("findings", title, note, cards, together)


def _problem(problem: Problem, kind: str) -> Markup:
    head = el("h3", el("code", problem.code), " ", problem.what)
    labels = (("where", problem.where), ("why", problem.why))
    told = [(el("dt", label), el("dd", text)) for label, text in labels if text]
    if problem.suggestions:
        choices = el("ul", (el("li", _code(change)) for change in problem.suggestions))
        told.append((el("dt", "change"), el("dd", choices)))
    elif problem.fix:
        told.append((el("dt", "change"), el("dd", problem.fix)))
    prices = el("p", problem.fix, class_="note") if problem.suggestions and "(" in problem.fix else None
    return el("article", head, el("dl", told) if told else None, prices, class_=f"finding {kind} card")


def _code(change: Iterable[str]) -> Markup:
    return el("code", " ".join(change))


def _chain(lines: Sequence[LedgerLine]) -> Markup | None:
    """The numbers from prompts to updates, one after the other."""
    values = {line.name: line for line in lines}
    links = [
        el(
            "div",
            el("span", _bare(values[name]), class_="link-value"),
            el("span", label, class_="link-label"),
            class_="link",
        )
        for name, label in _CHAIN
        if name in values and values[name].value is not None
    ]
    return el("div", links, class_="chain card") if len(links) > 1 else None


def _bare(line: LedgerLine) -> str:
    """A value without its unit."""
    return f"{line.value:,}" if isinstance(line.value, int | float) else str(line.value)


def _tables(
    lines: Sequence[LedgerLine], formulas: Mapping[tuple[str, str], str], *, is_open: bool = False
) -> Iterator[Markup]:
    """A table for each section of the ledgers, to fold and unfold."""
    for section in dict.fromkeys(line.section for line in lines):
        rows = [_line(line, formulas.get((section, line.name))) for line in lines if line.section == section]
        head = el("tr", (el("th", text) for text in ("what", "value", "how", "from")))
        table = el("table", el("thead", head), el("tbody", rows), class_="ledger lines")
        summary = el("summary", section, el("span", plural(len(rows), "line")))
        yield el("details", summary, el("div", table, class_="table-frame"), class_="fold", open=is_open)


def _line(line: LedgerLine, formula: str | None) -> Markup:
    numbers = el("div", f"= {formula}", class_="worked") if formula else None
    source = "" if line.source == DERIVED else line.source
    css = "dim" if source == "default" else None
    value = el("td", value_text(line), class_="number" if not isinstance(line.value, str) else "number words")
    return el("tr", el("th", line.name), value, el("td", line.formula, numbers), el("td", source, class_=css))


def _timeline(planned: Planned) -> Markup | None:
    plan, settings = planned.plan, planned.settings
    if plan.outlook is None or plan.outlook.forecast is None or plan.layout is None:
        return None
    if not isinstance(settings, TrainSettings):
        return None
    forecast = plan.outlook.forecast
    return timeline(plan.layout, forecast, schedule(settings, plan.layout, forecast))


def _verl(translation: Translation) -> _Section:
    parts = (
        ("refused", "refused: the command cannot run", ("verl", "why, and what to do"), translation.refused, True),
        ("translated", "translated", ("verl", "decides"), translation.translated, True),
        ("warned", "warnings", ("verl", "what differs"), translation.warnings, True),
        ("ignored", "ignored, as it does not matter", ("verl", "why"), translation.ignored, False),
    )
    return _section(
        "verl",
        "verl command",
        translation.entry,
        (_pairs(title, heads, entries, is_open) for _, title, heads, entries, is_open in parts if entries),
    )


def _pairs(title: str, heads: Sequence[str], entries: Mapping[str, str], is_open: bool) -> Markup:
    rows = (el("tr", el("th", el("code", key)), el("td", text)) for key, text in entries.items())
    table = el(
        "table", el("thead", el("tr", (el("th", head) for head in heads))), el("tbody", rows), class_="ledger pairs"
    )
    summary = el("summary", title, el("span", plural(len(entries), "key")))
    return el("details", summary, el("div", table, class_="table-frame"), class_="fold", open=is_open)


def _settings(planned: Planned) -> Markup:
    rows = []
    for line in explain(planned.settings):
        css = "dim" if line.origin == "default" else None
        value = el("code", json.dumps(line.value, ensure_ascii=False))
        rows.append(el("tr", el("th", el("code", line.path)), el("td", value), el("td", line.origin), class_=css))
    head = el("tr", (el("th", text) for text in ("setting", "value", "from")))
    table = el("table", el("thead", head), el("tbody", rows), class_="ledger pairs")
    given = sum(line.origin != "default" for line in explain(planned.settings))
    summary = el("summary", "all settings", el("span", f"{len(rows)}, of which {given} were given"))
    return el("details", summary, el("div", table, class_="table-frame"), class_="fold")


def _foot() -> Markup:
    written = time.strftime("%Y-%m-%d %H:%M")
    return el("footer", f"Written by meshloom plan, {written}. Nothing was run, and no device was touched.")
