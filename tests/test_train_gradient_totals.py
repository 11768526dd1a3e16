"""Narrow gradients add up in float32, however many wait; the kernel equals plain additions."""

import pytest
import torch
from torch import nn

from meshloom.config.settings import OptimizerSettings
from meshloom.train import gradient_totals
from meshloom.train.optimizer import Optimizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1,), (4096,), (17, 241), (0, 3), (5,), (3, 4096), (3,), (1,)]


def random_tensors(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_kernel_adds_and_sets_every_tensor_of_a_list(dtype: torch.dtype, shift: int) -> None:
    """With tensors that are not aligned too, empty ones, and sizes on both sides of a tile."""
    pytest.importorskip("triton")
    from meshloom.train.gradient_kernels import add_gradients

    totals, gradients = random_tensors(0, torch.float32), random_tensors(1, dtype)
    if shift:
        totals, gradients = (
            [torch.cat([x.new_zeros(1), x.flatten()])[1:] for x in each] for each in (totals, gradients)
        )
    fresh = [place % 3 == 1 for place in range(len(SIZES))]
    before = [t.clone() for t in totals]
    for total, is_fresh in zip(totals, fresh, strict=True):
        if is_fresh:
            total.fill_(torch.nan)
    add_gradients(totals, gradients, fresh)
    for total, old, gradient, is_fresh in zip(totals, before, gradients, fresh, strict=True):
        assert torch.equal(total, gradient.float() if is_fresh else old + gradient)


@pytest.mark.parametrize("most_bytes", [1, 100, 2**30])
def test_gradients_of_several_passes_add_up_in_float32(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    monkeypatch.setattr(gradient_totals, "_MOST_WAITING_BYTES", most_bytes)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.LayerNorm(4)).to(DEVICE, torch.bfloat16)
    module[1].half()
    optimizer = Optimizer(module, OptimizerSettings())
    expected = {name: torch.zeros_like(m) for name, m in optimizer.masters.items()}
    for seed in range(40):
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)

        def loss(x: torch.Tensor = inputs) -> torch.Tensor:
            return module[2](module[1](module[0](x).half()).bfloat16()).float().square().sum() / 1000

        found = torch.autograd.grad(loss(), list(optimizer.parameters.values()))
        for total, gradient in zip(expected.values(), found, strict=True):
            total += gradient
        loss().backward()
        optimizer.collect()
        assert all(p.grad is None for p in optimizer.parameters.values())
    for name, master in optimizer.masters.items():
        assert torch.equal(master.grad, expected[name])


def test_no_more_gradients_wait_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_totals, "_MOST_WAITING_BYTES", 300)
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12))).to(DEVICE, torch.bfloat16)
    most = []
    optimizer = Optimizer(module, OptimizerSettings())
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(p.grad.nbytes for p in module.parameters() if p.grad is not None))
        )
    module(torch.ones(1, 8, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
    # Each has 128 bytes: the third goes over the bound, and all that wait are added.
    assert max(most) == 256 and len(most) == 12
    optimizer.collect()
    assert all(m.grad is not None for m in optimizer.masters.values())
