"""What is printed when a run ends: what came out, where the time went, a few samples, where everything is.

Owns: the summary's words and order. Refuses to know: how the run went about it. Always holds: it only reads, and it
prints what a model wrote as plain text.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshloom.observe.ending import resume_command
from meshloom.observe.format import number_text, percent_text, plural, seconds_text
from meshloom.observe.history import Milestone, Stage, held_out_losses, milestones, phase_totals, read_stages
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
    for stage in found:
        console.print(_headline(stage), soft_wrap=True)
    for line in (_accuracy(milestones(found)), _last_numbers(found[-1]), _how_judged(found[-1])):
        if line is not None:
            console.print(line, soft_wrap=True)
    for stage in found:
        if times := _times(stage):
            of = f": {stage.name}" if len(found) > 1 else ""
            console.print(Text(f"\nWhere the time went{of}", style="bold"))
            console.print(times)
    samples = last_samples(found, num_samples)
    if samples:
        console.print(Text("\nSamples", style="bold"))
        for sample in samples:
            console.print(_sample(sample))
    console.print(Text("\nWhere things are", style="bold"))
    for line in _places(Path(run_dir), found):
        console.print(line, soft_wrap=True)
    if following := _next(Path(run_dir), found[-1]):
        console.print(Text("\nNext", style="bold"))
        for line in following:
            console.print(line, soft_wrap=True)


def _headline(stage: Stage) -> Text:
    style = _STATE_STYLE.get(RunState(stage.state), "red")
    steps = plural(stage.last_step, "step") if stage.state == RunState.FINISHED else f"at step {stage.last_step}"
    text = Text.assemble(
        (stage.name, "bold"), "  ", (stage.state, style), f"  {steps} in {seconds_text(stage.seconds)}"
    )
    if stage.status["reason"]:
        text.append(f"\n{stage.status['reason']}", style)
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
    # The loss of a policy gradient says nothing about how good the policy is.
    metric = METRICS["reward_mean" if records[-1]["kind"] == "train" else "loss"]
    first, last = records[0]["metrics"].get(metric.name), records[-1]["metrics"].get(metric.name)
    if first is None or last is None:
        return None
    label = metric.label.lower()
    text = f"{label:<8}  {number_text(first, metric.unit)} → {number_text(last, metric.unit)}"
    held_out = " → ".join(number_text(loss, metric.unit) for loss in held_out_losses([stage]))
    more = f"; {held_out} on held-out rows" if held_out else ""
    return Text(f"{text}  mean of the first and the last step{more}", style="dim")


def _how_judged(stage: Stage) -> Text | None:
    """Why accuracy and reward differ, where both were measured and sampled differently."""
    if not stage.of_kind("train") or not stage.of_kind("validation"):
        return None
    held_out, training = (_temperature(stage, room) for room in ("validation", "rollout"))
    if held_out is None or training is None or held_out == training:
        return None
    how = "greedy (the most probable token each time)" if held_out == 0 else f"at temperature {held_out:g}"
    text = f"Validation is {how}; training samples at temperature {training:g}, so reward and accuracy differ."
    return Text(text, style="dim")


def _temperature(stage: Stage, room: str) -> float | None:
    value = stage.settings.get(room, {}).get("sampling", {}).get("temperature")
    return None if value is None else float(value)


def _times(stage: Stage) -> Table | None:
    totals = {name: seconds for name, seconds in phase_totals(stage.records).items() if seconds}
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


def _next(root: Path, last: Stage) -> list[Text]:
    """What a user may want to do now."""
    if not (last.path / SETTINGS_FILE).exists():
        return []
    changes = [f"batch.steps={2 * last.last_step}"] if last.state == RunState.FINISHED else []
    lines = {
        "look": f"open {root / REPORT_FILE} in a browser",
        "use it": f"meshloom export {shlex.quote(str(last.path))} OUT",
        "go on": resume_command("sft" if "sft" in last.kinds else "train", last.path, *changes),
        "your data": "see README.md",
    }
    if not (root / REPORT_FILE).exists():
        del lines["look"]
    return [Text(f"  {label:<13}{text}") for label, text in lines.items()]
