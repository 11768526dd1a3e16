"""``meshloom simulate``: the control loop of a run on virtual devices.

Owns: the command's arguments. Refuses to know: how anything is simulated.
"""

import argparse
import json
import sys
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.settings import TrainSettings
from meshloom.given import load_given, settings_arguments

DONE = 0
_SPREAD = 0.5


def simulate_command(args: argparse.Namespace) -> int:
    from rich.console import Console

    from meshloom.plan.hardware_options import HardwareOptions
    from meshloom.plan.report import as_text
    from meshloom.simulate.compare import Question, as_json, compare, show

    hardware = HardwareOptions(
        nodes=args.nodes,
        devices_per_node=args.devices_per_node,
        device_memory=args.device_memory,
        device_kind=args.device_kind,
        device_map=args.device_map,
        constants=args.constants,
    )
    settings = hardware.told(load_given(TrainSettings, [*hardware.overrides(), *args.settings]))
    question = Question(
        steps=args.steps,
        lengths=args.lengths,
        lengths_from=args.lengths_from,
        prompt_tokens=args.prompt_tokens,
        reward_s=args.reward_s,
        lags=_numbers(args.lags, "--lags", least=0),
        rollout_devices=None if args.rollout_devices is None else _numbers(args.rollout_devices, "--rollout-devices"),
        in_flight=args.weights == "in-flight",
        seed=args.seed,
        spread=args.spread,
    )
    found = compare(settings, question)
    if args.json:
        print(json.dumps(as_json(found), indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        show(found, Console(highlight=False))
    else:
        print(as_text(lambda console: show(found, console)), end="")
    return DONE


def _numbers(text: str, where: str, least: int = 1) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is no list of numbers", where=where, fix=f"{where} 1,2") from None
    if any(number < least for number in found):
        raise UserError(f"{text!r} has a number below {least}", where=where, fix=f"{where} 1,2")
    return found


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return share


def simulate_arguments(parser: argparse.ArgumentParser) -> None:
    settings_arguments(parser, kind="train", resume=False)
    parser.add_argument(
        "--steps", type=_count, metavar="N", help="steps to count (default: what takes seconds, 100 at most)"
    )
    lengths = parser.add_mutually_exclusive_group()
    help_text = "tokens of responses: fixed:512, geometric:MEAN, lognormal:MEDIAN:SIGMA, uniform:A:B, 0.9*...+0.1*..."
    lengths.add_argument("--lengths", metavar="DIST", help=f"{help_text} (default: the longest)")
    lengths.add_argument(
        "--lengths-from", type=Path, metavar="RUN_DIR", help="as in a run: its folder or samples.jsonl"
    )
    parser.add_argument("--prompt-tokens", type=_count, metavar="N", help="tokens of a prompt (default: the longest)")
    parser.add_argument(
        "--reward-s", default="0", metavar="DIST", help="seconds that scoring a sample takes (default: 0)"
    )
    help_text = f"share of groups whose rewards differ, for algorithm.filter_groups (default: {_SPREAD:g})"
    parser.add_argument("--spread", type=_share, default=_SPREAD, metavar="SHARE", help=help_text)
    parser.add_argument("--lags", default="0,1,2", metavar="K,K", help="lags to compare, in steps (default: 0,1,2)")
    help_text = "devices that generation may have of its own (default: a quarter, a half, three quarters)"
    parser.add_argument("--rollout-devices", metavar="N,N", help=help_text)
    help_text = (
        "new weights come between rollouts, as meshloom train does, or in the midst of samples (default: between)"
    )
    parser.add_argument("--weights", choices=("between", "in-flight"), default="between", help=help_text)
    parser.add_argument("--nodes", type=int, metavar="N", help="so many nodes (cluster.nodes)")
    parser.add_argument("--devices-per-node", type=int, metavar="K", help="with so many devices each")
    parser.add_argument(
        "--device-memory", metavar="80GiB", help="and so much memory on each device (device_memory_bytes)"
    )
    parser.add_argument("--device-kind", metavar="h200", help="of this kind (cluster.device)")
    parser.add_argument("--device-map", metavar="MAP.yaml", help="devices and parallelism of each role (placement.map)")
    parser.add_argument("--constants", metavar="FILE.yaml", help="constants of the cost model, from meshloom calibrate")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the lengths (default: 0)")
    parser.add_argument("--json", action="store_true", help="as JSON")
