"""What a run says when it ends: how far it came, where its results are, and the command that goes on from there.

Owns: the words of an ending. Refuses to know: how the run was trained. Always holds: a line is never wrapped, so that a
command or a path in it can be copied.
"""

import os
import shlex
from pathlib import Path

from meshloom.observe.format import number_text, percent_text, plural, seconds_text
from meshloom.observe.history import held_out_losses, milestones, read_stages
from meshloom.observe.records import read_metrics
from meshloom.observe.report import REPORT_FILE
from meshloom.observe.run_folder import CHECKPOINTS_FOLDER, SETTINGS_FILE


def resume_command(command: str, run_dir: Path, *changes: str) -> str:
    """What to type to go on with the run of a folder: its own settings file holds all that was given, but ``changes``."""
    return " ".join(["meshloom", command, _quoted(run_dir / SETTINGS_FILE), *changes, "--resume"])


def stopped_lines(command: str, run_dir: Path, *, step: int, steps: int) -> list[str]:
    """The ending of a run that was stopped after ``step`` of ``steps`` and saved."""
    where = f"stopped after step {step} of {steps}, saved" if step else f"stopped before step 1 of {steps}"
    return [f"{where}; go on with: {resume_command(command, run_dir)}"]


def interrupted_lines(command: str, run_dir: Path, *, saved_step: int) -> list[str]:
    """The ending of a run that was stopped at once, within a step; ``saved_step``: of its newest checkpoint, or 0."""
    where = f"goes on from step {saved_step}" if saved_step else "nothing was saved yet, so it begins anew"
    return [f"stopped at once; {where} with: {resume_command(command, run_dir)}"]


def finished_lines(run_dir: Path, *, steps: int, first_step: int, seconds: float) -> list[str]:
    """The ending of a run that did all its steps.

    Args:
        run_dir: folder of the run.
        steps: of the whole run.
        first_step: steps that were done before this process began.
        seconds: since then.
    """
    if first_step >= steps:
        done = f"finished: all {plural(steps, 'step')} had been done before"
    elif first_step:
        done = f"finished {plural(steps, 'step')}, the last {steps - first_step} in {seconds_text(seconds)}"
    else:
        done = f"finished {plural(steps, 'step')} in {seconds_text(seconds)}"
    lines = [done + _held_out(run_dir)]
    checkpoints = sorted((run_dir / CHECKPOINTS_FOLDER).glob("step-*"))
    places = {"report": run_dir / REPORT_FILE, "checkpoint": checkpoints[-1] if checkpoints else None}
    lines += [_labelled(label, path) for label, path in places.items() if path is not None and path.exists()]
    if not checkpoints and any("learning_rate" in record["metrics"] for record in read_metrics(run_dir)):
        return [*lines, _labelled("checkpoint", "none, as checkpoint.at_end is false")]
    then = f"export {_quoted(run_dir)} OUT" if checkpoints else f"train RUN.yaml --from-samples {_quoted(run_dir)}"
    return [*lines, _labelled("next", f"meshloom {then}")]


def report_line(path: Path) -> str:
    """Where the report of a run is that an error ended."""
    return _labelled("report", path)


def _labelled(label: str, text: str | Path) -> str:
    return f"{label + ':':<11} {text}"


def has_records(run_dir: Path) -> bool:
    """Whether there is anything to report."""
    return bool(read_metrics(run_dir))


def _held_out(run_dir: Path) -> str:
    if not has_records(run_dir):
        return ""
    stages = read_stages(run_dir, {})
    if losses := held_out_losses(stages):
        return "   held-out loss " + " → ".join(map(number_text, losses))
    found = milestones(stages)
    return "   accuracy " + " → ".join(percent_text(mark.accuracy) for mark in found) if found else ""


def _quoted(path: str | os.PathLike[str]) -> str:
    return shlex.quote(str(path))
