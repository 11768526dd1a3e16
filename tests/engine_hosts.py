"""Workers with an engine, for tests of replicas; the one of rank 0 has one sequence at a time, so it is far slower."""

import torch

from meshloom.fabric.seats import Seat
from meshloom.loop.worker_host import WorkerHost
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.attention import use_layouts
from tests.models import tiny_model


def engine_of(max_sequences: int) -> TorchEngine:
    """The same on each worker, and in the test."""
    torch.set_num_threads(1)
    model = tiny_model("llama")
    use_layouts(model)
    return TorchEngine(model, eos_ids=(1,), max_sequences=max_sequences, kv_cache_bytes=10**8)


class EngineHost(WorkerHost):
    """A worker whose engine has a tiny model of its own."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._engine = engine_of(1 if seat.rank == 0 else 8)
        self._replica = [seat.rank]
