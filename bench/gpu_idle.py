"""``meshloom train`` with one whole step under the profiler: the share of it in which the GPU runs nothing.

Usage: python bench/gpu_idle.py train SETTINGS.yaml logging.loggers=[idle]

The third step is traced from the end of the second to its own end, everything the program does included. Kernels overlap,
so the union of their intervals counts. The result is ``idle.json`` in the run folder.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from torch.profiler import ProfilerActivity, profile

from meshloom import cli
from meshloom.observe.atomic import replace_file
from meshloom.observe.loggers import LoggerContext, register_logger

TRACED_STEP, RESULT = 3, "idle.json"
KERNELS, COPIES = ("kernel",), ("kernel", "gpu_memcpy", "gpu_memset")


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
            trace = self.folder / "trace.json"
            self.profiler.export_chrome_trace(str(trace))
            replace_file(self.folder / RESULT, [json.dumps(idle_shares(trace, seconds)).encode()])
            self.profiler = None

    def close(self) -> None:
        pass


def idle_shares(trace: Path, seconds: float) -> dict[str, float]:
    """Shares of a time in which no kernel ran, and neither a kernel nor a copy; and how many kernels there were."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    found = {"seconds": seconds, "kernels": float(sum(event.get("cat") in KERNELS for event in events))}
    for name, kinds in (("no_kernel", KERNELS), ("no_kernel_or_copy", COPIES)):
        intervals = ((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in kinds)
        found[name] = 1.0 - union_length(intervals) / 1e6 / seconds
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
