"""Columns on their way: small, and the same when they are opened."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshloom.fabric.wire import decode, encode
from meshloom.samples.compact import Compact

DTYPES = st.sampled_from([torch.int64, torch.int32, torch.float64, torch.float32, torch.bool, torch.bfloat16])


@given(st.lists(st.tuples(st.floats(width=32) | st.integers(-300, 300), st.integers(1, 30))), DTYPES)
def test_what_is_opened_is_what_was_packed(runs: list[tuple[float, int]], dtype: torch.dtype) -> None:
    """To the last bit: signs of zeros and what is no number too, in its dtype, also after it has travelled."""
    whole = not dtype.is_floating_point
    values = [int(v) if whole and math.isfinite(v) else 0 if whole else v for v, count in runs for _ in range(count)]
    column_T = torch.tensor([max(-(2**31), min(2**31 - 1, v)) if whole else v for v in values]).to(dtype)
    packed = Compact.of(column_T)
    found_T = decode(*encode(packed)).opened()
    assert found_T.dtype == dtype and packed.nbytes <= column_T.nbytes
    assert torch.equal(found_T.view(torch.uint8), column_T.view(torch.uint8))


def test_a_number_that_only_the_wide_dtype_has_stays_wide() -> None:
    for column_T in (torch.tensor([0.1, 0.25], dtype=torch.float64), torch.tensor([1, 2**40])):
        assert torch.equal(Compact.of(column_T).opened(), column_T)


@pytest.mark.parametrize(
    ("column_T", "most_bytes"),
    [
        (torch.arange(0, 150_000, 37), 4 * 4055),
        (torch.arange(4000) % 200 < 100, 40 * 5),
        (torch.tensor([0.0, 0.7], dtype=torch.float64).repeat_interleave(500), 2 * 12),
        (torch.randn(100, generator=torch.Generator().manual_seed(1)).double(), 400),
    ],
    ids=["ids", "mask", "advantages of a sample", "log-probs"],
)
def test_usual_columns_take_few_bytes(column_T: torch.Tensor, most_bytes: int) -> None:
    assert Compact.of(column_T).nbytes <= most_bytes
