"""Which tokens of a microbatch a model computes: the prompt of several samples once, and nothing after the last prediction.

Owns: finding samples that begin with the same prompt, keeping them together, and attention over them. Refuses to know:
models, losses. Always holds: each prediction is made from the same tokens as if its sample stood alone, so losses and
gradients are those of the samples one by one; a microbatch's bound counts every token of every sample, shared or not.

A prompt is what stands before a sample's first predicted token. In causal attention it does not see what follows, so one
computation serves all samples that begin with it; only attention, which is a small part, is computed for each sample.

Legend: T tokens of a microbatch, A those that attention sees, C those that the model computes, N predicted ones, S samples,
H query heads, K key-value heads, D width of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from meshloom.plan.compute import AttentionChoice
from meshloom.samples import Samples, SampleTooLong, pack
from meshloom.train.attention import PackedAttention, kernel_for
from meshloom.train.attention_kernels import Bounds, Kernel
from meshloom.train.attention_op import Operands
from meshloom.train.gather import RowIndex, take_rows


@dataclass(frozen=True)
class Computed:
    """What of a microbatch is computed.

    Args:
        lengths: tokens of each sample that attention sees.
        query_lengths: those of them that the model computes for this sample, its last ones.
        tokens_C: place of each computed token in the microbatch, int64.
        positions_C: place of each in its own sample, int64.
        seen: for each token that attention sees, which computed token it is; none if that is each its own.
        first_C: for each computed token, the first token that attention sees it as; none likewise.
        predictors: for each predicted token, which computed token stands before it.
    """

    lengths: list[int]
    query_lengths: list[int]
    tokens_C: Tensor
    positions_C: Tensor
    seen: RowIndex | None
    first_C: Tensor | None
    predictors: RowIndex

    @classmethod
    def of(cls, microbatch: Samples) -> "Computed":
        """From ``ids`` and ``mask`` of a microbatch on the CPU."""
        offsets_S = microbatch.offsets[:-1]
        first_S, last_S = _predicted(microbatch)
        seen_S = last_S.clamp(min=1)
        position_T = microbatch.positions
        seen_T = position_T < torch.repeat_interleave(seen_S, microbatch.lengths)
        tokens_A = seen_T.nonzero().squeeze(-1)
        owner_S = _owners(microbatch, first_S)
        sample_A = torch.repeat_interleave(torch.arange(len(microbatch)), seen_S)
        in_prompt_A = position_T[tokens_A] < first_S[sample_A]
        start_S = offsets_S[owner_S]
        origin_A = torch.where(in_prompt_A, start_S[sample_A] + position_T[tokens_A], tokens_A)
        kept_A = origin_A == tokens_A
        tokens_C = tokens_A[kept_A]
        place_T = torch.zeros(microbatch.num_tokens, dtype=torch.int64)
        place_T[tokens_C] = torch.arange(len(tokens_C))
        source_A = place_T[origin_A]
        shared = len(tokens_C) < len(tokens_A)
        return cls(
            lengths=seen_S.tolist(),
            query_lengths=torch.bincount(sample_A[kept_A], minlength=len(microbatch)).tolist(),
            tokens_C=tokens_C,
            positions_C=position_T[tokens_C],
            seen=RowIndex.of(source_A, len(tokens_C)) if shared else None,
            first_C=kept_A.nonzero().squeeze(-1) if shared else None,
            predictors=RowIndex.of(_predictors(microbatch, tokens_A, source_A), len(tokens_C)),
        )

    def pairs(self) -> int:
        """Pairs of tokens that see each other, a computed token with itself and those before it; windows left aside."""
        both = zip(self.lengths, self.query_lengths, strict=True)
        return sum(queries * (2 * length - queries + 1) // 2 for length, queries in both)

    def tensors(self) -> dict[str, Tensor]:
        """What a device needs of it, by name; ``with_tensors`` takes them back."""
        found = {"tokens_C": self.tokens_C, "positions_C": self.positions_C}
        if self.first_C is not None:
            found["first_C"] = self.first_C
        for name, index in (("seen", self.seen), ("predictors", self.predictors)):
            if index is not None:
                found |= {f"{name}.{part}": value for part, value in vars(index).items()}
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Computed":
        """The same with its tensors elsewhere; lengths stay."""

        def index(name: str) -> RowIndex:
            return RowIndex(**{part.name: tensors[f"{name}.{part.name}"] for part in fields(RowIndex)})

        return replace(
            self,
            tokens_C=tensors["tokens_C"],
            positions_C=tensors["positions_C"],
            seen=None if self.seen is None else index("seen"),
            first_C=None if self.first_C is None else tensors["first_C"],
            predictors=index("predictors"),
        )

    def layout(self, choice: AttentionChoice = "auto") -> "PackedAttention | SharedAttention":
        """How the model's layers attend.

        Args:
            choice: the setting ``model.attention``.
        """
        packed = PackedAttention(self.lengths, choice)
        if self.seen is None or self.first_C is None:
            return packed
        return SharedAttention(packed, Bounds(self.query_lengths), self.seen, self.first_C)


class SharedAttention:
    """Packed attention over whole samples, some of whose tokens were computed once for several.

    A kernel that takes all samples in one call computes each token's attention once: a sample's queries are its last tokens,
    which it was computed for itself. Elsewhere queries are repeated as keys are, and one of each is kept.

    Args:
        packed: attention over whole samples.
        queries: bounds of the tokens that were computed for each sample.
        seen: for each token that attention sees, which computed token it is.
        first_C: for each computed token, the first token that attention sees it as.
    """

    def __init__(self, packed: PackedAttention, queries: Bounds, seen: RowIndex, first_C: Tensor) -> None:
        self._packed, self._queries, self._seen, self._first_C = packed, queries, seen, first_C
        self.operands: Operands | None = None

    def prepare(self, device: torch.device) -> None:
        """Make the operands that compiled layers attend with."""
        self.operands = Operands.of(self._queries, self._packed.bounds, self._seen, device)

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention output of the computed tokens, [C, H, D]."""
        if (kernel := kernel_for(self._packed.choice, query_HTD)) is not None:
            return self.in_one_call(kernel, query_HTD, key_KTD, value_KTD, scale=scale, window=window)
        rows = (x.transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD))
        whole = (take_rows(x, self._seen).transpose(0, 1) for x in rows)
        out_AHD = self._packed.attend(layer, *whole, scale=scale, window=window)
        return out_AHD.flatten(1).index_select(0, self._first_C).unflatten(1, out_AHD.shape[1:])

    def in_one_call(
        self,
        kernel: Kernel,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """The same by a kernel whose queries are the last tokens of their samples."""
        return kernel(
            query_HTD.transpose(0, 1),
            key_KTD.transpose(0, 1),
            value_KTD.transpose(0, 1),
            self._queries,
            self._packed.bounds,
            self._seen,
            scale=scale,
            window=window,
        )


def pack_samples(
    samples: Samples, *, tokens_per_microbatch: int, samples_per_microbatch: int | None
) -> list[list[int]]:
    """Cut samples into microbatches, those with the same prompt together as far as the bound allows.

    Under a bound on samples as well, each sample is placed alone.

    Raises:
        SampleTooLong: if one sample exceeds the bound alone.
    """
    lengths = samples.lengths.tolist()
    if samples_per_microbatch is not None:
        return pack(lengths, tokens_per_microbatch=tokens_per_microbatch, samples_per_microbatch=samples_per_microbatch)
    for i, length in enumerate(lengths):
        if length > tokens_per_microbatch:
            raise SampleTooLong(i, length, tokens_per_microbatch)
    units: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}
    for i, owner in enumerate(_owners(samples, _predicted(samples)[0]).tolist()):
        unit, tokens = filled.get(owner, (-1, tokens_per_microbatch))
        if tokens + lengths[i] > tokens_per_microbatch:
            unit, tokens = len(units), 0
            units.append([])
        units[unit].append(i)
        filled[owner] = unit, tokens + lengths[i]
    totals = [sum(lengths[i] for i in unit) for unit in units]
    bins = pack(totals, tokens_per_microbatch=tokens_per_microbatch)
    return [sorted((i for u in chosen for i in units[u]), key=lambda i: (-lengths[i], i)) for chosen in bins]


