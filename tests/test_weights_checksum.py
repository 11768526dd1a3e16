"""Checksums notice every kind of change, and the kernel gives the plain sum."""

import pytest
import torch

from meshloom.weights.checksum import MULTIPLIER, SHIFT, Checksums, bits, checksums_into

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def checksum(tensor: torch.Tensor) -> int:
    out = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    checksums_into(out, [tensor])
    return int(out)


def by_hand(tensor: torch.Tensor) -> int:
    """The sum in Python's integers."""
    total = 0
    for place, value in enumerate(bits(tensor).tolist()):
        mixed = (place * MULTIPLIER + 2**63) % 2**64 - 2**63
        total += value * ((mixed ^ (mixed >> SHIFT)) | 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (3,), (7, 5), (8, 6), (129, 64)])
def test_the_sum_is_the_one_that_is_written_down(dtype, shape):
    tensor = (torch.randn(shape) * 50).to(dtype).to(DEVICE)
    assert checksum(tensor) == by_hand(tensor.cpu())


def test_chunks_do_not_change_the_sum(monkeypatch):
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr("meshloom.weights.checksum._CHUNK", 7)
    assert checksum(tensor) == whole


def test_the_kernel_gives_the_plain_sums_of_many_tensors():
    """On the processor in Triton's interpreter; odd sizes in bfloat16 are summed as 16-bit integers, bytes as they are."""
    pytest.importorskip("triton")
    from meshloom.weights.copy_kernels import add_checksums

    kinds = (torch.float32, torch.bfloat16, torch.int8)
    tensors = [(torch.randn(n) * 50).to(kind).to(DEVICE) for n in (1, 0, 8191, 8192, 8193, 20_000) for kind in kinds]
    out = torch.zeros(len(tensors), dtype=torch.int64, device=DEVICE)
    add_checksums(out, [bits(t) for t in tensors])
    assert out.tolist() == [checksum(tensor.cpu()) for tensor in tensors]


def test_any_changed_bit_swapped_values_and_swapped_rows_are_noticed():
    tensor = torch.randn(64, 32).bfloat16()
    whole = checksum(tensor)
    raw = tensor.view(torch.int16)
    for place in (0, 1, 777, 2047):
        for bit in (0, 8, 14):
            raw.view(-1)[place] ^= 1 << bit
            assert checksum(tensor) != whole
            raw.view(-1)[place] ^= 1 << bit
    assert checksum(tensor) == whole
    rows = torch.arange(64)
    rows[3], rows[40] = 40, 3
    columns = torch.arange(32)
    columns[0], columns[2] = 2, 0
    for wrong in (tensor[rows], tensor[:, columns], tensor.T.reshape(64, 32), tensor.flip(0), -tensor):
        assert checksum(wrong) != whole
    assert checksum(torch.zeros(4)) != checksum(-torch.zeros(4))


def test_the_sum_is_of_values_and_not_of_how_they_lie():
    wide = torch.randn(40, 50).bfloat16()
    part = wide[3:24, 7:20]
    odd = wide.view(-1)[1 : 1 + part.numel()]
    odd.copy_(part.clone().reshape(-1))
    assert checksum(odd.reshape(part.shape)) == checksum(odd.clone())
    assert checksum(wide.T) == checksum(wide.T.contiguous())


def test_the_differing_tensors_are_named():
    names = ("a", "b", "c")
    tensors = [torch.randn(5), torch.randn(5), torch.randn(2, 2)]
    first = Checksums.of(names, tensors)
    tensors[0], tensors[1] = tensors[1], tensors[0]
    second = Checksums.of(names, tensors)
    assert first.differing(second) == ["a", "b"]
    assert first.total() != second.total() and first.total() == Checksums(names, first.values.clone()).total()
    with pytest.raises(ValueError, match="different"):
        first.differing(Checksums.of(("a", "c", "b"), tensors))
