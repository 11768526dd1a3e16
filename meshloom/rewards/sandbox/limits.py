"""What a program may use, and how it ended: what client and server of the sandbox tell each other.

Always holds: both sides read and write plain JSON.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one run of a program.

    Args:
        cpu_s: processor time of all its processes together.
        wall_s: seconds from its start to its end.
        memory_bytes: address space of each process, and what all of them together hold.
        disk_bytes: what its folder holds.
        processes: processes and threads at once.
        open_files: open files of a process.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    disk_bytes: int
    processes: int
    open_files: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a program ended, as its supervisor saw it.

    Args:
        fault: why the sandbox could not run it; empty otherwise.
        exit_code: of the main process; none if a signal ended it or it was stopped.
        signal: that ended the main process.
        stopped: which bound it passed: ``cpu``, ``wall``, ``memory``, ``disk``; empty: none.
        cpu_s, wall_s: what it took.
        peak_bytes, peak_processes: the most that was seen.
    """

    fault: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stopped: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_bytes: int = 0
    peak_processes: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_bytes(line: bytes) -> "Ending":
        """Raises ValueError or TypeError if the line is none of ``to_bytes``."""
        return Ending(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class Means:
    """The kernel's means that a server found it can use. Each was tried, not asked for.

    Args:
        root: a root of its own, read-only, with the interpreter and the system's libraries in it.
        namespaces: new user, process and mount namespaces for each run.
        empty_network: a network namespace without any device.
        own_user: number of a user that runs nothing else, a run's own where there are no namespaces; none: the user of the run.
        landlock: rules on files where there is no root of its own.
        filter: the filter of system calls.
        missing: what could not be had, with the kernel's reason.
    """

    root: bool = False
    namespaces: bool = False
    empty_network: bool = False
    own_user: int | None = None
    landlock: bool = False
    filter: bool = False
    missing: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_bytes(line: bytes) -> "Means":
        fields = json.loads(line)
        return Means(**{**fields, "missing": tuple(fields["missing"])})
