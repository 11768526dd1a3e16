"""What a run shows while it runs: a live table on a terminal, one line a step elsewhere.

Owns: the table, the lines and their numbers. Refuses to know: control flow; a display never changes a run. Always holds:
off a terminal a record is exactly one line, without escape codes.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshloom.observe.format import MISSING, number_text, plural, seconds_text
from meshloom.observe.names import METRICS, PHASES

ROWS = 10
"""Steps the live table shows."""

BARS = "▁▂▃▄▅▆▇█"

_INVALID, HELD_OUT = "invalid", "held-out"

_OF_VALIDATION = (
    ("accuracy", "accuracy"),
    ("reward", "reward_mean"),
    ("mean@k", "mean_at_k"),
    ("pass@k", "pass_at_k"),
    ("loss", "loss"),
    ("perplexity", "perplexity"),
)

_COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "rl": (
        ("reward", "reward_mean"),
        ("solved", "solved_share"),
        ("accuracy", "accuracy"),
        ("tokens", "response_tokens_mean"),
        ("entropy", "entropy"),
        ("gap", "sampler_gap"),
        ("grad", "grad_norm"),
    ),
    "sft": (
        ("loss", "loss"),
        (HELD_OUT, "held_out"),
        ("grad", "grad_norm"),
        ("lr", "learning_rate"),
        ("tokens/s", "tokens_per_second"),
    ),
}
_MORE = (("kl", "kl_reference"), ("explained", "explained_variance"))
"""What only runs with a reference or a critic have; the last to get room."""


class Display(Protocol):
    """What the loop tells a display. All calls are cheap and none raises for a number that is missing."""

    def phase(self, name: str | None) -> None:
        """The run is in this phase now; none: between phases."""
        ...

    def record(self, record: Mapping[str, Any]) -> None:
        """A metric record was made."""
        ...

    def notice(self, text: str) -> None:
        """Something the user should read: a warning, what Ctrl-C did."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(
    title: str,
    *,
    steps: int,
    table: bool | None = None,
    first_step: int = 0,
    earlier: Sequence[Mapping[str, Any]] = (),
    console: Console | None = None,
) -> Display:
    """The display for this terminal.

    Args:
        title: name of the run.
        steps: steps of the whole run.
        table: whether to draw the live table. Default: when the output is a terminal.
        first_step: steps that an earlier run has done already.
        earlier: the records of these steps, which the table goes on from.
        console: where to write. Default: standard output.
    """
    console = console or Console()
    live = console.is_terminal if table is None else table
    if not live:
        return LineDisplay(title, steps, first_step, console)
    return LiveDisplay(title, steps, first_step, console, earlier)


def _opening(title: str, steps: int, first_step: int) -> str:
    return f"{title}: {plural(steps, 'step')}" + (f", {first_step} done" if first_step else "")


