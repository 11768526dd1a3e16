"""Copies in one launch equal plain copies, and their checksums are those of what was read and of what is there."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from meshloom.weights.checksum import Checksums
from meshloom.weights.copies import Copier

pytest.importorskip("triton", reason="Triton comes with torch for GPUs")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [1, 8191, 3, 8192, 16_390, 0, 5, 20_001]


def slices(dtype: torch.dtype, starts: list[int], *, seed: int) -> list[Tensor]:
    """Tensors of ``SIZES`` elements in one memory, that begin at these places after each other's end."""
    ends = [0]
    for size, skipped in zip(SIZES, starts, strict=True):
        ends += [ends[-1] + skipped, ends[-1] + skipped + size]
    values = torch.randn(ends[-1], generator=torch.Generator().manual_seed(seed)) * 50
    flat = values.to(dtype).to(DEVICE)
    return [flat[a:b] for a, b in list(pairwise(ends))[1::2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("starts", [[0] * 8, [1, 3, 0, 7, 2, 5, 1, 0]])
def test_tensors_anywhere_in_memory_are_copied_and_summed(dtype: torch.dtype, starts: list[int]) -> None:
    sources, targets = slices(dtype, [0, 1, 0, 5, 3, 0, 2, 4], seed=1), slices(dtype, starts, seed=2)
    expected_memory = targets[0]._base.clone()
    for source, target in zip(sources, targets, strict=True):
        at = target.storage_offset()
        expected_memory[at : at + len(target)] = source
    copier = Copier(kernels=True)
    before, after = copier.copy_and_sum(0, sources, targets)
    assert torch.equal(targets[0]._base.view(torch.int8), expected_memory.view(torch.int8))
    names = [str(place) for place in range(len(SIZES))]
    expected = Checksums.of(names, [s.cpu() for s in sources]).values
    assert torch.equal(before.cpu(), expected) and torch.equal(after.cpu(), expected)


def test_strided_tensors_are_copied_too() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(40, 50, generator=generator).bfloat16().to(DEVICE) for _ in range(4)]
    sources, targets = [wide[0][:, :20], wide[1][3:9], wide[1].T], [wide[2][:, 30:], wide[2][3:9], wide[3].T]
    targets[1] = torch.empty_like(wide[1][3:9])
    copier = Copier(kernels=True)
    before, after = copier.copy_and_sum(0, sources, targets)
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True)) and torch.equal(before, after)


def test_a_plan_follows_tensors_that_move_and_values_that_change() -> None:
    copier = Copier(kernels=True)
    sources, targets = [torch.ones(9, device=DEVICE)], [torch.zeros(9, device=DEVICE)]
    copier.copy(0, sources, targets)
    sources[0].fill_(2)
    copier.copy(0, sources, targets)
    assert bool((targets[0] == 2).all())
    moved = [torch.full((9,), 3.0, device=DEVICE)]
    other = [torch.zeros(5, device=DEVICE)]
    copier.copy(1, [torch.full((5,), 4.0, device=DEVICE)], other)
    copier.copy(0, moved, targets)
    assert bool((targets[0] == 3).all()) and bool((other[0] == 4).all())
