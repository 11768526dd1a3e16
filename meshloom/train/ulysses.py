"""Sequence parallelism by heads (Ulysses, Jacobs et al. 2023, arXiv:2309.14509): each rank computes some of the tokens, and, in
attention, some of the heads of all tokens.

Owns: which tokens a rank computes, the exchange around attention. Refuses to know: how attention is computed, losses. Always
holds: labels belong to tokens before these are split, so a split changes no prediction; samples, prompts that several share
included, may be cut anywhere.

Legend: C computed tokens of all ranks, c of one, P ranks, H query heads, K key-value heads, D width of a head, N predicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from meshloom.train.attention import AttentionLayout
from meshloom.train.exchange import swap
from meshloom.train.gather import RowIndex
from meshloom.train.sharing import Computed


@dataclass(frozen=True)
class TokenSplit:
    """Which of the computed tokens are whose: equal stretches; the last ones are filled up with tokens that nobody sees.

    Args:
        total: computed tokens.
        ranks: that share them.
        rank: this one.
        pieces: that the tokens of a rank are cut in further, evenly (``tensor_parallel``).
    """

    total: int
    ranks: int
    rank: int
    pieces: int = 1

    @property
    def each(self) -> int:
        """Tokens of one rank."""
        return max(1, -(-self.total // (self.ranks * self.pieces))) * self.pieces

    @property
    def filling(self) -> int:
        return self.each * self.ranks - self.total

    def own(self, x_C: Tensor) -> Tensor:
        """This rank's tokens, [c]."""
        filled = torch.cat([x_C, x_C.new_zeros(self.filling)]) if self.filling else x_C
        return filled[self.rank * self.each : (self.rank + 1) * self.each]

    def predictions(self, computed: Computed) -> dict[str, Tensor]:
        """On the processor: which predictions are made from this rank's tokens, and from which of them, for ``of_device``."""
        source_N = computed.predictors.source_A
        own_n = (source_N // self.each == self.rank).nonzero().squeeze(-1)
        index = RowIndex.of(source_N[own_n] - self.rank * self.each, self.each)
        return {"own_n": own_n} | {f"own.{name}": value for name, value in vars(index).items()}

    @staticmethod
    def of_device(moved: Mapping[str, Tensor]) -> tuple[Tensor, RowIndex]:
        """``predictions`` from the tensors that were moved to a device."""
        return moved["own_n"], RowIndex(moved["own.source_A"], moved["own.copies_A"], moved["own.start_C1"])


class SplitAttention:
    """Attention over all tokens where each rank has some of them.

    Args:
        whole: attention over all tokens.
        split: of the tokens.
        group: the ranks; none: this one alone has all tokens, some of which nobody sees.
    """

    def __init__(self, whole: AttentionLayout, split: TokenSplit, group: dist.ProcessGroup | None) -> None:
        self._whole, self._split, self._group = whole, split, group

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention output of this rank's tokens, [c, H, D]."""
        ranks, total, filling = self._split.ranks, self._split.total, (0, 0, 0, 0, 0, self._split.filling)
        if self._group is None:
            seen = (x[:, :total] for x in (query_HTD, key_KTD, value_KTD))
            return pad(self._whole.attend(layer, *seen, scale=scale, window=window), filling)
        key_KTD, value_KTD = (_enough_heads(x, ranks) for x in (key_KTD, value_KTD))
        # Heads of each rank side by side: one exchange for queries, keys and values.
        pieces = [x.unflatten(0, (ranks, -1)) for x in (query_HTD, key_KTD, value_KTD)]
        counts = [piece.shape[1] for piece in pieces]
        swapped_PhcD = swap(torch.cat(pieces, 1), self._group)
        heads_hCD = swapped_PhcD.movedim(0, 1).flatten(1, 2)[:, :total]
        out_ChD = self._whole.attend(layer, *heads_hCD.split(counts), scale=scale, window=window)
        out_PchD = pad(out_ChD, filling).unflatten(0, (ranks, -1))
        return swap(out_PchD, self._group).movedim(0, 1).flatten(1, 2)


def _enough_heads(x_KTD: Tensor, ranks: int) -> Tensor:
    """Heads of keys or values, each copied as often as is needed for every rank to have one."""
    heads = x_KTD.shape[0]
    return x_KTD if heads % ranks == 0 else x_KTD.repeat_interleave(ranks // heads, 0)
