"""Weights between ranks of one node: seconds of a movement beside those of the bytes over the link.

Usage: python bench/gpu_reshard.py --size 7b [--ranks 2] [--repeats 5]

The trainer's weights are float32 and sharded over all ranks; engines hold bfloat16 whole (dp) or in parts (tp) on the same
ranks, or, split, on the second half of the ranks while the first half trains. One rank a GPU, over NCCL; with --tiny on
processors over gloo. The link is what one rank receives in a large exchange between two ranks.
"""

import os
import socket
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
import torch.distributed as dist
from gpu_common import common_arguments, console, print_ratio, print_table, require_gpu, synchronize, versions_line
from gpu_models import SHAPES, config_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshloom.weights.layouts import Axis, Box, Grid, boxes
from meshloom.weights.reshard import Resharder
from meshloom.weights.shards import Part, TensorTaker

_ROWS = ("o_proj.weight", "down_proj.weight")
_COLUMNS = tuple(f"{name}_proj.{leaf}" for name in ("q", "k", "v", "gate", "up") for leaf in ("weight", "bias"))


class Shards:
    """A rank's shards, of one number."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], grid: Grid, device: torch.device) -> None:
        rank = dist.get_rank()
        self._boxes = {name: boxes(shape, grid, [Axis(0, 0)])[rank] for name, shape in shapes.items()}
        self._shapes = shapes
        self._now = {name: torch.randn(box.shape, device=device) for name, box in self._boxes.items()}

    def parts(self) -> dict[str, Part]:
        return {name: Part(self._shapes[name], (box,), torch.float32) for name, box in self._boxes.items()}

    def begin(self) -> None:
        """Nothing moves."""

    def read(self, name: str, box: Box) -> Tensor:
        return box.of(self._now[name], self._boxes[name])


def shapes_of(size: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config_of(SHAPES[size], SHAPES[size].vocabulary or 300))
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def taker(shapes: dict[str, tuple[int, ...]], grid: Grid, tensor: bool, device: torch.device) -> TensorTaker:
    held = {}
    for name, shape in shapes.items():
        dim = 1 if name.endswith(_ROWS) else 0 if name.endswith(_COLUMNS) else None
        box = boxes(shape, grid, [Axis(0, dim)] if tensor and dim is not None else [])[dist.get_rank()]
        held[name] = (shape, box, torch.empty(box.shape, dtype=torch.bfloat16, device=device))
    return TensorTaker(held)


def link(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that a rank receives while it sends as many to its neighbour."""
    here, there = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    peer, took = dist.get_rank() ^ 1, []
    for _ in range(4):
        synchronize()
        start = time.perf_counter()
        pairs = [dist.P2POp(dist.isend, here, peer), dist.P2POp(dist.irecv, there, peer)]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        synchronize()
        took.append(time.perf_counter() - start)
    return num_bytes / min(took)


def cases(count: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], bool]]:
    """Name, ranks that give, ranks that take, whether engines are cut."""
    everyone, half = tuple(range(count)), count // 2
    yield f"fsdp {count} → dp {count}, the same devices", everyone, everyone, False
    yield f"fsdp {count} → tp {count}, the same devices", everyone, everyone, True
    yield f"fsdp {half} → dp {half}, split", everyone[:half], everyone[half:], False


def on_rank(rank: int, count: int, port: int, size: str, repeats: int, told: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=count, device_id=device if gpu else None)
    shapes, rows = shapes_of(size), []
    rate = link(device, 2**28 if gpu else 2**16)
    for name, giving, taking, tensor in cases(count):
        give = Shards(shapes, Grid((len(giving),), giving), device) if rank in giving else None
        take = taker(shapes, Grid((len(taking),), taking), tensor, device) if rank in taking else None
        resharder = Resharder(give, take, device=device)
        took = []
        for version in range(repeats + 1):
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            moved = resharder.move(version)
            synchronize()
            took.append(time.perf_counter() - start)
        rows.append((name, moved.received_bytes, moved.local_bytes, min(took[1:]), resharder.buffer_bytes))
        del give, take, resharder
    told.put((rank, rate, rows))
    told.close()
    told.join_thread()
    dist.destroy_process_group()


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--size", default="7b", choices=[*SHAPES])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    require_gpu(arguments.tiny)
    out = console()
    out.print(versions_line())
    size, repeats = ("tiny", 1) if arguments.tiny else (arguments.size, arguments.repeats)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    told = context.Queue()
    ranks = [
        context.Process(target=on_rank, args=(rank, arguments.ranks, port, size, repeats, told))
        for rank in range(arguments.ranks)
    ]
    for process in ranks:
        process.start()
    found = sorted(told.get(timeout=600) for _ in ranks)
    for process in ranks:
        process.join()
    rate = min(each[1] for each in found)
    out.print(f"link: {rate / 1e9:.1f} GB/s each way")
    rows, ratios = [], []
    for place, (name, *_) in enumerate(found[0][2]):
        received, local, seconds, buffers = (max(each[2][place][i] for each in found) for i in range(1, 5))
        ratios.append(seconds * rate / max(1, received))
        sizes = (f"{count / 1e9:.2f} GB" for count in (received, local, buffers))
        rows.append((name, *sizes, f"{1e3 * seconds:.1f} ms", f"{ratios[-1]:.2f}"))
    headings = ("layouts", "received by a rank", "copied", "buffers", "movement", "÷ bytes over the link")
    print_table(out, f"{size}, {arguments.ranks} ranks", headings, rows)
    print_ratio(out, size, max(ratios), "seconds of the slowest movement ÷ seconds of its bytes over the link")


if __name__ == "__main__":
    main()
