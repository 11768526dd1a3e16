"""What ranks hold of the samples of the step that is on, as the controller knows it: so that nothing is sent twice.

Owns: which rank has which columns of which samples, what a call has to send, where samples may stay. Refuses to know: models,
processes, what a column means. Always holds: what a rank is taken to have are columns of the step's batch and nothing else; one
that is another than the batch's, such as a mask without invalid samples, is sent where it differs, with each call.

What ranks compute and nobody but their own loss reads need not come to the controller: such a column is *untold*. The
controller has ``nan`` in its place, and while there is one, samples stay where they are.

Legend: S samples of a part, B samples of the batch, T tokens of the samples of a call end to end.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshloom.fabric.dispatch import Arguments, Dispatch, GroupLayout
from meshloom.loop.parcels import Parcel, Piece
from meshloom.samples import Samples
from meshloom.samples.compact import Compact, bits_of

PLACE = "place"
"""Per-sample column of samples of a step: their place in its batch."""


@dataclass(frozen=True)
class Shares:
    """Samples of a call, shared out: the argument that ``what_is_new`` makes parcels of.

    Args:
        samples: all of them; only their tokens are sent.
        parts: places among them of each replica's.
        held: what ranks have of them; none where nothing is kept.
    """

    samples: Samples
    parts: Sequence[Sequence[int]]
    held: "HeldSamples | None" = None


def what_is_new(name: str) -> Dispatch:
    """The named argument is ``Shares``: each rank is given its replica's part, and of it what it does not have. The verb has it
    brought together by ``loop.handing``."""

    def dispatch(arguments: Arguments, layout: GroupLayout) -> Sequence[Arguments]:
        shares: Shares = arguments[name]
        if len(shares.parts) != layout.num_parts:
            raise ValueError(f"{name} has {len(shares.parts)} parts for {layout.num_parts} replicas")
        held = shares.held or HeldSamples(())
        parcels = held.parcels(shares.samples, shares.parts, layout)
        return [{**arguments, name: parcel} for parcel in parcels]

    return dispatch


class HeldSamples:
    """What ranks have of the batch of the step that is on.

    Args:
        ranks: that keep what they are given: those of models that are trained.
        tell: called with ranks that are to give up what they keep.
        learner: layout of the model whose loss reads log-probs; none where all of them are told.
        readers: ranks of that model that compute its loss.
        untold: columns that its ranks need not tell.
    """

    def __init__(
        self,
        ranks: Collection[int],
        tell: Callable[[Sequence[int]], Any] = lambda ranks: None,
        learner: GroupLayout | None = None,
        readers: Collection[int] = (),
        untold: Collection[str] = (),
    ) -> None:
        self._ranks, self._tell = frozenset(ranks), tell
        self._learner, self._readers, self._need_not_tell = learner, frozenset(readers), frozenset(untold)
        self._untold: dict[str, frozenset[int]] = {}
        self._settled: Sequence[Sequence[int]] | None = None
        self._number, self._batch = 0, Samples(torch.zeros(0, dtype=torch.int64))
        self._is_on = False
        self._has: dict[int, dict[str, Tensor]] = {}
        self._lock = threading.Lock()
        self.updates: Sequence[Samples] = ()
        """What the step will learn from, one for each update: with ``mask``, ``group`` and ``place``."""

    def begin(self, batch: Samples, cut: Callable[[Samples], Sequence[Samples]]) -> Samples:
        """A step begins; its batch, each sample with its place.

        Args:
            batch: with ``mask``, ``group`` and ``valid``.
            cut: makes updates of it, by these columns alone.
        """
        place_B = torch.arange(len(batch))
        rows = {name: batch.rows[name] for name in ("group", "valid")}
        self.updates = cut(Samples(batch.lengths, {"mask": batch["mask"]}, {**rows, PLACE: place_B}))
        self._number += 1
        self._batch, self._has, self._is_on = Samples(batch.lengths, dict(batch.tokens)), {}, True
        self._untold, self._settled = {}, None
        return batch.with_rows(**{PLACE: place_B})

    def end(self) -> None:
        """The step is over, or has failed: ranks give up what they keep. Waits for nobody."""
        ranks, self._has, self._is_on = sorted(self._has), {}, False
        self._batch, self.updates, self._untold = Samples(torch.zeros(0, dtype=torch.int64)), (), {}
        if ranks:
            self._tell(ranks)

    @contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """If what is done within fails, the step is over. What stops a run at once ends the ranks themselves."""
        try:
            yield
        except Exception:
            self.end()
            raise

    def knows(self, samples: Samples) -> bool:
        """Whether these are samples of the step that is on."""
        return self._is_on and PLACE in samples.rows

    def keeps(self, layout: GroupLayout) -> bool:
        """Whether ranks of a group keep what they are given."""
        return not self._ranks.isdisjoint(layout.ranks)

    def settle(self, parts: Sequence[Sequence[int]], layout: GroupLayout) -> None:
        """Parts of the batch on replicas of a layout hold for all updates of the step."""
        if layout == self._learner:
            self._settled = parts

    def must_stay(self, layout: GroupLayout) -> bool:
        """Whether replicas of a layout alone have something of their samples."""
        return bool(self._untold) and layout == self._learner

    def need_tell(
        self,
        name: str,
        samples: Samples,
        parts: Sequence[Sequence[int]],
        layout: GroupLayout,
        knowing: Collection[int],
    ) -> bool:
        """Whether ranks that compute a column must tell it: the loop reads it, its samples may be needed elsewhere, or ranks
        that compute the loss do not know it, as those of a model that is cut otherwise.

        Args:
            name: of the column.
            samples: of the call.
            parts: of each replica, as of ``Shares``.
            layout: of the ranks that compute it.
            knowing: those of them that have it then.
        """
        settled = layout.num_parts == 1 or parts == self._settled
        known = self._readers.issubset(knowing)
        stays = layout == self._learner and known and self.is_whole(samples) and settled
        return name not in self._need_not_tell or not stays

    def is_whole(self, samples: Samples) -> bool:
        """Whether these are all samples of the step that is on, in their order."""
        return self.knows(samples) and torch.equal(samples[PLACE], torch.arange(len(self._batch)))

    def parcels(self, samples: Samples, shares: Sequence[Sequence[int]], layout: GroupLayout) -> list[Parcel]:
        """What each rank is sent, of its replica's part; from now on it has that. Of ranks that lack the same, as those of a
        replica mostly do, one is sent it, which hands it on to the others."""
        parts = [samples.select(share) for share in shares]
        are_kept = self.knows(samples) and self.keeps(layout)
        the_batchs = [name for name, column in samples.tokens.items() if column is self._batch.tokens.get(name)]
        same = [self._as_in_batch(part, the_batchs) if are_kept else {} for part in parts]
        alike: dict[tuple[Any, ...], list[int]] = {}
        made: dict[tuple[Any, ...], Parcel] = {}
        columns: dict[int, tuple[str, ...]] = {}
        with self._lock:
            for rank, index in zip(layout.ranks, layout.data_index, strict=True):
                keeps = rank in self._ranks and self.knows(parts[index])
                part = self._without_untold(rank, parts[index]) if keeps else parts[index]
                sent = self._sent(rank, part, same[index]) if keeps else _everything(part)
                key = (index, keeps, *((bytes(which.numpy()), *names) for which, names, _ in sent))
                alike.setdefault(key, []).append(rank)
                columns[rank] = tuple(part.tokens)
                if key not in made:
                    made[key] = self._parcel(part, sent, keeps=keeps)
        of_rank = {rank: each for key, ranks in alike.items() for rank, each in _handed(made[key], ranks)}
        return [replace(of_rank[rank], columns=columns[rank]) for rank in layout.ranks]

    def computed(
        self,
        name: str,
        column_T: Tensor | None,
        samples: Samples,
        parts: Sequence[Sequence[int]],
        ranks: Mapping[int, int],
    ) -> Tensor:
        """Ranks keep a column that they have computed of all samples of the step; the column, as the controller has it.

        Args:
            name: that it has from now on.
            column_T: as they told it; none if they did not.
            samples: of the call.
            parts: of each replica, as of ``Shares``.
            ranks: that have it, with the part that each computed.
        """
        if column_T is None:
            column_T = torch.full((1,), torch.nan).expand(samples.num_tokens)
            self._untold[name] = frozenset(ranks)
        if not self.is_whole(samples):
            return column_T
        with self._lock:
            self._batch = self._batch.with_tokens(**{name: column_T})
            for rank in self._ranks & ranks.keys():
                self._of_rank(rank, name)[samples[PLACE][list(parts[ranks[rank]])]] = True
        return column_T

    def replicas(self, samples: Samples, layout: GroupLayout) -> list[int]:
        """Which replica has each sample, on all of its ranks, and most columns of it; -1 where none has it. What one
        alone has a column of is there, whatever other ranks keep of it for another model."""
        place_S, none_S = samples[PLACE], torch.zeros(len(samples), dtype=torch.int64)
        counts_RS = none_S.repeat(layout.num_parts, 1)
        whole_RS = torch.ones((layout.num_parts, len(samples)), dtype=torch.bool)
        with self._lock:
            for rank, index in zip(layout.ranks, layout.data_index, strict=True):
                has = self._has.get(rank, {})
                untold = [n for n, ranks in self._untold.items() if rank in ranks] if self.must_stay(layout) else []
                for name in ("ids", *untold):
                    whole_RS[index] &= has[name][place_S] if name in has else False
                counts_RS[index] += sum((column[place_S] for column in has.values()), none_S)
        most_S, index_S = torch.where(whole_RS, counts_RS, 0).max(0)
        return torch.where(most_S > 0, index_S, -1).tolist()

    def _of_rank(self, rank: int, name: str) -> Tensor:
        """Which samples of the batch a rank has a column of, [B]; to be changed in place."""
        return self._has.setdefault(rank, {}).setdefault(name, torch.zeros(len(self._batch), dtype=torch.bool))

    def _without_untold(self, rank: int, part: Samples) -> Samples:
        """A part without columns that a rank does not have and nobody tells: the loss that reads them is computed on others.

        Raises:
            RuntimeError: if it should have them.
        """
        lacks = [n for n in self._untold if n in part.tokens and not bool(self._of_rank(rank, n)[part[PLACE]].all())]
        if wrong := [name for name in lacks if rank in self._untold[name] | self._readers]:
            raise RuntimeError(f"samples without their {wrong[0]} would go to rank {rank}: other ranks alone have it")
        return replace(part, tokens={name: column for name, column in part.tokens.items() if name not in lacks})

    def _as_in_batch(self, part: Samples, the_batchs: Collection[str]) -> dict[str, Tensor]:
        """For each column that the batch has too, of which samples it is the same, [S].

        Args:
            part: of a call's samples.
            the_batchs: columns of the call that are known to be the same: the very tensors of the batch.
        """
        names = [name for name in self._batch.tokens if name in part.tokens and name not in the_batchs]
        batch = Samples(self._batch.lengths, {name: self._batch.tokens[name] for name in names}).select(part[PLACE])
        found = {name: _same(part, name, column_T) for name, column_T in batch.tokens.items()}
        return found | {name: torch.ones(len(part), dtype=torch.bool) for name in the_batchs}

    def _sent(self, rank: int, part: Samples, same: Mapping[str, Tensor]) -> list[tuple[Tensor, list[str], bool]]:
        """Which samples a rank is sent which columns of, and whether it keeps those; columns of the same samples together."""
        wanted: dict[tuple[bytes, bool], tuple[Tensor, list[str], bool]] = {}
        for name in part.tokens:
            same_S = same.get(name, torch.zeros(len(part), dtype=torch.bool))
            has_B = self._of_rank(rank, name)
            for which_S, keeps in ((same_S & ~has_B[part[PLACE]], True), (~same_S, False)):
                if bool(which_S.any()):
                    wanted.setdefault((bytes(which_S.numpy()), keeps), (which_S, [], keeps))[1].append(name)
            has_B[part[PLACE][same_S]] = True
        return list(wanted.values())

    def _parcel(self, part: Samples, sent: Sequence[tuple[Tensor, list[str], bool]], *, keeps: bool) -> Parcel:
        pieces = []
        for which_S, names, kept in sent:
            some = Samples(part.lengths, {name: part.tokens[name] for name in names})
            some = some if bool(which_S.all()) else some.select(which_S.nonzero().squeeze(1))
            columns = {name: Compact.of(column.contiguous()) for name, column in some.tokens.items()}
            pieces.append(Piece(which_S.nonzero().squeeze(1), columns, kept))
        places_S = part[PLACE] if keeps else torch.zeros(0, dtype=torch.int64)
        return Parcel(part.lengths, tuple(part.tokens), tuple(pieces), places_S, self._number if keeps else None)


def _handed(parcel: Parcel, ranks: Sequence[int]) -> Iterator[tuple[int, Parcel]]:
    """A parcel for the first of some ranks, and for the others what says that they get it from there."""
    first, *others = ranks
    if not parcel.pieces:
        yield from ((rank, parcel) for rank in ranks)
        return
    yield first, replace(parcel, hand_to=tuple(others))
    yield from ((rank, replace(parcel, pieces=(), comes_from=first)) for rank in others)


def _everything(part: Samples) -> list[tuple[Tensor, list[str], bool]]:
    """All columns of all samples, which nobody keeps."""
    return [(torch.ones(len(part), dtype=torch.bool), list(part.tokens), False)] if len(part) else []


def _same(part: Samples, name: str, column_T: Tensor) -> Tensor:
    """Of which samples a column is equal to another, [S]."""
    own_T = part.tokens[name]
    if own_T.dtype != column_T.dtype:
        return torch.zeros(len(part), dtype=torch.bool)
    differs_T = bits_of(own_T) != bits_of(column_T)
    if not bool(differs_T.any()):
        return torch.ones(len(part), dtype=torch.bool)
    differs_T = torch.cat([torch.zeros(1, dtype=torch.int64), differs_T.cumsum(0)])
    counts_S = differs_T[part.offsets]
    return counts_S[1:] == counts_S[:-1]
