"""The process that minds the workers of a node: it starts them, watches them as their parent, and ends them.

Owns: the workers' processes and log files on this machine. Refuses to know: torch, and what workers do. Always holds: no worker
outlives it, and it does not outlive the controller's connection; a worker's end is told with the signal or exit code, since
only a parent learns it; it exits with the code that the controller says.

To the controller: ``hello`` (who it is), ``beat`` (every second; ranks that are stopped), ``died`` (a rank, how), ``seen`` (the
answer to ``look``), ``ended`` (all workers are gone). From it: ``launch`` (seats), ``look`` (a rank's log and stack), ``stop``
(end all workers), ``end`` (exit with a code, and print why).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Self

from meshloom.config.environment import worker_environment
from meshloom.fabric import processes
from meshloom.fabric.channel import ChannelClosed, connect
from meshloom.fabric.stacks import python_stack

BEAT_S = 1.0
GRACE_S = 2.0
UNANSWERED_S = 15.0
"""Seconds without a sign of life from the controller's machine after which it is lost."""
_MESSAGE_BYTES = 2**16
LOST_CODE = 3
"""Exit code when the controller is gone."""
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from meshloom.fabric.{module} import {function}; {function}()"
)


@dataclass(frozen=True)
class Ticket:
    """What an attendant needs to find its controller.

    Args:
        host, port: where the controller listens.
        secret: of the run, as hexadecimal digits.
        node: name of this machine; empty: its host name.
        slots: workers that this attendant minds.
        node_index: of its node in the launcher's order.
        local_rank: of the first of its workers on the node.
        parent: process whose end this one does not outlive; none where only the connection counts.
        holds_input: whoever started it holds its standard input, whose end it does not outlive either.
    """

    host: str
    port: int
    secret: str
    node: str = ""
    slots: int = 1
    node_index: int = 0
    local_rank: int = 0
    parent: int | None = None
    holds_input: bool = False

    def text(self) -> str:
        """As one line of JSON."""
        return json.dumps(vars(self))

    @classmethod
    def of(cls, text: str, **changes: Any) -> Self:
        """The ticket that ``text`` wrote, with changes."""
        return cls(**{**json.loads(text), **changes})


def python_command(module: str, function: str, path: list[str]) -> list[str]:
    """A fresh interpreter that calls a function of this package, without importing this process's main program.

    Args:
        module, function: of ``meshloom.fabric``.
        path: import path of the interpreter.
    """
    return [sys.executable, "-c", _START.format(module=module, function=function), json.dumps(path)]


def import_path() -> list[str]:
    """This process's import path, without relative entries."""
    return [entry or str(Path.cwd()) for entry in sys.path]


