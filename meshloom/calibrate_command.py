"""``meshloom calibrate``: the cost model's constants, fitted to finished runs.

Owns: the command's arguments, what it prints and writes. Refuses to know: how a fit is made. Always holds: the file that is
written is one that ``cluster.constants`` and ``meshloom plan --constants`` take, and nothing is written over.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.config.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from meshloom.plan.calibration import MeasuredRun
    from meshloom.plan.constants_file import GivenConstants
    from meshloom.plan.fit_constants import Fit

DONE = 0
_EPILOG = """\
Each run is predicted at the lengths that its samples had, and compared with the medians of its steps; the first step after
the start does not count. Runs of several sizes, lengths and numbers of sequences tell more constants apart.

  meshloom calibrate runs/a runs/b --write constants.yaml
  meshloom plan run.yaml --device-kind h200 --constants constants.yaml"""


def calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folders of finished runs of train and sft"
    )
    parser.add_argument("--write", dest="write_to", type=Path, metavar="FILE", help="write the constants to this file")
    parser.add_argument("--device-kind", metavar="h200", help="what the devices were (default: as the run noted)")
    parser.add_argument("--constants", type=Path, metavar="FILE", help="begin with these constants")
    parser.add_argument("--skip", type=int, default=1, metavar="N", help="steps left out at the start (default: 1)")
    parser.add_argument("--json", action="store_true", help="as JSON")


def calibrate_command(args: argparse.Namespace) -> int:
    from meshloom.observe.measured_run import read_measured_run
    from meshloom.plan.calibration import calibrate, compare, not_predicted
    from meshloom.plan.calibration_report import print_calibration
    from meshloom.plan.constants_file import GivenConstants, read_constants

    if args.write_to is not None and args.write_to.exists():
        raise UserError(f"there is a file {args.write_to} already", where="--write", fix="name another, or remove it")
    if args.skip < 0:
        raise UserError("--skip cannot be negative", fix="--skip 1")
    given = GivenConstants(origins={}) if args.constants is None else read_constants(args.constants)
    runs = [read_measured_run(path, device_kind=args.device_kind, skip=args.skip) for path in args.run_dirs]
    kinds = sorted({run.cluster.device.name for run in runs})
    if len(kinds) > 1:
        what = f"the runs were on different devices: {', '.join(kinds)}"
        raise UserError(what, where="RUN_DIR", fix="fit the runs of one kind of device at a time")
    found = calibrate(runs, given.constants)
    result = _given(found, runs, given)
    rows = [row for run in runs for row in compare(run, given.constants, found.constants)]
    left_out = {
        f"{part} of {run.name}": why for run in runs for part, why in not_predicted(run, given.constants).items()
    }
    if args.json:
        data = {
            "device": result.device,
            "constants": {name: getattr(found.constants, name) for name in result.origins},
            "compared": [asdict(row) for row in rows],
            "unfitted": found.unfitted,
            "left_out": left_out,
        }
        print(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        _show(lambda console: print_calibration(console, runs, given.constants, found, rows, left_out))
    if args.write_to is not None:
        _write(args.write_to, result)
        print(f"written: {args.write_to}; use it with cluster.constants={args.write_to}", file=sys.stderr)
    return DONE


def _given(found: "Fit", runs: Sequence["MeasuredRun"], before: "GivenConstants") -> "GivenConstants":
    """The fitted constants, and those that were given before, with where they come from."""
    steps = sum(run.steps for run in runs)
    origin = f"fitted to {', '.join(run.name for run in runs)}: {steps} steps on {runs[0].cluster.device.name}"
    origins = {**before.origins, **dict.fromkeys(found.fitted, origin)}
    return replace(before, constants=found.constants, origins=origins, device=runs[0].cluster.device.name)


def _show(show: Callable[["Console"], None]) -> None:
    """On a terminal, or as text whose lines are as long as they need to be."""
    from rich.console import Console

    from meshloom.plan.report import as_text

    if sys.stdout.isatty():
        show(Console(highlight=False))
    else:
        print(as_text(show), end="")


def _write(file: Path, result: "GivenConstants") -> None:
    from meshloom.plan.constants_file import constants_text

    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(constants_text(result))
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}", where="--write") from error
