"""The ``launch`` command: training on the hosts of a file.

Owns: its arguments. Refuses to know: how hosts are reached (``fabric.hostfile``).
"""

import argparse
import sys
from pathlib import Path

_EPILOG = """\
The host file has one line a host:

  worker-0 slots=8
  worker-1 slots=8

Each slot is a device and a process. The loop runs on this machine; the hosts are reached by ssh, without a password, and have
this folder and this Python at the same place."""


def launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --hostfile HOSTS RUN.yaml [a.b=c ...] [--resume] [options]"
    parser.epilog = _EPILOG
    parser.add_argument("settings", nargs="+", metavar="RUN.yaml", help="as for `meshloom train`; then overrides a.b=c")
    parser.add_argument("--hostfile", type=Path, required=True, metavar="HOSTS", help="file with lines HOST slots=N")
    parser.add_argument("--resume", action="store_true", help="go on from the run's newest checkpoint")
    parser.add_argument("--device-map", metavar="MAP.yaml", help="devices and parallelism of each role (placement.map)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--address", default="", help="what the hosts reach this machine by (default: its full name)")
    parser.add_argument("--python", default=sys.executable, help="Python on the hosts (default: this one)")


def launch_command(args: argparse.Namespace) -> int:
    from meshloom.fabric.hostfile import launch_on_hosts, read_hosts

    words = ["train", *args.settings, *(["--resume"] if args.resume else [])]
    words += ["--device-map", args.device_map] if args.device_map else []
    command = [sys.executable, "-m", "meshloom", *words]
    hosts = read_hosts(args.hostfile)
    return launch_on_hosts(hosts, command, address=args.address, python=args.python, dry_run=args.dry_run)
