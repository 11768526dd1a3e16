"""Settings of code rewards: how a model's program is run, within which bounds, and what isolation is demanded.

Owns: their defaults, ranges and meaning. Refuses to know: how a sandbox is built.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshloom.config.base import Count, NotNegative, Place, Positive, Settings


class Isolation(StrEnum):
    """What separates a program from the machine; each is tried for real when a run starts."""

    NETWORK = "network"
    FILESYSTEM = "filesystem"
    PROCESSES = "processes"
    PROCESS_COUNT = "process_count"
    USER = "user"
    SYSTEM_CALLS = "system_calls"


class CodeSettings(Settings):
    """How the verifier ``code`` runs programs; read with ``reward.function: code``."""

    enabled: bool = False
    """Run programs that a model wrote on this machine. Off unless it is asked for; read docs/code-rewards.md before."""
    score: Literal["share", "all"] = "share"
    """``share``: the share of tests that pass; ``all``: 1 if all pass, else 0."""
    stop_at_failure: bool = False
    """Run no further tests after the first that fails; with ``score: all`` always so."""
    max_tests: Count | None = None
    """Use at most this many tests of a row, the first ones. Default: all. Test code counts as one piece."""
    tolerance: NotNegative = 1e-6
    """Relative and absolute difference up to which numbers with a fraction are equal; 0: only equal ones are."""
    cpu_s: Positive = 4.0
    """Processor seconds of a program on one test, all its processes together."""
    wall_s: Positive = 6.0
    """Seconds of a program on one test. All tests of a sample together get 0.8 of ``reward.deadline_s``."""
    memory_bytes: Annotated[int, Field(ge=2**26)] = 2**30
    """Memory of a program: address space of each process, and what all of them hold together."""
    disk_bytes: Annotated[int, Field(ge=2**16)] = 2**26
    """What a program may write into its folder."""
    output_bytes: Annotated[int, Field(ge=2**10)] = 2**22
    """What a program may print on one test."""
    processes: Count = 32
    """Processes and threads of a program at once."""
    open_files: Annotated[int, Field(ge=16)] = 64
    """Open files of each process."""
    python: Place | None = None
    """Interpreter that runs the programs, at least Python 3.11. Default: the one of this run, with its packages."""
    require: tuple[Isolation, ...] = (Isolation.NETWORK, Isolation.PROCESSES)
    """Isolation without which no run starts."""
