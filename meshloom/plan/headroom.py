"""What a GPU must have on top of what is held: libraries, and what is lost between blocks.

Owns: that margin. Refuses to know: what is held. Always holds: everything that asks whether something fits asks here.
"""

LIBRARIES = 2 * 2**30
"""What a GPU holds besides tensors: the context, workspaces of the matrix library, modules of compiled code."""
FRAGMENTS = 0.1
"""Share of the peak that is lost between the allocator's blocks, and by which the estimate may be short."""


def needed_bytes(peak: int) -> int:
    """Bytes that a GPU must have for a phase that holds so many."""
    return int(peak * (1 + FRAGMENTS)) + LIBRARIES
