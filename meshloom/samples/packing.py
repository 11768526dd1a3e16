"""Packing samples into microbatches.

Owns: which samples a device holds at once. Always holds: no microbatch exceeds its token budget (a hard bound); every
sample is in exactly one microbatch; the choice depends on lengths alone, so it is the same on every run.
"""

import heapq
from collections.abc import Sequence


class SampleTooLong(ValueError):
    """A sample does not fit the token budget of a microbatch."""

    def __init__(self, index: int, tokens: int, budget: int) -> None:
        self.index, self.tokens, self.budget = index, tokens, budget
        super().__init__(f"sample {index} has {tokens} tokens, a microbatch holds {budget}")


def pack(
    lengths: Sequence[int], *, tokens_per_microbatch: int, samples_per_microbatch: int | None = None
) -> list[list[int]]:
    """Cut samples into balanced microbatches.

    Longest first, each sample goes to the lightest microbatch; the number of microbatches is the smallest that this
    rule makes fit (longest processing time, Graham 1969, under a hard capacity). In a microbatch samples stand in order of
    length, longest first, so that equal lengths are neighbours.

    Args:
        lengths: tokens of each sample.
        tokens_per_microbatch: hard bound on a microbatch's tokens.
        samples_per_microbatch: hard bound on a microbatch's samples.

    Returns:
        Lists of sample indices.

    Raises:
        SampleTooLong: if one sample exceeds the budget alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if not order:
        return []
    if lengths[order[0]] > tokens_per_microbatch:
        raise SampleTooLong(order[0], lengths[order[0]], tokens_per_microbatch)
    limit = samples_per_microbatch or len(order)
    count = max(-(-sum(lengths) // tokens_per_microbatch), -(-len(order) // limit))
    while (bins := _balance(order, lengths, count, tokens_per_microbatch, limit)) is None:
        count += 1
    return bins


def _balance(order: list[int], lengths: Sequence[int], count: int, budget: int, limit: int) -> list[list[int]] | None:
    """Fill ``count`` microbatches, lightest first, or nothing if a sample does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        while heap and len(bins[heap[0][1]]) >= limit:
            heapq.heappop(heap)
        if not heap or heap[0][0] + lengths[i] > budget:
            return None
        load, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (load + lengths[i], b))
    return [b for b in bins if b]
