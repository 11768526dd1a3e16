"""What is printed when a run ends: what came out, where the time went, a few samples, where everything is.

Owns: the summary's words and order. Refuses to know: how the run went about it. Always holds: it only reads, and it
prints what a model wrote as plain text.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshloom.observe.format import number_text, percent_text, plural, seconds_text
from meshloom.observe.history import Milestone, Stage, milestones, phase_totals, read_stages
from meshloom.observe.names import METRICS, PHASES
from meshloom.observe.records import SAMPLES_FILE
from meshloom.observe.report import REPORT_FILE
from meshloom.observe.run_folder import CHECKPOINTS_FOLDER, SETTINGS_FILE, RunState
from meshloom.observe.sample_choice import last_samples

_STATE_STYLE = {RunState.FINISHED: "green", RunState.STOPPED: "yellow", RunState.RUNNING: "cyan"}
_BAR = 24


def print_summary(
    run_dir: str | os.PathLike[str],
    *,
    stages: Mapping[str, str | os.PathLike[str]] | None = None,
    num_samples: int = 3,
    console: Console | None = None,
) -> None:
    """Print the summary of a run.

    Args:
        run_dir: folder of the run, or a folder that only holds the stages' folders.
        stages: as in ``write_report``.
        num_samples: samples of the last step to show.
        console: where to print. Default: standard output.

    Raises:
        UserError: if the folder holds no metrics.
    """
    console = console or Console()
    found = read_stages(run_dir, stages)
    console.print()
    console.print(_headline(found))
    for part in (_accuracy(milestones(found)), _last_numbers(found[-1])):
        if part is not None:
            console.print(part)
    if times := _times(found):
        console.print(Text("\nWhere the time went", style="bold"))
        console.print(times)
    samples = last_samples(found, num_samples)
    if samples:
        console.print(Text("\nSamples", style="bold"))
        for sample in samples:
            console.print(_sample(sample))
    console.print(Text("\nWhere things are", style="bold"))
    for line in _places(Path(run_dir), found):
        console.print(line, soft_wrap=True)


def _headline(stages: Sequence[Stage]) -> Text:
    last = stages[-1]
    style = _STATE_STYLE.get(RunState(last.state), "red")
    steps = plural(last.last_step, "step") if last.state == RunState.FINISHED else f"at step {last.last_step}"
    took = seconds_text(sum(stage.seconds for stage in stages))
    text = Text.assemble((last.name, "bold"), "  ", (last.state, style), f"  {steps} in {took}")
    if last.status["reason"]:
        text.append(f"\n{last.status['reason']}", style)
    return text


def _accuracy(found: Sequence[Milestone]) -> Text | None:
    if not found:
        return None
    text = Text("accuracy  ", style="dim")
    for i, milestone in enumerate(found):
        text.append(" → " if i else "", "dim")
        text.append(percent_text(milestone.accuracy), "bold green" if i == len(found) - 1 else "")
        if milestone.low is not None and milestone.high is not None:
            text.append(f" ({100 * milestone.low:.1f} – {percent_text(milestone.high)})", "dim")
    text.append("  held-out, 95 % interval", "dim")
    return text


def _last_numbers(stage: Stage) -> Text | None:
    records = stage.of_kind("train") or stage.of_kind("sft")
    if not records:
        return None
    names = ("reward_mean", "loss") if records[-1]["kind"] == "train" else ("loss",)
    parts = []
    for name in names:
        first, last = records[0]["metrics"].get(name), records[-1]["metrics"].get(name)
        if first is not None and last is not None:
            unit = METRICS[name].unit
            parts.append(f"{METRICS[name].label.lower()} {number_text(first, unit)} → {number_text(last, unit)}")
    return Text("   ".join(parts), style="dim") if parts else None


def _times(stages: Sequence[Stage]) -> Table | None:
    measured = phase_totals([record for stage in stages for record in stage.records])
    totals = {name: seconds for name, seconds in measured.items() if seconds}
    whole = sum(totals.values())
    if not whole:
        return None
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, seconds in totals.items():
        label = PHASES[name].label if name in PHASES else name
        share = seconds / whole
        bar = Text("━" * max(1, round(share * _BAR)), style="cyan")
        table.add_row(f"  {label}", seconds_text(seconds), percent_text(share), bar)
    return table


def _sample(sample: Mapping[str, Any]) -> Panel:
    if sample.get("invalid"):
        verdict, style = f"invalid: {sample['invalid']}", "yellow"
    else:
        verdict, style = (
            f"reward {number_text(sample.get('reward'))}",
            "green" if (sample.get("reward") or 0) > 0 else "red",
        )
    body = Text.assemble((_shortened(sample["prompt"], last=True), "dim"), "\n", _shortened(sample["response"]))
    title = Text.assemble((verdict, style), f"  step {sample['step']}, {sample['kind']}")
    if sample.get("answer") is not None:
        title.append(f", answer {_shortened(str(sample['answer']), 60)}", "dim")
    return Panel(body, title=title, title_align="left", border_style="dim")


def _shortened(text: str, limit: int = 500, *, last: bool = False) -> str:
    """The text without control characters, cut to ``limit`` characters at its beginning or, if ``last``, at its end."""
    clean = "".join(c if c.isprintable() or c == "\n" else "�" for c in text).strip()
    if len(clean) <= limit:
        return clean
    return "…" + clean[-limit:] if last else clean[:limit] + "…"


def _places(root: Path, stages: Sequence[Stage]) -> list[Text]:
    """One line a place, never wrapped or cut, so that a path can be copied."""
    last = stages[-1].path
    places = {
        "report": root / REPORT_FILE,
        "checkpoints": last / CHECKPOINTS_FOLDER,
        "samples": last / SAMPLES_FILE,
        "settings": last / SETTINGS_FILE,
    }
    return [Text.assemble(f"  {label:<13}", str(path)) for label, path in places.items() if path.exists()]
