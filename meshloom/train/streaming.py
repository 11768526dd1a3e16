"""An optimizer that passes over the device: masters and moments are on a shelf, and come in pieces for each update.

Owns: the pieces, when each comes and goes, and the proof that all of them are away while the model computes. Refuses to know:
what an update does with a piece (``train.optimizer``), how bytes are copied (``train.shelves``). Always holds: two pieces at
most are on the device at once, the one that is worked on and the next, which arrives meanwhile; gradients stay there; a
piece that did not change is dropped, not copied.

Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv:2104.07857), section 5.2.2, stream an optimizer's state in this way; here the
update itself is the device's, so its values are those of an optimizer that stays.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from meshloom.config.errors import RunFault
from meshloom.plan.residency import Residency
from meshloom.plan.sharded_memory import OPTIMIZER_PIECES
from meshloom.plan.stays import Part
from meshloom.train.optimizer import Optimizer
from meshloom.train.shelves import Arrival, DiskShelf, HostShelf, Shelf, empty, own_storages

_LEAST_SLAB, _MOST_SLAB = 1 << 12, 1 << 28
_SLABS = 8
"""Of a piece on the host, at least: pinned memory is taken in whole slabs, and the plan counts what is in them."""
_FLOAT32 = 4


@dataclass
class _Piece:
    """Parameters whose state moves together.

    Args:
        names: of them.
        shelf: that their state goes to.
        away: storages that are there; none while they are on the device.
        arriving: what brings them, until it is waited for.
        kept: whether the shelf has their very values.
    """

    names: Collection[str]
    shelf: Shelf
    away: list[list[UntypedStorage]] | None = None
    arriving: Arrival | None = None
    kept: bool = False


class OptimizerStream:
    """The state of one optimizer, in pieces; takes the place of a resident part (``train.residency``).

    Args:
        role: whose optimizer it is, for messages.
        optimizer: on its device, where its state stays until ``park`` or the first turn.
        place: where the state is: the host or the disk.
        device: of the optimizer.
        folder: for files, if it is the disk.
        rank: of this process among those that share the folder.
        pieces: in about so many.
    """

    def __init__(
        self,
        role: str,
        optimizer: Optimizer,
        place: Residency,
        *,
        device: torch.device,
        folder: Path,
        rank: int = 0,
        pieces: int = OPTIMIZER_PIECES,
    ) -> None:
        self.role, self._optimizer, self._place = role, optimizer, place
        each = -(-sum(self._bytes(name) for name in optimizer.masters) // pieces)
        self._pieces: list[_Piece] = []
        for names in self._split(each):
            self._pieces.append(_Piece(names, self._shelf(device, folder / f"{role}.{Part.OPTIMIZER}.{rank}", each)))
        optimizer.turns = self

    @property
    def at(self) -> dict[Part, Residency]:
        """Where the state is, between two updates."""
        away = all(piece.away is not None for piece in self._pieces)
        return {Part.OPTIMIZER: self._place if away else Residency.DEVICE}

    @torch.no_grad()
    def visit(self, *, changes: bool) -> Iterator[Collection[str]]:
        """See ``Optimizer.visit``."""
        before: _Piece | None = None
        for number, piece in enumerate(self._pieces):
            self._bring(piece)
            if before is not None:
                before.shelf.settle()  # so that a third piece never takes memory
            if number + 1 < len(self._pieces):
                self._bring(self._pieces[number + 1])
            if piece.arriving is not None:
                piece.arriving.wait()
                piece.arriving = None
            yield piece.names
            piece.kept = piece.kept and not changes
            self._put(piece)
            before = piece

    @torch.no_grad()
    def park(self, part: Part) -> None:
        """Move away what has not been moved yet."""
        for piece in self._pieces:
            if piece.away is None:
                self._put(piece)

    def fetch(self, part: Part) -> None:
        """Never asked for: the state comes in turns.

        Raises:
            RunFault: always.
        """
        raise self._fault("it is to be on the device as a whole")

    def require(self, part: Part, place: Residency) -> None:
        """Do nothing if all of the state is away, by what is noted and by its bytes.

        Raises:
            RunFault: that names the first tensor that is not.
        """
        for piece in self._pieces:
            held = piece.away is None or any(storage.nbytes() for group in piece.away for storage in group)
            for name, tensor in self._tensors(piece.names):
                if held or tensor.untyped_storage().nbytes():
                    raise self._fault(f"{name} is still on the device")

    def wait(self, part: Part) -> None:
        """Nothing arrives but in its turn."""

    def changed(self, part: Part) -> None:
        """Only updates give the state other values, in its turns."""

    def settle(self) -> None:
        """Wait until the device's memory of what was moved away is free."""
        for piece in self._pieces:
            piece.shelf.settle()

    def close(self) -> None:
        """Give up host memory and files. What is away is lost."""
        for piece in self._pieces:
            piece.shelf.close()

    def _bring(self, piece: _Piece) -> None:
        if piece.away is not None:
            piece.arriving = piece.shelf.take(piece.away)
            piece.away, piece.kept = None, True

    def _put(self, piece: _Piece) -> None:
        tensors = [tensor for _, tensor in self._tensors(piece.names)]
        own_storages(tensors)
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        groups = [[*storages.values()]]
        if piece.kept:
            empty(groups)
        else:
            piece.shelf.put(groups)
        piece.away = groups

    def _split(self, each: int) -> Iterator[list[str]]:
        """Parameters in their order, together as long as their state is of ``each`` bytes at most."""
        names: list[str] = []
        total = 0
        for name in self._optimizer.masters:
            size = self._bytes(name)
            if names and total + size > each:
                yield names
                names, total = [], 0
            names.append(name)
            total += size
        if names:
            yield names

    def _bytes(self, name: str) -> int:
        """Of both moments, and of the master where it is a copy."""
        return self._optimizer.masters[name].numel() * _FLOAT32 * (3 if name in self._optimizer.copied else 2)

    def _shelf(self, device: torch.device, file: Path, each: int) -> Shelf:
        number = len(self._pieces)
        if self._place is Residency.DISK:
            # While one piece goes the next comes, and the one after that has not begun.
            beside = self._pieces[number - 2].shelf if number > 1 else None
            return DiskShelf(device, file.with_name(f"{file.name}.{number}"), beside)
        part = -(-each // _SLABS)
        slab = min(max(1 << max(part - 1, 0).bit_length(), _LEAST_SLAB), _MOST_SLAB)
        return HostShelf(device, slab)

    def _tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """What moves; step counts, a number each, stay where they are."""
        found = self._optimizer.state_tensors(names)
        yield from ((name, tensor) for name, tensor in found.items() if tensor.numel() > 1)

    def _fault(self, why: str) -> RunFault:
        where = f"the optimizer of the {self.role} is not where the plan has it"
        return RunFault(where, where="offload", why=why)
