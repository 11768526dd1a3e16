"""Memory as measured at the boundaries of phases.

Owns: what a line of ``memory.jsonl`` says of the process. Refuses to know: which phase it is, what is held for whom. Always
holds: reading is free of side effects, but for the peak of a phase, which begins anew at each boundary.
"""

import sys

import psutil

from meshloom.observe.timing import take_peak_device_memory


def memory_now() -> dict[str, int]:
    """Bytes held: resident ones of the process; on a GPU also those allocated, those reserved by the allocator, and the most
    that were allocated since the last call."""
    found = {"resident_bytes": psutil.Process().memory_info().rss}
    if (peak := take_peak_device_memory()) is not None:
        cuda = sys.modules["torch"].cuda
        found |= {
            "allocated_bytes": cuda.memory_allocated(),
            "reserved_bytes": cuda.memory_reserved(),
            "peak_bytes": peak,
        }
    return found
