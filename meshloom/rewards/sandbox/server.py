"""The fork server of the sandbox: a small clean interpreter that starts programs in milliseconds.

Owns: finding the walls that can be had, and a child for each run. Refuses to know: programs, tests, answers: they travel in
files that only the children open, so nothing of one run is in the memory of the next. Always holds: it ends with the process
that started it, and everything it started ends with it.
"""

import gc
import importlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection
from dataclasses import replace

from meshloom.rewards.sandbox import confine, kernel, supervisor
from meshloom.rewards.sandbox.inside import JOBS
from meshloom.rewards.sandbox.limits import Limits, Means
from meshloom.rewards.sandbox.syscalls import NETWORK_ERRNO, filter_program

PRELOADED = (
    "bisect",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "traceback",
    "typing",
)
"""What programs import most; it is there already when one starts."""
_USERS = 2_000_000_000, 60_000
"""Numbers from which users are taken that run nothing else; a container may know only small ones."""
_SMALL_BLOCKS = 680
_USERS_OF_A_SERVER = 8
"""Runs that follow each other have users of their own where users tell them apart: the end of one is not another's."""
_MESSAGE_BYTES = 2**16
_STATIONS = kernel.NEW_MOUNTS | kernel.NEW_IPC | kernel.NEW_UTS


def serve(descriptor: int, without: Collection[str] = ()) -> None:
    """Say what means there are, then start a program for each message, until the other end closes.

    Args:
        descriptor: a packet socket.
        without: means not to use: ``namespaces``, ``own_user``, ``landlock``, ``filter``.
    """
    connection = socket.socket(fileno=descriptor)
    kernel.die_with_parent()
    for name in PRELOADED:
        importlib.import_module(name)
    means = _prepare(without)
    kernel.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the run decides when it ends
    if means.filter:
        filter_program()  # made once, not in each child
    gc.collect()
    gc.freeze()
    gc.disable()
    connection.send(means.to_bytes())
    for number in itertools.count():
        message, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 8)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            _run(message, files, _means_of_run(means, number))
        for file in files:
            os.close(file)


def _means_of_run(means: Means, number: int) -> Means:
    if means.namespaces or means.own_user is None:
        return means
    return replace(means, own_user=means.own_user + number % _USERS_OF_A_SERVER)


def _run(message: bytes, files: list[int], means: Means) -> None:
    request = json.loads(message)
    names = ("task", "stdin", "stdout", "stderr", "status", "result", "channel")
    numbers = dict(zip(names, [*files, None], strict=False))
    supervisor.run(supervisor.Descriptors(**numbers), Limits(**request["limits"]), means, JOBS[request["job"]])


def _prepare(without: Collection[str]) -> Means:
    """Put up the walls that all runs share; find which others each run can have."""
    missing: list[str] = []
    user, trouble = _free_user() if os.getuid() == 0 and "own_user" not in without else (None, "not wanted")
    if os.getuid() == 0 and user is None:
        missing.append(f"own_user: {trouble}")

    def found(name: str, attempt: Callable[[], object]) -> bool:
        trouble = "not wanted" if name in without else _trouble(attempt)
        if trouble:
            missing.append(f"{name}: {trouble}")
        return not trouble

    network = False
    contained = found("namespaces", lambda: _try_namespaces(user))
    if not contained and user is not None and (trouble := _trouble(lambda: _try_reading(user))):
        missing.append(f"own_user: {trouble}")
        user = None
    if contained:
        network = not _trouble(lambda: _enter_station(kernel.NEW_NET))
        _settle(user, kernel.NEW_NET if network else 0)
    filtered = found("filter", _try_filter)
    locked = not contained and found("landlock", _try_landlock)
    return Means(
        root=contained,
        namespaces=contained,
        empty_network=network,
        own_user=user,
        landlock=locked,
        filter=filtered,
        missing=tuple(missing),
    )


def _settle(user: int | None, more: int) -> None:
    _enter_station(more)
    confine.enter_root(confine.readable_paths())
    if user is not None:
        confine.become(user)


def _enter_station(more: int) -> None:
    """Namespaces that all runs share."""
    if os.getuid() == 0:
        kernel.unshare(_STATIONS | more)
    else:
        confine.enter_namespaces(_STATIONS | more, os.getuid())


def _try_namespaces(user: int | None) -> None:
    _settle(user, 0)
    confine.enter_namespaces(kernel.NEW_PID | kernel.NEW_MOUNTS, confine.INNER_USER)
    first = os.fork()
    if first == 0:
        os._exit(_exit_code(lambda: confine.own_folder(_SMALL)))
    if code := os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]):
        raise OSError(code, os.strerror(code))


_SMALL = Limits(cpu_s=1, wall_s=1, memory_bytes=2**20, disk_bytes=2**20, processes=1, open_files=1)


def _try_filter() -> None:
    kernel.forbid_new_privileges()
    kernel.install_filter(filter_program())
    try:
        socket.socket().close()
    except OSError as error:
        if error.errno == NETWORK_ERRNO:
            return
    raise OSError("a socket can be made in spite of the filter")


def _try_landlock() -> None:
    kernel.forbid_new_privileges()
    kernel.landlock(confine.readable_paths(), [])
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise OSError("files can be read in spite of the rules")


def _free_user() -> tuple[int | None, str]:
    """The first of a server's users that can be taken, or why there is none."""
    trouble = ""
    for base in _USERS:
        block = os.getpid() % _SMALL_BLOCKS if base < 2**16 else os.getpid()
        user = base + block * _USERS_OF_A_SERVER
        last = user + _USERS_OF_A_SERVER - 1
        trouble = _trouble(lambda last=last: confine.become(last))  # type: ignore[misc]
        if not trouble:
            return user, ""
    return None, trouble


def _try_reading(user: int) -> None:
    """Read the interpreter as another user, as programs must where they have no root of their own."""
    confine.become(user)
    for path in (sys.executable, os.__file__):
        with open(path, "rb"):
            pass


def _trouble(attempt: Callable[[], object]) -> str:
    """Make an attempt in a child; why it failed, or nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except OSError as error:
            os.write(write, (str(error) or "failed").encode()[:500])
        os._exit(0)
    os.close(write)
    trouble = os.read(read, 500).decode(errors="replace")
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return trouble or (f"its process ended with {code}" if code else "")


def _exit_code(attempt: Callable[[], object]) -> int:
    try:
        attempt()
    except OSError as error:
        return error.errno or 1
    return 0
