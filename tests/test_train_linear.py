"""Linear layers through oneDNN: the same numbers as torch's own, and only where they serve."""

import copy

import pytest
import torch
from torch import nn

from meshloom.train.linear import linear, use_processor_kernels


@pytest.mark.parametrize("shape", [(40, 24), (1, 64, 24), (3, 24), (5, 7, 24)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=dtype), torch.randn(10, 24, dtype=dtype)]
    given += [torch.randn(10, dtype=dtype)] if bias else []
    weight_of_output = torch.randn(*shape[:-1], 10, dtype=dtype)
    results = []
    for function in (linear, nn.functional.linear):
        tensors = [tensor.clone().requires_grad_() for tensor in given]
        out = function(*tensors)
        (out * weight_of_output).sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in tensors)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-5)


def test_parts_that_need_no_gradient_get_none() -> None:
    x, weight = torch.randn(40, 8), torch.randn(6, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_a_model_keeps_its_parameters_and_copies() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    changed = copy.deepcopy(model)
    use_processor_kernels(changed)
    assert changed.state_dict().keys() == model.state_dict().keys()
    assert all(isinstance(layer, nn.Linear) and type(layer) is not nn.Linear for layer in (changed[0], changed[2]))
    x = torch.randn(50, 16)
    torch.testing.assert_close(copy.deepcopy(changed)(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_same_product_twice_is_the_same_bit_for_bit() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3000, 64), torch.randn(96, 64)
    first = linear(x, weight)
    assert all(torch.equal(linear(x, weight), first) for _ in range(20))
