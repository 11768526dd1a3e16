"""The Triton kernels of training equal plain torch, on odd shapes.

Without a GPU they run in Triton's interpreter, which ``conftest`` turns on.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch for GPUs")

from meshloom.train.gather import RowIndex  # noqa: E402
from meshloom.train.gather_kernels import sum_copies  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("width", [1, 40, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_a_row_add_up_in_float32(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    source_A = torch.randint(0, 9, (57,), generator=generator)
    source_A[source_A == 4] = 5
    grad_AW = torch.randn(57, width, generator=generator).to(dtype)
    index = RowIndex.of(source_A, 9)
    total_CW = sum_copies(*(x.to(DEVICE) for x in (grad_AW, index.copies_A, index.start_C1))).cpu()
    expected = torch.zeros(9, width, dtype=torch.float64).index_add_(0, source_A, grad_AW.double())
    assert total_CW.dtype == dtype and not total_CW[4].any()
    # Rounded once, to the 8 bits of bfloat16; the interpreter cuts where a GPU rounds.
    torch.testing.assert_close(
        total_CW.double(), expected, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
