"""Workers on this machine, started by the controller.

Owns: the one attendant of this machine. Always holds: it ends with the controller, however that ends.
"""

import os
import subprocess
from collections.abc import Sequence

from meshloom.config.errors import RunFault
from meshloom.fabric.attendant import Ticket, import_path, python_command
from meshloom.fabric.processes import ending_text
from meshloom.fabric.seats import seats_of
from meshloom.fabric.site import Node, Peer, Site


class LocalSite(Site):
    """All workers on this machine.

    Args:
        devices: of the workers, by rank: ``cpu``, or ``cuda:1`` with the index that this process sees.
        node: name of this machine in messages.
        start_deadline_s: seconds in which the attendant must have called in.
    """

    def __init__(self, devices: Sequence[str], *, node: str = "node1", start_deadline_s: float = 60.0) -> None:
        super().__init__(host="127.0.0.1", start_deadline_s=start_deadline_s)
        self._own_seats = seats_of([(node, tuple(devices))])
        self._node = node
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        ticket = Ticket("127.0.0.1", self.port, self._secret.hex(), slots=len(self._own_seats), parent=os.getpid())
        command = python_command("attendant", "main", import_path())
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(ticket.text().encode() + b"\n")
        self._process.stdin.close()

    def _seated(self, attendants: Sequence[Peer]) -> tuple[Node, ...] | None:
        return (Node(self._node, attendants[0], self._own_seats, is_here=True),) if attendants else None

    def _check(self) -> None:
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            raise RunFault("the process that minds the workers did not start", why=f"it {ending_text(status)}")

    def abandon(self, node: Node) -> None:
        if self._process is not None:
            self._process.kill()  # the system ends its workers with it
        super().abandon(node)

    def _closed(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
