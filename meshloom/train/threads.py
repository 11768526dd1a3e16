"""How many threads of the processor compute.

Owns: when one thread is faster than several. Always holds: the choice follows from the model and the device alone, so a run
repeats itself; what the user set in the environment stands.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshloom.config.environment import threads_are_given

_SMALL_PARAMETERS = 4_000_000


def fit_threads(device: torch.device) -> None:
    """Beside a GPU the processor only does bookkeeping in small tensors: one thread, as torchrun does."""
    if device.type != "cpu" and not threads_are_given():
        torch.set_num_threads(1)


def is_small(model: nn.Module) -> bool:
    """Whether a step of decoding is too little work to share: waking another thread costs more than it saves, and several
    times as much when the cores have other work."""
    counted = (p.numel() for name, p in model.named_parameters() if "embed" not in name)
    return sum(counted) < _SMALL_PARAMETERS


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Compute on one thread inside, if wanted and not set otherwise by the user."""
    before = torch.get_num_threads()
    if not wanted or before == 1 or threads_are_given():
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