class _Base:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held."""


class LineDisplay(_Base):
    """One line a record."""

    def __init__(self, title: str, steps: int, first_step: int, console: Console) -> None:
        self._console, self._steps = console, steps
        self._eta = _Eta(steps, first_step)
        self._print(_opening(title, steps, first_step))

    def phase(self, name: str | None) -> None:
        """Phases come in the step's line, as seconds."""

    def record(self, record: Mapping[str, Any]) -> None:
        self._eta.record(record)
        self._print(line_text(record, self._steps, self._eta.text()))

    def notice(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def line_text(record: Mapping[str, Any], steps: int, eta: str = "") -> str:
    """A record as one line: the step, its main numbers, its seconds."""
    metrics, kind = record["metrics"], record["kind"]
    head = f"step {record['step']}/{steps}" + ("  validation" if kind == "validation" else "")
    parts = [head]
    names = _OF_VALIDATION if kind == "validation" else (*_COLUMNS["sft" if kind == "sft" else "rl"], *_MORE)
    for label, name in names:
        if metrics.get(name) is None:
            continue
        text = _cell(metrics, name)
        if name == "accuracy" and metrics.get("accuracy_low") is not None and metrics.get("accuracy_high") is not None:
            text += f" ({_cell(metrics, 'accuracy_low')} – {_cell(metrics, 'accuracy_high')})"
        parts.append(f"{label} {text}")
    if invalid := invalid_text(metrics):
        parts.append(f"invalid {invalid}")
    seconds = sum(record.get("phases", {}).values())
    if seconds:
        parts.append(seconds_text(seconds))
    if eta and kind != "validation":
        parts.append(f"{eta} left")
    return "  ".join(parts)


def invalid_text(metrics: Mapping[str, Any]) -> str:
    """Invalid rewards of a record, such as ``5 of 32 (raised)``, with the reason most of them have; empty without any."""
    count = metrics.get("reward_invalid") or 0
    if not count:
        return ""
    whole = f" of {metrics['samples']:.0f}" if metrics.get("samples") else ""
    reasons = {n.partition("/")[2]: v for n, v in metrics.items() if n.startswith("reward_invalid/") and v}
    most = max(reasons, key=lambda reason: reasons[reason], default=None)
    return f"{count:.0f}{whole}" + (f" ({'mostly ' if len(reasons) > 1 else ''}{most})" if most else "")


def sparkline(values: list[float], width: int = 40) -> str:
    """The last ``width`` values as a row of bars, from the lowest to the highest of them."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def _cell(metrics: Mapping[str, Any], name: str) -> str:
    metric = METRICS["loss" if name == "held_out" else name]
    return number_text(metrics.get(name), metric.unit).removesuffix(" tokens/s")


class _Eta:
    """Remaining seconds, from the mean over this process's steps."""

    def __init__(self, steps: int, first_step: int) -> None:
        self.steps, self.first, self.done = steps, first_step, first_step
        self.began = time.monotonic()

    def record(self, record: Mapping[str, Any]) -> None:
        if record["kind"] != "validation":
            self.done = max(self.done, record["step"])

    def text(self) -> str:
        made = self.done - self.first
        if made <= 0 or self.done >= self.steps:
            return ""
        return seconds_text((time.monotonic() - self.began) / made * (self.steps - self.done))


class LiveDisplay(_Base):
    """A table of the last steps that is redrawn in place, with the phase at hand, a progress bar and the time left."""

    def __init__(
        self, title: str, steps: int, first_step: int, console: Console, earlier: Sequence[Mapping[str, Any]]
    ) -> None:
        self._title, self._steps = title, steps
        self._eta = _Eta(steps, first_step)
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROWS)
        self._curve: list[float] = []
        self._held_out: list[dict[str, Any]] = []
        self._phase: tuple[str, float] | None = None
        self._columns = "rl"
        self._seen: set[str] = set()
        self._console = console
        for record in earlier:
            self.record(record)
        if first_step:
            console.print(f" {_opening(title, steps, first_step)}", markup=False, highlight=False, soft_wrap=True)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=False)
        self._live.start()

    def phase(self, name: str | None) -> None:
        self._phase = None if name is None else (name, time.monotonic())

    def record(self, record: Mapping[str, Any]) -> None:
        self._eta.record(record)
        metrics = dict(record["metrics"])
        self._seen |= {name for name, value in metrics.items() if value is not None}
        if record["kind"] == "validation":
            self._held_out.append(metrics)
            # Both kinds of records have a loss, and a step has one row.
            self._row(record["step"]).update(accuracy=metrics.get("accuracy"), held_out=metrics.get("loss"))
            self._seen |= {"held_out"} if metrics.get("loss") is not None else set()
            return
        self._columns = "sft" if record["kind"] == "sft" else "rl"
        self._row(record["step"]).update(metrics, seconds=sum(record.get("phases", {}).values()))
        value = metrics.get("loss" if self._columns == "sft" else "reward_mean")
        if value is not None:
            self._curve.append(value)

    def notice(self, text: str) -> None:
        self._console.print(f"[yellow]{escape(text)}[/]")

    def close(self) -> None:
        self._phase = None
        self._live.stop()

    def _row(self, step: int) -> dict[str, Any]:
        for row in self._rows:
            if row["step"] == step:
                return row
        self._rows.append({"step": step})
        return self._rows[-1]

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._headline()]
        if self._rows:
            parts.append(self._table())
        if len(self._curve) > 1:
            name = "loss" if self._columns == "sft" else "reward"
            parts.append(Text.assemble((f" {name} ", "dim"), (sparkline(self._curve), "cyan")))
        parts.append(self._progress())
        return Group(*parts)

    def _headline(self) -> Text:
        text = Text.assemble((f" {self._title}", "bold"))
        if self._held_out:
            first, last = self._held_out[0], self._held_out[-1]
            label, name = (f"{HELD_OUT} loss", "loss") if last.get("loss") is not None else ("accuracy", "accuracy")
            text.append(f"   {label} ", "dim")
            if first is not last:
                text.append(f"{_cell(first, name)} → ", "dim")
            text.append(_cell(last, name), "bold green")
        return text

    def _table(self) -> Table:
        """The last steps: as many columns as the terminal is wide enough for, the first of those that ever had a value."""
        columns = [("step", [str(row["step"]) for row in self._rows])]
        if any(invalid := [invalid_text(row) for row in self._rows]):
            columns.append((_INVALID, invalid))
        columns += self._cells(_COLUMNS[self._columns])
        columns.append(("seconds", [f"{row['seconds']:.1f}" if "seconds" in row else "" for row in self._rows]))
        columns += self._cells(_MORE)
        table, left = Table(box=None, padding=(0, 1), header_style="dim"), self._console.width
        shown = []
        for label, cells in columns:
            left -= max(map(len, (label, *cells))) + 2
            if left < 0:
                break
            style = "bold red" if label == _INVALID else ""
            table.add_column(label, justify="right", no_wrap=True, style=style)
            shown.append(cells)
        for i, line in enumerate(zip(*shown, strict=True)):
            table.add_row(*line, style="bold" if i == len(self._rows) - 1 else "")
        return table

    def _cells(self, names: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
        """Columns of what ever had a value."""
        found = []
        for label, name in names:
            if name in self._seen:
                cells = [_cell(row, name) for row in self._rows]
                # Most steps are not validated; an empty cell is calmer than a dash.
                found.append((label, ["" if cell == MISSING else cell for cell in cells]))
        return found

    def _progress(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(self._steps, 1), completed=self._eta.done, width=30)
        eta = self._eta.text()
        counts = f"{self._eta.done}/{self._steps}" + (f"  {eta} left" if eta else "")
        grid.add_row("", bar, counts, self._phase_text())
        return grid

    def _phase_text(self) -> Text:
        if self._phase is None:
            return Text("")
        name, since = self._phase
        label = PHASES[name].label if name in PHASES else name
        return Text.assemble((label.lower(), "cyan"), (f" {seconds_text(time.monotonic() - since)}", "dim"))
