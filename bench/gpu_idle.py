"""``meshloom train`` with one whole step under the profiler: the share of it in which the GPU runs nothing.

Usage: python bench/gpu_idle.py train SETTINGS.yaml logging.loggers=[idle]

The third step (or the one that ``BENCH_TRACED_STEP`` says) is traced from the end of the one before to its own end,
everything the program does included. Kernels overlap, so the union of their intervals counts. The result is ``idle.json``
in the run folder.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshloom import cli
from meshloom.observe.atomic import replace_file
from meshloom.observe.loggers import LoggerContext, register_logger

TRACED_STEP, RESULT = int(os.environ.get("BENCH_TRACED_STEP", "3")), "idle.json"
COPIES = ("Memcpy", "Memset")


@register_logger("idle")
class IdleLogger:
    """Starts the profiler at the end of the step before, and writes what it saw at the end of the traced one."""

    def __init__(self, context: LoggerContext) -> None:
        self.folder = context.run_dir
        self.profiler: profile | None = None
        self.began = 0.0

    def log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == TRACED_STEP - 1:
            torch.cuda.synchronize()
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
            self.began = time.perf_counter()
        elif self.profiler is not None:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self.began
            self.profiler.stop()
            shares = idle_shares(self.profiler.profiler.kineto_results.events(), seconds)
            replace_file(self.folder / RESULT, [json.dumps(shares).encode()])
            self.profiler = None

    def close(self) -> None:
        pass


def idle_shares(events: Iterable[Any], seconds: float, device: DeviceType = DeviceType.CUDA) -> dict[str, float]:
    """Shares of a time in which no kernel ran, and neither a kernel nor a copy; and how many kernels there were.

    Args:
        events: the profiler's own (reading them takes a second where exporting a trace takes a minute).
        seconds: what they happened in.
        device: whose events count.
    """
    ours = [event for event in events if event.device_type() == device and not event.is_user_annotation()]
    kernels = [event for event in ours if not event.name().startswith(COPIES)]
    found = {"seconds": seconds, "kernels": float(len(kernels))}
    for name, counted in (("no_kernel", kernels), ("no_kernel_or_copy", ours)):
        intervals = ((event.start_ns(), event.start_ns() + event.duration_ns()) for event in counted)
        found[name] = 1.0 - union_length(intervals) / 1e9 / seconds
    return found


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length that intervals cover together."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


if __name__ == "__main__":
    sys.exit(cli.main())
