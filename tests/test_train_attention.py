"""The rule that picks an attention kernel, and layouts for kernels that take all samples in one call."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshloom.config.errors import UserError
from meshloom.plan.compute import NotPossible, choose_attention
from meshloom.train.attention import PackedAttention, kernel_for
from meshloom.train.attention_kernels import Bounds, flash_attn_kernel
from meshloom.train.attention_op import attend_packed
from meshloom.train.gather import RowIndex, take_rows
from meshloom.train.sharing import Computed, SharedAttention
from tests.test_train_sharing import make_groups

H, K, D = 4, 2, 16


def plain_kernel(
    query_THD: Tensor,
    key_UKD: Tensor,
    value_UKD: Tensor,
    queries: Bounds,
    keys: Bounds,
    seen: RowIndex | None,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """What the kernels of a GPU compute, sample by sample: queries are the last tokens of their samples."""
    if seen is not None:
        key_UKD, value_UKD = take_rows(key_UKD, seen), take_rows(value_UKD, seen)
    bounds = [bounds.on(query_THD.device).tolist() for bounds in (queries, keys)]
    out = []
    for q0, q1, k0, k1 in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        place = torch.arange(k1 - k0)
        distance = place[len(place) - (q1 - q0) :, None] - place[None]
        mask = (distance >= 0) & (distance < (window or len(place)))
        q, k, v = (x.transpose(0, 1) for x in (query_THD[q0:q1], key_UKD[k0:k1], value_UKD[k0:k1]))
        out.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out)


def random_rows(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((H, tokens, D), (K, tokens, D), (K, tokens, D))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("window", [None, 5])
def test_a_shared_prompt_is_attended_once_by_a_kernel_of_one_call(window: int | None) -> None:
    """Queries are only what a sample was computed for; outputs and gradients are those of the whole samples."""
    computed = Computed.of(make_groups())
    assert 0 in computed.query_lengths and sum(computed.query_lengths) == len(computed.tokens_C)
    layout = computed.layout()
    assert isinstance(layout, SharedAttention)
    results = []
    for once in (False, True):
        rows = random_rows(len(computed.tokens_C))
        given = {"scale": 0.3, "window": window}
        out = layout.in_one_call(plain_kernel, *rows, **given) if once else layout.attend(0, *rows, **given)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out, *(x.grad for x in rows)])
    for each, once in zip(*results, strict=True):
        torch.testing.assert_close(once, each, rtol=1e-10, atol=1e-10)


def test_bounds_are_cumulative_and_made_once() -> None:
    bounds = Bounds([3, 0, 5])
    device = torch.device("cpu")
    assert bounds.on(device).tolist() == [0, 3, 3, 8] and bounds.on(device).dtype == torch.int32
    assert bounds.on(device) is bounds.on(device) and bounds.longest == 5


def test_the_rule_picks_what_the_device_and_the_heads_allow() -> None:
    good = {"gpu": True, "narrow": True, "head_dim": 128, "flash_attn": False}
    assert choose_attention("auto", **good) == "varlen"
    assert choose_attention("auto", **good | {"flash_attn": True}) == "varlen"
    assert choose_attention("varlen", **good | {"flash_attn": True}) == "varlen"
    for cannot in ({"gpu": False}, {"narrow": False}, {"head_dim": 20}, {"head_dim": 512}):
        assert choose_attention("auto", **good | cannot) == "sdpa"
        assert choose_attention("sdpa", **good | cannot) == "sdpa"
        with pytest.raises(NotPossible):
            choose_attention("varlen", **good | cannot)
    with pytest.raises(NotPossible, match="imported"):
        choose_attention("flash_attn", **good)


def test_a_kernel_that_cannot_be_used_is_refused_with_the_reason() -> None:
    query = torch.zeros(H, 3, D)
    assert kernel_for("auto", query) is None
    with pytest.raises(UserError, match="not on a GPU") as caught:
        PackedAttention([3], "varlen").attend(0, query, query, query, scale=1.0, window=None)
    assert caught.value.where == "model.attention"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels compute on a GPU")
@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
@pytest.mark.parametrize("window", [None, 5])
def test_kernels_of_a_gpu_equal_plain_attention(name: str, window: int | None) -> None:
    """Grouped heads, queries that are the last tokens of their samples or none at all, and gradients."""
    kernel = attend_packed if name == "varlen" else flash_attn_kernel()
    if kernel is None:
        pytest.skip("flash-attn is not installed")
    bounds = Bounds([7, 0, 3, 300, 1]), Bounds([7, 12, 9, 300, 40])
    generator = torch.Generator().manual_seed(0)
    shapes = ((311, H, 64), (368, K, 64), (368, K, 64))
    rows = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator)
    found = []
    for device, dtype, attend in (("cuda", torch.bfloat16, kernel), ("cpu", torch.float64, plain_kernel)):
        given = [x.to(device, dtype).requires_grad_() for x in rows]
        out = attend(*given, *bounds, None, scale=0.125, window=window)
        (out * weight.to(device, dtype)).sum().backward()
        found.append([x.detach().double().cpu() for x in (out, *(g.grad for g in given))])
    for ours, exact in zip(*found, strict=True):
        assert (ours - exact).norm() <= 0.01 * exact.norm()
