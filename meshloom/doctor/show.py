"""Showing what the doctor says, on a terminal and as text.

Owns: the layout. Always holds: what is missing stands last, where it is read.
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshloom.doctor.findings import Finding, Level, Report

_STYLES = {Level.REQUIRED: "bold red", Level.WARNING: "yellow", Level.NOTE: "dim"}
_HEADINGS = {Level.NOTE: "Notes", Level.WARNING: "Warnings", Level.REQUIRED: "Missing"}


def show_report(report: Report, console: Console, *, of_run: str = "") -> None:
    """Facts by section, then findings, then the verdict.

    Args:
        report: to show.
        console: to print on.
        of_run: what it was examined for; empty for the machine alone.
    """
    for section in dict.fromkeys(fact.section for fact in report.facts):
        table = Table(
            title=section, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
        )
        table.add_column(no_wrap=True, min_width=18)
        table.add_column(overflow="fold")
        for fact in report.facts:
            if fact.section == section:
                table.add_row(Text(fact.name), Text(fact.value))
        console.print(table)
        console.print()
    for level, heading in _HEADINGS.items():
        found = [finding for finding in report.findings if finding.level is level]
        if found:
            console.print(Text(heading, style=_STYLES[level]))
            for finding in found:
                console.print(_finding(finding), soft_wrap=True)
            console.print()
    missing = sum(finding.level is Level.REQUIRED for finding in report.findings)
    for_run = f" for {of_run}" if of_run else ""
    verdict = f"{missing} missing{for_run}" if missing else f"nothing is missing{for_run}"
    console.print(Text(verdict, style="bold red" if missing else "bold green"))


def _finding(finding: Finding) -> Text:
    return Text("\n".join(f"  {line}" for line in str(finding.problem).splitlines()))
