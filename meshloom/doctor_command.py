"""``meshloom doctor``: this machine, alone or for the settings of a run.

Owns: the command's arguments and what it prints. Refuses to know: how anything is found out.
"""

import argparse
import json
import sys
from pathlib import Path

from meshloom.given import KINDS, load_given, settings_arguments, split_given

DONE, BAD_INPUT = 0, 2


def doctor_command(args: argparse.Namespace) -> int:
    from rich.console import Console

    from meshloom.config.kinds import kind_of
    from meshloom.doctor.examine import examine
    from meshloom.doctor.show import show_report
    from meshloom.plan.report import as_text

    settings, run = None, ""
    if args.settings:
        kind = KINDS[args.kind] if args.kind else kind_of(*split_given(args.settings))
        settings = load_given(kind, args.settings)
        run = f"`meshloom {next(name for name, each in KINDS.items() if each is kind)}` into {settings.run_dir}"
    report = examine(settings, args.hostfile)
    if args.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        show_report(report, Console(highlight=False), of_run=run)
    else:
        print(as_text(lambda console: show_report(report, console, of_run=run)), end="")
    return DONE if report.is_fine else BAD_INPUT


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    settings_arguments(parser, kind="train", resume=False)
    parser.usage = "%(prog)s [RUN.yaml] [a.b=c ...] [options]"
    parser.set_defaults(alone=True)
    parser.add_argument("--kind", choices=tuple(KINDS), help="what the file is for (default: by its keys)")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="names of the nodes, one a line")
    parser.add_argument("--json", action="store_true", help="as JSON")
