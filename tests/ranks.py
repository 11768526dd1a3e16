"""Processes that tests run functions on side by side, joined over gloo; started once and used by all tests of a file."""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_DEADLINE_S = 400.0


class Ranks:
    """A world of processes. After a failure the next call starts it anew.

    Args:
        count: of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start(self) -> None:
        # One process imports what all of them need, and they begin as copies of it.
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.mesh_checks"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self._count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._count, port, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a module's function on all ranks, and return what each of them returns.

        Raises:
            RuntimeError: with the traceback of a rank that raised, or names one that did not answer in time.
        """
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function, args))
        found: dict[int, Any] = {}
        while len(found) < len(self._ends):
            waited = {end: rank for rank, end in enumerate(self._ends) if rank not in found}
            ready = wait(list(waited), _DEADLINE_S)
            if not ready:
                self.close()
                raise RuntimeError(f"ranks {sorted(waited.values())} did not answer")
            for end in ready:
                ok, found[waited[end]] = end.recv()
                if not ok:
                    self.close()  # other ranks may wait for this one
                    raise RuntimeError(f"rank {waited[end]}:\n{found[waited[end]]}")
        return [found[rank] for rank in range(len(self._ends))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []


def _serve(rank: int, count: int, port: int, calls: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    while True:
        try:
            function, args = calls.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        calls.send(answer)
