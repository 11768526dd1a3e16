"""An engine's own copy of a model on its device: whole, or the part of a tensor-parallel rank; without memory while it sleeps.

Owns: the memory of the copy. Refuses to know: engines, where weights come from. Always holds: the parameters stay the same
objects, so what an engine holds of them (views, tied tables) is right again when the copy has memory; it says whether its
values are the trainer's.
"""

from collections.abc import Mapping

import torch
from torch import UntypedStorage, nn

from meshloom.rollout.peers import Alone, Peers
from meshloom.train.shelves import own_storages
from meshloom.weights.layouts import Box
from meshloom.weights.shards import ModuleTaker, local_of


class EngineCopy:
    """A copy of a model.

    Args:
        module: that an engine samples with.
        held: of plain parameters that are a part of a tensor; see ``ModuleTaker``.
        peers: devices that hold the model together.

    ``is_empty`` says that it has no memory, ``is_filled`` that its values came from the trainer since it had memory last.
    """

    def __init__(
        self,
        module: nn.Module,
        held: Mapping[str, tuple[tuple[int, ...], Box]] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.module, self.taker = module, ModuleTaker(module, held)
        self.peers: Peers = peers or Alone()
        self.is_filled = False
        self._away: list[tuple[UntypedStorage, int]] = []

    @property
    def is_empty(self) -> bool:
        return bool(self._away)

    @property
    def num_bytes(self) -> int:
        """That it holds now."""
        return sum(storage.nbytes() for storage in _storages(self.module))

    @torch.no_grad()
    def empty(self) -> None:
        """Give up its memory, and its values."""
        if self._away:
            return
        own_storages(local_of(parameter) for parameter in self.module.parameters())
        self._away = [(storage, storage.nbytes()) for storage in _storages(self.module)]
        for storage, _ in self._away:
            storage.resize_(0)
        self.is_filled = False

    @torch.no_grad()
    def take_memory(self) -> None:
        """Have memory again; the values are yet to come."""
        away, self._away = self._away, []
        for storage, size in away:
            storage.resize_(size)


def _storages(module: nn.Module) -> list[UntypedStorage]:
    found: dict[int, UntypedStorage] = {}
    for parameter in module.parameters():
        storage = local_of(parameter).untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())
