"""Which tokens of a microbatch a model computes: the prompt of several samples once, and nothing after the last prediction.

Owns: finding samples that begin with the same prompt, keeping them together, and attention over them. Refuses to know:
models, losses. Always holds: each prediction is made from the same tokens as if its sample stood alone, so losses and
gradients are those of the samples one by one; a microbatch's bound counts every token of every sample, shared or not.

A prompt is what stands before a sample's first predicted token. In causal attention it does not see what follows, so one
computation serves all samples that begin with it; only attention, which is a small part, is computed for each sample.

Legend: T tokens of a microbatch, A those that attention sees, C those that the model computes, N predicted ones, S samples,
H query heads, K key-value heads, D width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.samples import Samples, SampleTooLong, pack
from meshloom.train.attention import AttentionLayout, PackedAttention


@dataclass(frozen=True)
class Computed:
    """What of a microbatch is computed.

    Args:
        lengths: tokens of each sample that attention sees.
        tokens_C: place of each computed token in the microbatch, int64.
        positions_C: place of each in its own sample, int64.
        source_A: for each token that attention sees, which computed token it is; none if that is each its own.
        first_C: for each computed token, the first token that attention sees it as; none likewise.
        predictor_N: for each predicted token, which computed token stands before it, int64.
    """

    lengths: list[int]
    tokens_C: Tensor
    positions_C: Tensor
    source_A: Tensor | None
    first_C: Tensor | None
    predictor_N: Tensor

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
        predictor_N = _predictors(microbatch, tokens_A, source_A)
        shared = len(tokens_C) < len(tokens_A)
        return cls(
            lengths=seen_S.tolist(),
            tokens_C=tokens_C,
            positions_C=position_T[tokens_C],
            source_A=source_A if shared else None,
            first_C=kept_A.nonzero().squeeze(-1) if shared else None,
            predictor_N=predictor_N,
        )

    def to(self, device: torch.device) -> "Computed":
        """The same on a device; lengths stay."""
        moved = {
            name: None if value is None else value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if name != "lengths"
        }
        return Computed(lengths=self.lengths, **moved)

    def layout(self) -> AttentionLayout:
        """How the model's layers attend."""
        packed = PackedAttention(self.lengths)
        return packed if self.source_A is None else SharedAttention(packed, self.source_A, self.first_C)


class SharedAttention:
    """Packed attention over whole samples, some of whose tokens were computed once for several."""

    def __init__(self, packed: PackedAttention, source_A: Tensor, first_C: Tensor) -> None:
        self._packed, self._source_A, self._first_C = packed, source_A, first_C

    def attend(
        self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention output of the computed tokens, [C, H, D]."""
        whole = (_rows(x.transpose(0, 1), self._source_A).transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD))
        return _rows(self._packed.attend(layer, *whole, scale=scale, window=window), self._first_C)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of a [T, heads, D] tensor; flat in between, since the gradient of a flat row selection is fast."""
    return x.flatten(1).index_select(0, index).unflatten(1, x.shape[1:])


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
