"""``meshloom plan``: of settings, of a verl command, for hardware that may not be here.

Owns: the command's arguments and what it prints. Refuses to know: how a plan is made.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.config.errors import UserError
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.given import KINDS, load_given, settings_arguments, split_given, verl_arguments

if TYPE_CHECKING:
    from meshloom.config.verl import Translation
    from meshloom.plan import Plan
    from meshloom.plan.hardware_options import HardwareOptions
    from meshloom.plan.ranking import Ranking

DONE, BAD_INPUT = 0, 2


def plan_command(args: argparse.Namespace) -> int:
    if args.verl is not None:
        return _plan_verl(args)
    from meshloom.config.kinds import kind_of

    kind = KINDS[args.kind] if args.kind else kind_of(*split_given(args.settings))
    hardware = _hardware(args, kind)
    loaded: TrainSettings | SftSettings | EvalSettings = load_given(kind, [*hardware.overrides(), *args.settings])
    settings = hardware.told(loaded)
    names = {settings_kind: name for name, settings_kind in KINDS.items()}
    _searches(args, settings)
    note = f"\nPlanned for `meshloom {names[kind]}` by its keys; --kind chooses otherwise."
    return _show_plan(args, settings, note=note if args.kind is None else "")


def _plan_verl(args: argparse.Namespace) -> int:
    from meshloom.from_verl import read_verl, settings_of, tell_without_plan, write_settings

    hardware = _hardware(args)
    native = [*hardware.overrides(), *args.settings]
    translation = read_verl(args.verl, native)
    try:
        settings = hardware.told(settings_of(translation, native))
    except UserError as error:
        tell_without_plan(translation, error, as_json=args.json)
        return BAD_INPUT
    if args.write is not None and not _searches(args, settings):
        write_settings(args.write, settings)
    return _show_plan(args, settings, translation=translation)


def _searches(args: argparse.Namespace, settings: TrainSettings | SftSettings | EvalSettings) -> bool:
    """Whether the placement is searched.

    Raises:
        UserError: if it is asked for a run that has none.
    """
    if isinstance(settings, TrainSettings):
        return args.auto or settings.placement.auto
    if args.auto:
        raise UserError("only reinforcement learning has a placement to search", fix="leave out --auto")
    return False


def _search(args: argparse.Namespace, settings: TrainSettings) -> "Ranking":
    """The ranking of placements; the chosen settings are written where ``--write`` says so."""
    from meshloom.plan.auto import AUTO, choose
    from meshloom.plan.faults import with_values

    if not settings.placement.auto:
        settings = with_values(settings, {AUTO: True}, "option --auto")
    ranking = choose(settings)
    if args.write is not None and ranking.chosen is not None:
        from meshloom.from_verl import write_settings

        write_settings(args.write, ranking.chosen)
    return ranking


def _planned(
    args: argparse.Namespace, settings: TrainSettings | SftSettings | EvalSettings
) -> "tuple[TrainSettings | SftSettings | EvalSettings, Plan, Ranking | None]":
    """The settings, as a search has chosen them if there was one, their plan, and the search's ranking."""
    from meshloom.plan import build_plan
    from meshloom.plan.count import count_prompts
    from meshloom.plan.hardware_options import notes_on_hardware
    from meshloom.plan_trial import FirstPrompts, is_of_this_machine, not_tried, tried

    ranking: Ranking | None = None
    with FirstPrompts(settings) as prompts:
        if isinstance(settings, TrainSettings) and _searches(args, settings):
            ranking = _search(args, settings)
            settings = ranking.chosen or settings
        plan = build_plan(settings, count_prompts(settings) if args.prompts is None else args.prompts)
        found = list(tried(settings, plan.problems, prompts))
    aside = [problem for problem in found if notes_on_hardware(settings) and is_of_this_machine(problem)]
    refused = [problem for problem in found if problem not in aside]
    aside += not_tried(settings, (*plan.problems, *plan.warnings))
    plan = dataclasses.replace(plan, problems=(*plan.problems, *refused), warnings=(*plan.warnings, *aside))
    if ranking is not None:
        problems, warnings = (*ranking.problems, *plan.problems), (*ranking.warnings, *plan.warnings)
        plan = dataclasses.replace(plan, problems=problems, warnings=warnings)
    return settings, plan, ranking


