"""Workers on the hosts of a file, reached by ssh.

Owns: reading the file, the ssh processes, what is said of them. Refuses to know: what is run. Always holds: what is started is
printed first; when this process ends, however it does, so does everything on the hosts: their attendants watch the
connection that ssh holds.
"""

import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.errors import RunFault, UserError
from meshloom.fabric.attendant import Ticket
from meshloom.fabric.launch import Launched
from meshloom.fabric.meeting import ControllerProcess
from meshloom.fabric.processes import ending_text

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_LOOK_S = 0.1
_ALONE_S = 8.0
"""Seconds that the controller is given to notice by itself that a host is gone."""
_END_S = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A line of a host file.

    Args:
        address: for ssh, ``worker-0`` or ``user@worker-0``.
        slots: workers on it, one a device.
    """

    address: str
    slots: int

    @property
    def name(self) -> str:
        """The host's name, without a user's."""
        return self.address.rpartition("@")[2]


def read_hosts(file: Path) -> tuple[Host, ...]:
    """The hosts of a file with lines such as ``worker-0 slots=8``; ``#`` begins a comment.

    Raises:
        UserError: if the file cannot be read, a line is none, or a host is named twice.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the host file cannot be read", where=str(file), why=str(error)) from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file}:{number}"
        host = Host(words[0], _slots(words[1:], where))
        if host.name in {known.name for known in hosts}:
            raise UserError(f"the host {host.name} is named twice", where=where, fix="one line a host, with its slots")
        if host.address.startswith("-"):
            raise UserError(f"{host.address!r} is no host", where=where)
        hosts.append(host)
    if not hosts:
        raise UserError("the host file names no host", where=str(file), fix="lines such as: worker-0 slots=8")
    return tuple(hosts)


def _slots(words: Sequence[str], where: str) -> int:
    if not words:
        return 1
    name, _, value = words[0].partition("=")
    if len(words) > 1 or name != "slots" or not value.isdecimal() or int(value) < 1:
        text = " ".join(words)
        raise UserError(f"{text!r} is not understood in a host file", where=where, fix="write HOST slots=8")
    return int(value)


def own_address(hosts: Sequence[Host]) -> str:
    """What the hosts reach this machine by."""
    return "127.0.0.1" if all(host.name in _LOOPBACK for host in hosts) else socket.getfqdn()


def ssh_command(host: Host, *, python: str, folder: Path) -> list[str]:
    """The command that starts a host's attendant."""
    remote = f"cd {shlex.quote(str(folder))} && exec {shlex.quote(python)} -m meshloom.fabric.attendant"
    return [*_SSH, host.address, remote]


def launch_on_hosts(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    address: str = "",
    python: str = sys.executable,
    folder: Path | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Run the controller here and workers on the hosts; the run's exit code.

    Args:
        hosts: of the workers.
        command: that runs the controller.
        address: what the hosts reach this machine by. Default: its full name.
        python: interpreter on the hosts.
        folder: on the hosts, where the run is started. Default: as here.
        dry_run: only say what would be done.
        say: is given each line that is said.
    """
    folder = folder or Path.cwd()
    address = address or own_address(hosts)
    starts = {host: ssh_command(host, python=python, folder=folder) for host in hosts}
    say(f"{address}: {shlex.join(command)}")
    for host, start in starts.items():
        workers = "1 worker" if host.slots == 1 else f"{host.slots} workers"
        say(f"{host.name}: {workers}: {shlex.join(start)}")
    if dry_run:
        return 0
    controller = ControllerProcess(command, Launched("hostfile", 0, len(hosts), tuple(host.slots for host in hosts)))
    place = controller.place()
    links = (
        [] if place is None else [_link(index, host, starts[host], address, place) for index, host in enumerate(hosts)]
    )
    code, unreached = _wait(controller, links, say)
    for _, process in links:
        _end(process)
    for host, status in unreached:
        print(f"error: {_unreached(host, status, python, folder)}", file=sys.stderr, flush=True)
    return code


Link = tuple[Host, "subprocess.Popen[bytes]"]


def _link(index: int, host: Host, start: Sequence[str], address: str, place: dict[str, Any]) -> Link:
    """Start a host's attendant. Its ticket goes over ssh, so that no list of processes shows the secret."""
    process = subprocess.Popen(
        start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    ticket = Ticket(
        address, place["port"], place["secret"], node=host.name, slots=host.slots, node_index=index, holds_input=True
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which is told
        process.stdin.write(ticket.text().encode() + b"\n")
        process.stdin.flush()
    threading.Thread(target=_pass_output_on, args=(host, process), daemon=True).start()
    return host, process


def _pass_output_on(host: Host, process: "subprocess.Popen[bytes]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{host.name}: {line.decode('utf-8', 'replace').rstrip()}", file=sys.stderr, flush=True)


def _unreached(host: Host, status: int, python: str, folder: Path) -> RunFault:
    return RunFault(
        f"host {host.name} cannot be reached, or has not what the run needs",
        where="the host file",
        why=f"its ssh {ending_text(status)} before the run began; what it said is above, behind the host's name",
        fix=f"`ssh {host.address} true` must need no password, and {folder} and {python} must be there with meshloom",
    )


def _wait(
    controller: ControllerProcess, links: Sequence[Link], say: Callable[[str], None]
) -> tuple[int, list[tuple[Host, int]]]:
    """Wait for the controller's end. Where a host's connection ends before, the controller is given a moment to see it.

    Returns:
        The run's exit code, and hosts whose loss the controller did not see, each with the exit code of its ssh.
    """
    unreached: list[tuple[Host, int]] = []
    alone_since: float | None = None
    while not controller.ended:
        time.sleep(_LOOK_S)
        ended = [(host, status) for host, process in links if (status := process.poll()) is not None]
        if ended and alone_since is None:
            alone_since = time.monotonic()
            for host, status in ((host, status) for host, status in ended if status):
                say(f"{host.name}: ssh {ending_text(status)}")
        if alone_since is not None and time.monotonic() > alone_since + _ALONE_S:
            unreached = unreached or [(host, status) for host, status in ended if status]
            controller.end()
    return controller.wait(), unreached


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
