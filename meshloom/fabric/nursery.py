"""The process that workers are forked from: what they all import is imported once.

Owns: importing, forking, and telling how a worker ended, which only a parent learns. Refuses to know: what workers do. Always
holds: it forks while it has one thread, and workers on the processor alone, since libraries of GPUs do not outlive a fork; all
others start as fresh interpreters. It ends when its attendant does, and its workers with it.

From the attendant, over a socket that keeps messages apart: a worker's ticket, with its log and the file for its stack. To it:
``pid`` of a rank, ``status`` of one that has ended.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshloom.fabric import worker
from meshloom.fabric.processes import die_with_parent, leave_termination_to_others
from meshloom.fabric.seats import Seat

_MESSAGE_BYTES = 2**16


def main() -> None:
    """Serve an attendant: its process, the socket's descriptor and the modules to import are the last three arguments."""
    parent, descriptor, modules = int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_termination_to_others()
    _import(modules)
    _Nursery(socket.socket(fileno=descriptor)).serve()


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        # What cannot be imported here cannot be there, where it is told.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is never collected stays shared with the workers


def _may_fork() -> bool:
    """Whether a fork of this process can go on: other threads, and what they hold, would not be there."""
    return len(os.listdir("/proc/self/task")) == 1


class _Nursery:
    """Forks workers and waits for them.

    Args:
        link: to the attendant.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._ranks: dict[int, int] = {}
        """Of the descriptor that tells a worker's end."""
        self._pids: dict[int, int] = {}

    def serve(self) -> None:
        """Start workers and tell their ends until the attendant closes the socket."""
        while True:
            ready, _, _ = select.select([self._link, *self._ranks], [], [])
            for one in ready:
                if one is not self._link:
                    self._reap(one)
                elif not self._start():
                    return

    def _start(self) -> bool:
        """Start the worker that is asked for; false if nothing is asked any more."""
        text, descriptors, _, _ = socket.recv_fds(self._link, _MESSAGE_BYTES, 2)
        if not text:
            return False
        ticket = json.loads(text)
        afresh = ticket["seat"]["device"] != "cpu" or not _may_fork()
        pid = os.fork()
        if pid == 0:
            _become_worker(ticket, *descriptors, self._link, afresh=afresh)
        for descriptor in descriptors:
            os.close(descriptor)
        watched = os.pidfd_open(pid)
        rank = self._ranks[watched] = int(ticket["seat"]["rank"])
        self._pids[watched] = pid
        self._tell({"rank": rank, "pid": pid})
        return True

    def _reap(self, watched: int) -> None:
        _, status = os.waitpid(self._pids.pop(watched), 0)
        os.close(watched)
        self._tell({"rank": self._ranks.pop(watched), "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the attendant is gone, which ends this process too
            self._link.send(json.dumps(message).encode())


def _become_worker(ticket: dict[str, Any], log: int, stack: int, link: socket.socket, *, afresh: bool) -> NoReturn:
    """In the child: never return to the nursery's loop."""
    code = 1
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        link.close()
        ticket |= {"stack": stack, "parent": os.getppid()}
        if afresh:
            _start_afresh(ticket, stack)
        _set_title(f"meshloom.fabric.worker {Seat(**ticket['seat'])}")
        worker.serve_by(ticket)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # whatever it is, it is told in the log, and by the exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def _start_afresh(ticket: dict[str, Any], stack: int) -> NoReturn:
    """Become a fresh interpreter with the ticket on its standard input."""
    from meshloom.fabric.attendant import import_path, python_command

    told = os.memfd_create("ticket", 0)
    os.write(told, json.dumps(ticket).encode())
    os.lseek(told, 0, os.SEEK_SET)
    os.dup2(told, 0)
    os.set_inheritable(stack, True)
    command = python_command("worker", "main", import_path())
    os.execv(command[0], command)


def _set_title(title: str) -> None:
    """Let lists of processes show what this one is, instead of what it was forked from."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
        start, end = int(fields[45]), int(fields[46])
        text = f"{sys.executable}\0{title}".encode()[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
