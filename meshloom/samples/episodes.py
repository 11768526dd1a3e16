"""Episodes whose history was rewritten: several samples that are one for whoever compares them.

Always holds: the samples of an episode stand next to each other, so joining them leaves token columns as they are.
"""

import torch

from meshloom.samples.ragged import Samples


def joined(samples: Samples) -> Samples:
    """Each episode as one sample, its samples end to end; samples without ``episode`` are as they were.

    Reads the rows ``group`` and ``episode``; other rows and meta are those of an episode's first sample.
    """
    if "episode" not in samples.rows:
        return samples
    key = torch.stack([samples["group"], samples["episode"]], dim=1)
    first = torch.ones(len(samples), dtype=torch.bool)
    first[1:] = (key[1:] != key[:-1]).any(1)
    if bool(first.all()):
        return samples
    starts = first.nonzero().squeeze(1)
    lengths = torch.zeros(len(starts), dtype=samples.lengths.dtype).index_add_(0, first.cumsum(0) - 1, samples.lengths)
    rows = {name: column[starts.to(column.device)] for name, column in samples.rows.items()}
    return Samples(lengths, samples.tokens, rows, {n: [c[i] for i in starts.tolist()] for n, c in samples.meta.items()})
