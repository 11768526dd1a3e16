"""Finished samples on their way between processes.

Owns: many samples as a few tensors, so that a token costs bytes and not text. Always holds: what is taken apart comes back
equal, log-probabilities to the last bit.

Legend: C samples, T their tokens end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.rollout.protocol import Completion, FinishReason
from meshloom.samples.compact import Compact


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Finished samples.

    Args:
        request_C, index_C, length_C: of each, int64.
        finish: why each ended.
        id_T, version_T: int64, packed.
        logprob_T: float64, as Python has them, packed: an engine's are float32 at heart.
    """

    request_C: Tensor
    index_C: Tensor
    length_C: Tensor
    finish: tuple[FinishReason, ...]
    id_T: Compact
    version_T: Compact
    logprob_T: Compact

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> "Completions":
        """Taken apart."""
        return cls(
            request_C=torch.tensor([c.request_id for c in completions], dtype=torch.int64),
            index_C=torch.tensor([c.index for c in completions], dtype=torch.int64),
            length_C=torch.tensor([len(c.ids) for c in completions], dtype=torch.int64),
            finish=tuple(c.finish for c in completions),
            id_T=_packed([token for c in completions for token in c.ids], torch.int64),
            version_T=_packed([version for c in completions for version in c.versions], torch.int64),
            logprob_T=_packed([value for c in completions for value in c.logprobs], torch.float64),
        )

    def each(self) -> list[Completion]:
        """Put together again."""
        lengths = self.length_C.tolist()
        columns = zip(
            self.request_C.tolist(),
            self.index_C.tolist(),
            self.finish,
            self.id_T.opened().split(lengths),
            self.version_T.opened().split(lengths),
            self.logprob_T.opened().split(lengths),
            strict=True,
        )
        return [
            Completion(
                request_id=request,
                index=index,
                ids=ids.tolist(),
                logprobs=logprobs.tolist(),
                versions=versions.tolist(),
                finish=finish,
            )
            for request, index, finish, ids, versions, logprobs in columns
        ]


def _packed(values: list[int] | list[float], dtype: torch.dtype) -> Compact:
    return Compact.of(torch.tensor(values, dtype=dtype))
