"""Finished samples on their way from a worker, while it generates more.

Owns: which of them are told together. Refuses to know: engines, processes. Always holds: a sample is told within a moment of
its end, whatever else runs; all are told before the end.
"""

import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from meshloom.rollout.protocol import Completion

_MOMENT_S = 0.02
"""Least seconds between two tellings."""


def tell_each(completions: Iterable[Completion], tell: Callable[[list[Completion]], None]) -> None:
    """Tell samples as they finish: at once, or a moment after others, with those that finished meanwhile.

    Args:
        completions: as they finish.
        tell: takes a batch of them, on a thread of its own.
    """
    finished: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1, thread_name_prefix="telling") as threads:
        telling = threads.submit(_tell_batches, finished, tell)
        try:
            for completion in completions:
                finished.put(completion)
        finally:
            finished.put(None)
        telling.result()


def _tell_batches(finished: "queue.SimpleQueue[Completion | None]", tell: Callable[[list[Completion]], None]) -> None:
    told = -float("inf")
    while (first := finished.get()) is not None:
        time.sleep(max(0.0, told + _MOMENT_S - time.monotonic()))
        batch, is_over = [first], False
        while not finished.empty():
            found = finished.get()
            if found is None:
                is_over = True
                break
            batch.append(found)
        tell(batch)
        told = time.monotonic()
        if is_over:
            return
