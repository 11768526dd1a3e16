"""Samples on their way to a rank, and what the rank keeps of them until the step's last update.

Owns: what is sent of samples, what is taken from what is there, and the memory of that. Refuses to know: who sends, which rank
has what (``loop.held``), models. Always holds: samples are put together as if they had been sent whole, bit for bit; what is
kept is of one batch alone, and gone when another one comes or ``let_go`` is called.

Legend: S samples of a part, E some of them, T tokens of a part end to end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.samples import Samples
from meshloom.samples.compact import Compact


@dataclass(frozen=True)
class Piece:
    """Columns of some samples of a part.

    Args:
        which_E: of the part's samples, int64.
        columns: of their tokens end to end, by name.
        keeps: whether they are the batch's, to be kept.
    """

    which_E: Tensor
    columns: Mapping[str, Compact]
    keeps: bool

    @property
    def nbytes(self) -> int:
        """That travel."""
        return self.which_E.nbytes + sum(column.nbytes for column in self.columns.values())


@dataclass(frozen=True)
class Parcel:
    """The samples of one part, for one rank.

    Args:
        lengths_S: tokens of each, int64.
        columns: names of all columns that the samples have.
        pieces: what the rank does not have.
        places_S: of the samples in their batch, int64; empty where nothing is kept.
        batch: number of the batch, higher than those before; none where nothing is kept.
        hand_to: ranks that lack the same pieces, and get them from this one.
        comes_from: rank that the pieces come from; none where they came with the parcel.
    """

    lengths_S: Tensor
    columns: tuple[str, ...]
    pieces: tuple[Piece, ...]
    places_S: Tensor
    batch: int | None = None
    hand_to: tuple[int, ...] = ()
    comes_from: int | None = None

    @property
    def nbytes(self) -> int:
        """That travel."""
        return self.lengths_S.nbytes + self.places_S.nbytes + sum(piece.nbytes for piece in self.pieces)


class KeptSamples:
    """What one rank has of the batch of the step that is on, in its host's memory."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._kept: dict[str, dict[int, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Of what is kept."""
        return sum(tensor.nbytes for column in self._kept.values() for tensor in column.values())

    def take(self, parcel: Parcel) -> Samples:
        """The samples of a parcel, put together of what came and what is kept.

        Raises:
            RuntimeError: if neither has a column of a sample.
        """
        if parcel.batch is not None and parcel.batch != self._batch:
            self.let_go()
            self._batch = parcel.batch
        places, lengths = parcel.places_S.tolist(), parcel.lengths_S.tolist()
        found: dict[str, dict[int, Tensor]] = {name: {} for name in parcel.columns}
        for piece in parcel.pieces:
            which = piece.which_E.tolist()
            for name, column in piece.columns.items():
                each = column.opened().split([lengths[i] for i in which])
                found[name].update(zip(which, each, strict=True))
                if piece.keeps:
                    self._kept.setdefault(name, {}).update(zip((places[i] for i in which), each, strict=True))
        return Samples(parcel.lengths_S, {name: self._column(parcel, name, found[name], places) for name in found})

    def keep(self, parcel: Parcel, name: str, column_T: Tensor) -> None:
        """Keep a column that was computed of a parcel's samples, where their batch is kept at all."""
        if parcel.batch is not None:
            each = column_T.split(parcel.lengths_S.tolist())
            self._kept.setdefault(name, {}).update(zip(parcel.places_S.tolist(), each, strict=True))

    def let_go(self) -> None:
        """Give up all that is kept."""
        self._batch, self._kept = None, {}

    def _column(self, parcel: Parcel, name: str, came: Mapping[int, Tensor], places: list[int]) -> Tensor:
        kept = self._kept.get(name, {})
        missing = [i for i in range(len(parcel.lengths_S)) if i not in came and not (places and places[i] in kept)]
        if missing:
            raise RuntimeError(f"{name} of {len(missing)} samples did not come, and is not kept")
        tensors = [came[i] if i in came else kept[places[i]] for i in range(len(parcel.lengths_S))]
        return torch.cat(tensors) if tensors else torch.zeros(0)