def _predicted(samples: Samples) -> tuple[Tensor, Tensor]:
    """Places of the first and the last predicted token in each sample, [S]; 0 and 0 where there is none."""
    mask_T, position_T, sample_T = samples["mask"], samples.positions, samples.sample_of_token
    chosen, place = sample_T[mask_T], position_T[mask_T]
    first_S = samples.lengths.scatter_reduce(0, chosen, place, "amin")
    last_S = torch.zeros_like(samples.lengths).scatter_reduce(0, chosen, place, "amax")
    return torch.where(last_S > 0, first_S, 0), last_S


def _owners(samples: Samples, first_S: Tensor) -> Tensor:
    """For each sample, the first sample that begins with the same prompt, [S]."""
    ids = samples["ids"].numpy()
    seen: dict[bytes, int] = {}
    starts = samples.offsets.tolist()
    prompts = (ids[start : start + first].tobytes() for start, first in zip(starts, first_S.tolist(), strict=False))
    return torch.tensor([seen.setdefault(prompt, i) for i, prompt in enumerate(prompts)], dtype=torch.int64)


def _predictors(microbatch: Samples, tokens_A: Tensor, source_A: Tensor) -> Tensor:
    """For each predicted token, which computed token stands before it."""
    computed_T = torch.full((microbatch.num_tokens,), -1)
    computed_T[tokens_A] = source_A
    return computed_T[microbatch["mask"].nonzero().squeeze(-1) - 1]