def _show_plan(
    args: argparse.Namespace,
    settings: TrainSettings | SftSettings | EvalSettings,
    *,
    note: str = "",
    translation: "Translation | None" = None,
) -> int:
    """Print a plan as the options ask for it, with the account of a verl command where it is one; the exit code."""
    from rich.console import Console
    from rich.text import Text

    from meshloom.config.load import explain, flatten
    from meshloom.plan.hardware_options import notes_on_hardware
    from meshloom.plan.report import as_text, plan_json, print_explained, print_plan
    from meshloom.plan.worked import worked

    settings, plan, ranking = _planned(args, settings)
    if translation is not None:
        from meshloom.from_verl import judged, print_translation

        plan = judged(plan, translation)

    notes = notes_on_hardware(settings)
    if args.html is not None:
        from meshloom.observe.plan_page import Planned, write_plan_page

        planned = Planned(plan=plan, settings=settings, translation=translation, ranking=ranking, notes=notes)
        write_plan_page(args.html, planned)
        note = f"{note}\nThe page: {args.html}"
    note = "".join(f"\n{line}" for line in (*notes, *filter(None, note.split("\n"))))

    def show(console: Console) -> None:
        if translation is not None:
            print_translation(translation, console)
        if args.settings_too:
            print_explained(explain(settings), console)
        if ranking is not None:
            from meshloom.plan.auto_report import print_ranking

            print_ranking(ranking, console)
        print_plan(plan, console, worked(plan.lines, flatten(settings)) if args.verbose else None)
        if note:
            console.print(Text(note, style="dim"))

    if args.json:
        more = {} if translation is None else {"verl": translation.as_json()}
        more |= {} if ranking is None else {"auto": ranking.as_json()}
        more |= {"notes": notes} if notes else {}
        print(json.dumps({**json.loads(plan_json(plan)), **more}, indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        show(Console(highlight=False))
    else:
        print(as_text(show), end="")
    return BAD_INPUT if plan.problems else DONE


def _hardware(args: argparse.Namespace, kind: type = TrainSettings) -> "HardwareOptions":
    """The hardware that a plan is for; several devices only for runs that can be spread over them."""
    from meshloom.plan.hardware_options import HardwareOptions

    given = (args.nodes, args.devices_per_node, args.device_map, args.device_kind, args.constants)
    if kind is EvalSettings and any(given):
        what = "an evaluation is on one device, and its time is not planned"
        options = "--nodes, --devices-per-node, --device-kind, --device-map and --constants"
        raise UserError(what, fix=f"leave out {options}, or give --kind train")
    if kind is SftSettings and args.device_map:
        raise UserError(
            "a supervised run has one role, on all devices: there is nothing to map", fix="leave out --device-map"
        )
    return HardwareOptions(
        nodes=args.nodes,
        devices_per_node=args.devices_per_node,
        device_memory=args.device_memory,
        device_kind=args.device_kind,
        device_map=args.device_map,
        constants=args.constants,
    )


def _number(text: str) -> int:
    """A number of prompts from the command line."""
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of prompts")
    return int(text)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    settings_arguments(parser, kind="train", resume=False)
    verl_arguments(parser)
    parser.add_argument("--kind", choices=tuple(KINDS), help="what the file is for (default: by its keys)")
    parser.add_argument("--settings", dest="settings_too", action="store_true", help="each setting and its origin, too")
    parser.add_argument("--prompts", type=_number, metavar="N", help="prompts of the data (default: counted)")
    parser.add_argument("--nodes", type=int, metavar="N", help="plan for so many nodes (cluster.nodes)")
    parser.add_argument("--devices-per-node", type=int, metavar="K", help="with so many devices each")
    parser.add_argument(
        "--device-memory", metavar="80GiB", help="and so much memory on each device (device_memory_bytes)"
    )
    parser.add_argument("--device-kind", metavar="h200", help="of this kind, for memory and time (cluster.device)")
    parser.add_argument("--device-map", metavar="MAP.yaml", help="devices and parallelism of each role (placement.map)")
    help_text = "constants of the cost model, from meshloom calibrate (cluster.constants)"
    parser.add_argument("--constants", metavar="FILE.yaml", help=help_text)
    help_text = "search for the placement, cuts and memory budgets that take least time; what is given is kept"
    parser.add_argument("--auto", action="store_true", help=help_text)
    parser.add_argument("-v", "--verbose", action="store_true", help="each derivation with its numbers")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write all of it as one page, too")
