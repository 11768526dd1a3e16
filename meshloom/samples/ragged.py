"""The one data container: samples of different lengths, stored end to end.

Owns: per-token and per-sample columns and the operations on them (select, concat, split). Refuses to know: models,
rewards, losses. Always holds: every token column has ``sum(lengths)`` rows, every sample column ``len(lengths)``;
nothing is padded; an operation returns a new container and never changes its input.

Legend: T tokens of all samples end to end, S samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """Ragged samples.

    Args:
        lengths: tokens of each sample, int64 [S], on the CPU.
        tokens: per-token columns by name, each [T, ...]. The usual ones: ``ids`` (int64), ``mask`` (bool, true where the
            token is the model's own and is trained on), ``sampler_logprob`` (float32, 0 where ``mask`` is false; the
            log-probability of a token stands at the token's own place), ``version`` (int32, weights that sampled it).
        rows: per-sample tensor columns by name, each [S, ...], such as ``group`` (int64) and ``reward`` (float64).
        meta: per-sample Python columns by name, lists of S JSON values.

    Raises:
        ValueError: if a column's length does not fit.
    """

    lengths: Tensor
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total, count = int(self.lengths.sum()), len(self.lengths)
        for kind, columns, size in (
            ("token", self.tokens, total),
            ("sample", self.rows, count),
            ("meta", self.meta, count),
        ):
            for name, column in columns.items():
                if len(column) != size:
                    raise ValueError(f"{kind} column {name!r} has {len(column)} entries, expected {size}")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor column by name, per token or per sample."""
        return self.tokens[name] if name in self.tokens else self.rows[name]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> Tensor:
        """Where each sample begins and the last one ends, int64 [S + 1], on the CPU."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def sample_of_token(self) -> Tensor:
        """Index of the sample each token belongs to, int64 [T], on the CPU."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @property
    def positions(self) -> Tensor:
        """Place of each token in its own sample, int64 [T], on the CPU."""
        return torch.arange(self.num_tokens) - torch.repeat_interleave(self.offsets[:-1], self.lengths)

    def column(self, name: str) -> list[Tensor]:
        """A token column cut into one tensor a sample."""
        return list(self.tokens[name].split(self.lengths.tolist()))

    def with_tokens(self, **columns: Tensor) -> "Samples":
        return replace(self, tokens={**self.tokens, **columns})

    def with_rows(self, **columns: Tensor) -> "Samples":
        return replace(self, rows={**self.rows, **columns})

    def with_meta(self, **columns: list[Any]) -> "Samples":
        return replace(self, meta={**self.meta, **columns})

    def select(self, indices: Sequence[int] | Tensor) -> "Samples":
        """The samples at ``indices``, in that order; an index may repeat."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[index]
        starts = self.offsets[:-1][index]
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        token_index = torch.repeat_interleave(starts, lengths) + within
        return Samples(
            lengths=lengths,
            tokens={name: column[token_index.to(column.device)] for name, column in self.tokens.items()},
            rows={name: column[index.to(column.device)] for name, column in self.rows.items()},
            meta={name: [column[i] for i in index.tolist()] for name, column in self.meta.items()},
        )

    def split(self, counts: Sequence[int]) -> list["Samples"]:
        """Consecutive pieces of ``counts`` samples each; the counts add up to the number of samples."""
        if sum(counts) != len(self):
            raise ValueError(f"counts add up to {sum(counts)}, there are {len(self)} samples")
        bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
        return [self.select(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]

    def to(self, device: torch.device | str) -> "Samples":
        """Token and sample columns on ``device``; lengths stay on the CPU."""
        later = (
            torch.device(device).type != "cpu"
        )  # to the processor, a copy that is not waited for may be read too early
        return replace(
            self,
            tokens={name: column.to(device, non_blocking=later) for name, column in self.tokens.items()},
            rows={name: column.to(device, non_blocking=later) for name, column in self.rows.items()},
        )

    def __iter__(self) -> Iterator["Samples"]:
        return (self.select([i]) for i in range(len(self)))


def concat(parts: Sequence[Samples]) -> Samples:
    """All samples of ``parts``, in order.

    Raises:
        ValueError: if there is nothing to join, or the parts have different columns.
    """
    if not parts:
        raise ValueError("nothing to concatenate")
    first = parts[0]
    for part in parts:
        for kind in ("tokens", "rows", "meta"):
            if getattr(part, kind).keys() != getattr(first, kind).keys():
                raise ValueError(
                    f"{kind} columns differ: {sorted(getattr(first, kind))} and {sorted(getattr(part, kind))}"
                )
    return Samples(
        lengths=torch.cat([part.lengths for part in parts]),
        tokens={name: torch.cat([part.tokens[name] for part in parts]) for name in first.tokens},
        rows={name: torch.cat([part.rows[name] for part in parts]) for name in first.rows},
        meta={name: [value for part in parts for value in part.meta[name]] for name in first.meta},
    )