@dataclass(eq=False)
class _Minded:
    """A worker: its process once it has one, its log, and the file that it writes its stack to."""

    rank: int
    log: Path
    stack: Any
    pid: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Attendant:
    """Minds workers for a controller.

    Args:
        ticket: where the controller is.
        spare: children of this process that are none of the workers', but the controller, which tells its errors itself.
    """

    def __init__(self, ticket: Ticket, spare: Sequence[int] = ()) -> None:
        self._ticket, self._spare = ticket, tuple(spare)
        self._secret = bytes.fromhex(ticket.secret)
        self._minded: dict[int, _Minded] = {}
        self._nurseries: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._memory_kills = processes.memory_kills()
        self._closed = threading.Event()
        self._terminated = False
        self._channel = connect(ticket.host, ticket.port, self._secret)

    def run(self) -> int | None:
        """Serve until the controller says the end; the exit code, or none if the controller is gone."""
        processes.adopt_orphans()
        ticket = self._ticket
        hello = {"node": ticket.node, "node_index": ticket.node_index, "local_rank": ticket.local_rank}
        hello |= {"slots": ticket.slots, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            self._channel.send({"kind": "hello", "role": "attendant", **hello})
            threading.Thread(target=self._beat, name="beat", daemon=True).start()
            if ticket.holds_input:
                threading.Thread(target=self._watch_input, name="input", daemon=True).start()
            while True:
                message, _ = self._channel.receive()
                if message["kind"] == "end":
                    if message["text"] and not self._spare:
                        print(message["text"], file=sys.stderr, flush=True)
                    return int(message["code"])
                self._do(message)
        except ChannelClosed:
            print("the controller of this run is gone", file=sys.stderr, flush=True)
            return None
        finally:
            self._closed.set()
            self._end_workers(grace_s=GRACE_S)
            processes.end_descendants(self._spare)
            self._channel.close()

    def terminated(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        if self._terminated:
            raise SystemExit(128 + number)
        self._terminated = True
        # The main thread may be sending: a thread waits for its turn.
        threading.Thread(target=self._tell_terminated, name="terminated", daemon=True).start()

    def _tell_terminated(self) -> None:
        with suppress(ChannelClosed):
            self._channel.send({"kind": "terminated"})

    def _do(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "launch":
                try:
                    self._launch(message)
                except OSError as error:
                    rank = message["seats"][0]["rank"]
                    self._channel.send({"kind": "died", "rank": rank, "text": f"could not be started: {error}"})
            case "look":
                threading.Thread(target=self._look, args=(message,), daemon=True).start()
            case "stop":
                self._end_workers(grace_s=float(message["grace_s"]))
                self._channel.send({"kind": "ended"})

    def _launch(self, message: Mapping[str, Any]) -> None:
        """Start the workers of all seats: they are forked from a process that imports once what they share."""
        seats, logs = message["seats"], Path(message["logs"])
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        on_cpu = seats[0]["device"] == "cpu"
        threads = max(1, cores // int(message["local_size"])) if on_cpu else 1
        modules = message["modules"] if on_cpu else []  # a worker on a GPU is not forked
        logs.mkdir(parents=True, exist_ok=True)
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = python_command("nursery", "main", import_path())
        with other, _open_log(logs, seats[0]) as output:
            nursery = subprocess.Popen(
                [*command, str(os.getpid()), str(other.fileno()), json.dumps(modules)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=worker_environment(threads=threads, one_node=message["one_node"]),
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self._nurseries.append((nursery, own))
        with suppress(OSError):  # it has ended, which is told
            for seat in seats:
                self._ask_for(seat, logs, own)
        threading.Thread(target=self._hear, args=(nursery, own, list(self._minded.values())), daemon=True).start()

    def _ask_for(self, seat: Mapping[str, Any], logs: Path, nursery: socket.socket) -> None:
        rank = int(seat["rank"])
        stack = open(os.memfd_create("stack"), "w+b")  # noqa: SIM115  # a full disk for scratch files is none of its business
        self._minded[rank] = _Minded(rank, _log_of(logs, seat), stack)
        place = {"host": self._channel.peer_host, "port": self._ticket.port, "secret": self._ticket.secret}
        with _open_log(logs, seat) as log:
            text = json.dumps({**place, "seat": dict(seat)}).encode()
            socket.send_fds(nursery, [text], [log.fileno(), stack.fileno()])

    def _hear(self, nursery: "subprocess.Popen[bytes]", link: socket.socket, minded: Sequence[_Minded]) -> None:
        """Hear of workers' starts and ends until the nursery has ended."""
        by_rank = {one.rank: one for one in minded}
        with suppress(OSError):
            while text := link.recv(_MESSAGE_BYTES):
                told = json.loads(text)
                if "pid" in told:
                    by_rank[told["rank"]].pid = told["pid"]
                else:
                    self._tell_end(by_rank[told["rank"]], told["status"])
        status = nursery.wait()
        for one in minded:
            if not one.ended.is_set():
                self._tell_end(one, status)

    def _tell_end(self, minded: _Minded, status: int) -> None:
        minded.ended.set()
        text = processes.ending_text(status)
        if status == -signal.SIGKILL and processes.memory_kills() > self._memory_kills:
            text += ": the system ended it for want of memory"
        with suppress(ChannelClosed):
            self._channel.send({"kind": "died", "rank": minded.rank, "status": status, "text": text})

    def _beat(self) -> None:
        parent = self._ticket.parent
        while not self._closed.wait(BEAT_S):
            if parent is not None and os.getppid() != parent:
                self._channel.close()  # a child that the controller forked can keep the connection open after its death
                return
            # Before it sends: what was sent a beat ago has had its time, also where this process was held meanwhile.
            if self._channel.unanswered_s() > UNANSWERED_S:
                self._channel.close()
                return
            stopped = [one.rank for one in list(self._minded.values()) if one.pid and processes.is_stopped(one.pid)]
            try:
                self._channel.send({"kind": "beat", "stopped": stopped})
            except ChannelClosed:
                self._channel.close()
                return

    def _watch_input(self) -> None:
        sys.stdin.read()
        self._channel.close()

    def _look(self, message: dict[str, Any]) -> None:
        minded = self._minded[int(message["rank"])]
        lives = minded.pid is not None and not minded.ended.is_set()
        stack = python_stack(minded.pid, minded.stack.fileno()) if message["stack"] and lives and minded.pid else []
        seen = {"log": str(minded.log), "tail": processes.last_lines(minded.log), "stack": stack}
        with suppress(ChannelClosed):
            self._channel.send({"kind": "seen", "id": message["id"], "rank": minded.rank, **seen})

    def _end_workers(self, *, grace_s: float) -> None:
        minded = list(self._minded.values())
        processes.end_groups((one.pid for one in minded if one.pid and not one.ended.is_set()), grace_s=grace_s)
        for nursery, link in self._nurseries:
            # Its own end comes last: the workers are killed with it.
            link.close()
            processes.end_groups([nursery.pid], grace_s=0.0)
            nursery.wait()
        for one in minded:
            one.stack.close()
        self._minded.clear()
        self._nurseries.clear()


def _log_of(logs: Path, seat: Mapping[str, Any]) -> Path:
    return logs / f"rank-{seat['rank']}.log"


def _open_log(logs: Path, seat: Mapping[str, Any]) -> BinaryIO:
    return _log_of(logs, seat).open("ab")


def attend(ticket: Ticket, spare: Sequence[int] = ()) -> int | None:
    """Mind workers until the run ends; the exit code, or none if the controller is gone.

    SIGTERM is passed on to the controller, which may save before it ends; a second one ends the workers at once. Ctrl-C is the
    controller's to act on.
    """
    try:
        attendant = Attendant(ticket, spare)
    except ChannelClosed as error:
        print(f"the controller of this run cannot be reached: {error}", file=sys.stderr, flush=True)
        return None
    signal.signal(signal.SIGTERM, attendant.terminated)
    return attendant.run()


def main() -> None:
    """Mind workers by the ticket on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ticket = Ticket.of(sys.stdin.readline())
    code = attend(ticket)
    sys.exit(LOST_CODE if code is None else code)


if __name__ == "__main__":
    main()
