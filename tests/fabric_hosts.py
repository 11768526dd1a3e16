"""Host objects of the fabric's tests."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.fabric.dispatch import from_replicas, split
from meshloom.fabric.seats import Seat
from meshloom.fabric.verbs import emit, verb


class Host:
    """Does a little of everything."""

    def __init__(self, seat: Seat, greeting: str = "hello") -> None:
        self.seat, self.greeting = seat, greeting
        print(f"host of rank {seat.rank} is made")

    @verb()
    def where(self) -> dict[str, Any]:
        return {"seat": self.seat, "pid": os.getpid(), "greeting": self.greeting}

    @verb()
    def group(self) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        return {"backend": dist.get_backend(), "size": dist.get_world_size(), "threads": torch.get_num_threads()}

    @verb()
    def same(self, value: Any) -> Any:
        return value

    @verb(dispatch=split("numbers"), collect=from_replicas)
    def total(self, numbers: list[int], plus: int = 0) -> int:
        return sum(numbers) + plus

    @verb()
    def summed(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        number = torch.tensor([value])
        dist.all_reduce(number)
        return float(number)

    @verb()
    def count(self, times: int) -> str:
        for number in range(times):
            emit(number)
        return "done"

    @verb()
    def fail(self, rank: int, user: bool, wait: bool) -> None:
        if self.seat.rank == rank:
            if user:
                raise UserError("no such file", where="data.files", why="it is gone", fix="name another")
            raise KeyError("lost key")
        if wait:
            self.summed(1.0)

    @verb()
    def hang(self, rank: int) -> None:
        """All wait in a collective, but for one rank, which is busy with itself."""
        if self.seat.rank == rank:
            print("about to hang")
            self.sleep()
        self.summed(1.0)

    @verb()
    def sleep(self) -> None:
        emit("asleep")
        while True:
            time.sleep(0.05)

    @verb()
    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """One rank is ended by a signal, while the others are in a collective that needs it."""
        if self.seat.rank == rank:
            os.kill(os.getpid(), number)
        self.summed(1.0)

    @verb()
    def report(self, size: int) -> bytes:
        """Much to send."""
        return bytes(size)

    @verb()
    def sum_on(self) -> None:
        """Collective after collective, without end."""
        while True:
            self.summed(1.0)

    @verb()
    def wait_for_none(self) -> None:
        """All wait for a message that nobody sends."""
        import torch
        import torch.distributed as dist

        dist.recv(torch.zeros(1), src=(self.seat.rank + 1) % self.seat.world_size)

    @verb()
    def write_much(self, folder: Path) -> None:
        """Begin to write what is never written."""

    @verb()
    def snapshot_written(self) -> bool:
        return self.seat.rank == 0

    @verb()
    def ends_of_children(self) -> list[int]:
        """How a process that is forked, and a program that is started, end by SIGTERM."""
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.start()
        forked.terminate()
        forked.join()
        started = subprocess.Popen(["sleep", "600"])
        started.terminate()
        return [forked.exitcode, started.wait()]

    def close(self) -> None:
        print(f"host of rank {self.seat.rank} is closed")

    def hidden(self) -> None:
        """Not a verb."""
