"""Parts of a model that leave the GPU and come back: bytes a second each way, beside those of one large pinned copy.

Usage: python bench/gpu_offload.py --size 7b [--place host|disk] [--folder FOLDER] [--repeats 5]

The model has Qwen2.5's shapes in bfloat16, with the masters and moments of its optimizer in float32. Each part is parked and
fetched; the first time, which takes the pinned memory, is shown apart.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from gpu_common import common_arguments, console, print_ratio, print_table, require_gpu, synchronize, versions_line
from gpu_models import SHAPES, config_of
from transformers import AutoModelForCausalLM

from meshloom.config.settings import ModelSettings, OptimizerSettings
from meshloom.plan.residency import Residency
from meshloom.plan.stays import Part
from meshloom.train.attention import use_layouts
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.residency import ResidentModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def trained(size: str) -> TrainedModel:
    """A model of random weights whose optimizer has moments."""
    with DEVICE:
        config = config_of(SHAPES[size], SHAPES[size].vocabulary or 300)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    use_layouts(module)
    settings = ModelSettings(path="-", compile=False)
    model = TrainedModel(module, settings, MicrobatchBound(1024), OptimizerSettings(lr=1e-6))
    for master in model.optimizer.masters.values():
        kinds = {kind: torch.zeros_like(master.detach()) for kind in ("exp_avg", "exp_avg_sq")}
        model.optimizer.adamw.state[master] = {"step": torch.zeros((), device=DEVICE), **kinds}
    return model


def timed(work: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def pinned_bandwidth(num_bytes: int) -> float:
    """Bytes a second of one large copy between the host's pinned memory and the device."""
    here = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    return num_bytes / min(timed(lambda: there.copy_(here, non_blocking=True)) for _ in range(3))


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--size", default="1.5b", choices=[*SHAPES])
    parser.add_argument("--place", default="host", choices=["host", "disk"])
    parser.add_argument("--folder", type=Path, help="for files; default: a temporary one")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    require_gpu(arguments.tiny)
    out = console()
    out.print(versions_line())
    size, repeats = ("tiny", 1) if arguments.tiny else (arguments.size, arguments.repeats)
    bandwidth = pinned_bandwidth(2**20 if arguments.tiny else 2**30)
    out.print(f"one pinned copy: {bandwidth / 1e9:.1f} GB/s")
    model, rows, slowest = trained(size), [], float("inf")
    with tempfile.TemporaryDirectory() as temporary:
        places = dict.fromkeys(Part, Residency(arguments.place))
        around = ResidentModel("actor", model, places, folder=arguments.folder or Path(temporary))
        for part in Part:
            before = around.held_bytes(part)
            first = timed(lambda: around.park(part))  # noqa: B023
            out_s, back_s = [], []
            for repeat in range(repeats):
                back_s.append(timed(lambda: (around.fetch(part), around.wait(part))))  # noqa: B023
                model.optimizer.updates = repeat + 1  # it has changed, and is copied
                out_s.append(timed(lambda: (around.park(part), around.settle())))  # noqa: B023
            rates = [before / min(seconds) for seconds in (out_s, back_s)]
            slowest = min(slowest, *rates)
            rows.append(
                (part, f"{before / 1e9:.2f} GB", *(f"{rate / 1e9:.1f} GB/s" for rate in rates), f"{first:.2f} s")
            )
        around.close()
    print_table(out, f"{size}, {arguments.place}", ("part", "bytes", "away", "back", "first time away"), rows)
    print_ratio(out, f"{size}, {arguments.place}", slowest / bandwidth, "slowest way ÷ one pinned copy")


if __name__ == "__main__":
    main()
