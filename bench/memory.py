"""Peak memory of this process, for benchmarks that give each side a process of its own.

Owns: one number. Always holds: it is of this process's own memory, not of the one that started it.
"""

import resource
from pathlib import Path


def peak_bytes() -> int:
    """Most resident bytes of this process so far.

    Linux keeps the peak of the starting process in ``ru_maxrss`` of a new one, so the kernel's own high-water mark of
    this memory map is read where there is one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
