"""What separates a model's program from this machine, found by trying to get through.

Owns: the attempts, what they prove, and what is said of it. Refuses to know: how a sandbox is built. Always holds: a separation
counts as there only if an attempt to get through it was made and failed.
"""

import json
import os
import socket
import tempfile
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.code_settings import CodeSettings, Isolation
from meshloom.config.errors import UserError
from meshloom.rewards.sandbox.client import Sandbox, SandboxFault
from meshloom.rewards.sandbox.limits import Limits, Means

_MEANING: Mapping[Isolation, tuple[str, str]] = {
    Isolation.NETWORK: ("no network", "programs can reach the network"),
    Isolation.FILESYSTEM: (
        "no files but its folder and the interpreter's",
        "programs can read files that all users of this machine can read",
    ),
    Isolation.PROCESSES: (
        "no other process is seen or signalled",
        "what programs start may outlive them, and may signal this user's processes",
    ),
    Isolation.PROCESS_COUNT: (
        "the kernel bounds the number of processes",
        "the number of processes is bounded only by a look every 15 ms",
    ),
    Isolation.USER: ("another user's rights", "programs run with this user's rights"),
    Isolation.SYSTEM_CALLS: ("a filter of system calls", "there is no filter of system calls"),
}

_ATTEMPTS = """
import json, os, socket, sys
told = json.loads(sys.stdin.read())
got = {}

def attempt(name, action):
    try:
        got[name] = bool(action())
    except (OSError, ValueError):
        got[name] = False

def call():
    with socket.create_connection(("127.0.0.1", told["port"]), timeout=2) as one:
        one.sendall(b"through")
    return True

def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        return one.sendto(b"through", ("127.0.0.1", told["datagrams"])) > 0

def write():
    with open(os.path.join(told["folder"], "written"), "w") as file:
        return file.write("through")

def count():
    read, write = os.pipe()
    children = []
    try:
        for _ in range(told["most"]):
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            children.append(child)
        return True
    finally:
        os.close(write)
        for child in children:
            os.waitpid(child, 0)

attempt("call", call)
attempt("datagram", datagram)
attempt("read", lambda: "secret" in open(told["secret"]).read())
attempt("write", write)
attempt("signal", lambda: os.kill(told["process"], 0) is None)
attempt("environment", lambda: open("/proc/%d/environ" % told["process"]).read() is not None)
attempt("count", count)
try:
    import ctypes
    # the answer to an argument that is not valid tells whether the call arrives at all
    ctypes.set_errno(0)
    ctypes.CDLL(None, use_errno=True).unshare(0x40)
    got["calls"] = ctypes.get_errno() != 1
except ImportError:
    got["calls"] = True
got["id"] = os.getuid()
print(json.dumps(got))
"""
_COUNT = 12


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was achieved, and by which of the kernel's means."""

    achieved: frozenset[Isolation]
    means: Means

    @property
    def missing(self) -> list[Isolation]:
        return [one for one in Isolation if one not in self.achieved]

    def text(self) -> str:
        """One line for people."""
        there = ", ".join(text for one, (text, _) in _MEANING.items() if one in self.achieved) or "nothing"
        line = f"programs of the model run behind: {there}"
        lacks = "; ".join(text for one, (_, text) in _MEANING.items() if one not in self.achieved)
        return (
            f"{line}. Missing: {lacks} ({'; '.join(self.means.missing) or 'tried and got through'})" if lacks else line
        )

    def record(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "achieved": sorted(self.achieved),
            "missing": {str(one): _MEANING[one][1] for one in self.missing},
            "means_missing": list(self.means.missing),
        }


def find_isolation(settings: CodeSettings, without: Collection[str] = ()) -> Found:
    """Try to get through each separation, from a program in the sandbox.

    Raises:
        SandboxFault: if no program can be run.
    """
    limits = Limits(
        cpu_s=20, wall_s=60, memory_bytes=2**30, disk_bytes=2**20, processes=_COUNT // 2, open_files=settings.open_files
    )
    with ExitStack() as resources:
        sandbox = resources.enter_context(Sandbox(settings.python, without))
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        (folder / "secret").write_text("secret")
        listener = resources.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagrams = resources.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(("127.0.0.1", 0))
        told = {
            "port": listener.getsockname()[1],
            "datagrams": datagrams.getsockname()[1],
            "secret": str(folder / "secret"),
            "folder": str(folder),
            "process": os.getpid(),
            "most": _COUNT,
        }
        got = _attempt(sandbox, limits, {**told, "most": 0})
        counted = _attempt(sandbox, limits, told)
        arrived = _has_any(listener, datagrams)
        written = (folder / "written").exists()
        own = sandbox.means.own_user is not None
    if got is None:
        raise SandboxFault("the first program in the sandbox was stopped")
    free = {
        Isolation.NETWORK: got["call"] or got["datagram"] or arrived,
        Isolation.FILESYSTEM: got["read"] or got["write"] or written,
        Isolation.PROCESSES: got["signal"] or got["environment"] or not _dies_whole(sandbox.means),
        Isolation.PROCESS_COUNT: counted is None or counted["count"],
        Isolation.USER: got["id"] == 0 or not (own or sandbox.means.namespaces),
        Isolation.SYSTEM_CALLS: got["calls"],
    }
    return Found(achieved=frozenset(one for one, is_free in free.items() if not is_free), means=sandbox.means)


def _attempt(sandbox: Sandbox, limits: Limits, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a program got through to; nothing if it had to be stopped.

    Raises:
        SandboxFault: if it could not be run.
    """
    stdin = json.dumps(told).encode()
    outcome = sandbox.run("script", {"source": _ATTEMPTS}, limits, output_bytes=2**16, stdin=stdin)
    if outcome.ending.stopped:
        return None
    try:
        return json.loads(outcome.output)
    except ValueError as error:
        why = f"the first program in the sandbox failed: {outcome.complaint or outcome.ending}"
        raise SandboxFault(why) from error


def _has_any(listener: socket.socket, datagrams: socket.socket) -> bool:
    """Whether anything arrived from the program."""
    for one in (listener, datagrams):
        one.settimeout(0.01)
    try:
        listener.accept()[0].close()
        return True
    except TimeoutError:
        pass
    try:
        return bool(datagrams.recv(100))
    except TimeoutError:
        return False


def _dies_whole(means: Means) -> bool:
    """Whether all that a program starts ends with it for certain."""
    return means.namespaces or means.own_user is not None


def require_isolation(settings: CodeSettings, without: Collection[str] = ()) -> Found:
    """Find what isolation there is, and refuse to start without what is demanded.

    Raises:
        UserError: if programs cannot be run, or less is there than ``reward.code.require`` says.
    """
    try:
        found = find_isolation(settings, without)
    except SandboxFault as error:
        raise UserError(
            "programs of the model cannot be run on this machine",
            where="reward.code",
            why=str(error),
            fix="code rewards need Linux and Python 3.11 or later; see docs/code-rewards.md",
        ) from error
    lacking = [one for one in settings.require if one not in found.achieved]
    if lacking:
        raise UserError(
            f"the isolation that is demanded is not there: {', '.join(lacking)}",
            where="reward.code.require",
            why=f"tried for real: {found.text()}",
            fix="allow user namespaces on this machine (or run as root with CAP_SYS_ADMIN), or demand less: "
            f"reward.code.require=[{', '.join(one for one in settings.require if one not in lacking)}]",
        )
    return found
