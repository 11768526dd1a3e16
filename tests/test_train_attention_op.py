"""Attention as one operator inside compiled layers: the same gradients, and one piece of code for a layer.

Torch has no flash attention for the processor; where there is no GPU, plain attention stands behind torch's operator.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshloom.plan.compute import choose_attention
from meshloom.samples import Samples
from meshloom.train.attention import attends_in_graph, use_layouts
from meshloom.train.attention_kernels import Bounds
from meshloom.train.attention_op import attend_packed, takes_head
from meshloom.train.model import TrainedModel
from meshloom.train.sharing import Computed
from tests.models import tiny_model
from tests.test_train_attention import plain_kernel, random_rows
from tests.test_train_compile import Counting, compiled
from tests.test_train_model import SETTINGS, gradients, make_samples, trained, weighted
from tests.test_train_sharing import make_groups

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plain attention stands in for a GPU's kernel")
pytest.importorskip("triton", reason="Triton comes with torch for GPUs")


def samples_of(query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, left: int, scale: float):
    """Of each sample: where its queries and keys are, its parts with heads first, and its probabilities [H, T, U]."""
    groups = query.shape[1] // key.shape[1]
    for q0, q1, k0, k1 in zip(*(x.tolist() for x in (queries[:-1], queries[1:], keys[:-1], keys[1:])), strict=True):
        place = torch.arange(k1 - k0)
        distance = place[len(place) - (q1 - q0) :, None] - place[None]
        hidden = (distance < 0) | ((distance > left) if left >= 0 else False)
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        p = (scale * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        yield slice(q0, q1), slice(k0, k1), q, k, v, p


def flash_forward(
    query, key, value, queries, keys, max_q, max_k, dropout, causal, mask, *, scale, window_size_left, window_size_right
):
    assert (max_q, max_k) == (int(queries.diff().max()), int(keys.diff().max()))
    assert (dropout, mask, window_size_right) == (0.0, False, 0) and causal == (window_size_left == -1)
    found = samples_of(query, key, value, queries, keys, window_size_left, scale)
    out = torch.cat([(p @ v).transpose(0, 1) for *_, v, p in found])
    none = query.new_empty(0)
    return out, query.new_zeros((query.shape[1], len(query)), dtype=torch.float32), none, none, none


def flash_backward(
    grad, query, key, value, out, lse, queries, keys, max_q, max_k, dropout, causal, state, unused, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    assert lse.shape == (query.shape[1], len(query)) and out.shape == query.shape
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for rows, seen, q, k, v, p in samples_of(query, key, value, queries, keys, window_size_left, scale):
        g = grad[rows].transpose(0, 1)
        of_p = g @ v.mT
        of_scores = scale * p * (of_p - (of_p * p).sum(-1, keepdim=True))
        grads[0][rows] = (of_scores @ k).transpose(0, 1)
        for total, each in zip(grads[1:], (of_scores.mT @ q, p.mT @ g), strict=True):
            total[seen] = each.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(grads)


@pytest.fixture(autouse=True)
def flash_on_the_processor() -> Iterator[None]:
    torch._dynamo.reset()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


def in_graph(model: TrainedModel, backend: object = "aot_eager") -> TrainedModel:
    """As a GPU compiles it."""
    use_layouts(model.module, in_graph=True)
    model.in_graph = True
    return compiled(model, backend)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_the_operator_and_its_gradient_equal_plain_attention(window: int | None, shared: bool) -> None:
    computed = Computed.of(make_groups())
    lengths = (computed.query_lengths, computed.lengths) if shared else ([7, 0, 20, 12],) * 2
    seen = computed.seen if shared else None
    results = []
    for kernel in (plain_kernel, attend_packed):
        rows = random_rows(sum(lengths[0]))
        views = [x.transpose(0, 1) for x in rows]
        out = kernel(*views, *(Bounds(each) for each in lengths), seen, scale=0.3, window=window)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out, *(x.grad for x in rows)])
    for plain, ours in zip(*results, strict=True):
        # Copies of a row are added up in float32.
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "recompute"), [("qwen2", False), ("gemma3", True)])
def test_gradients_are_those_of_layers_that_are_not_compiled(family: str, recompute: bool) -> None:
    module = tiny_model(family)
    use_layouts(module)
    settings = SETTINGS.model_copy(update={"gradient_checkpointing": recompute})
    plain = trained(copy.deepcopy(module), 60, settings=settings)
    ours = in_graph(trained(module, 60, settings=settings))
    for samples in (make_samples(), make_groups()):
        for model in (plain, ours):
            model.forward_backward(samples, weighted, temperature=1.0)
        for name, grad in gradients(ours).items():
            torch.testing.assert_close(grad, gradients(plain)[name], rtol=1e-3, atol=1e-4)
        for one, other in zip(*(m.forward(samples, temperature=1.0) for m in (plain, ours)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_layer_is_one_piece_of_code_for_all_lengths() -> None:
    module = tiny_model("qwen2")
    use_layouts(module)
    backend = Counting()
    model = in_graph(trained(module, 200), backend)
    counts = []
    for lengths in ([5, 7], [30], [9, 9, 3], [4, 4, 4, 4], [11, 2, 100], [60, 61], [17], [150, 50]):
        ids = torch.arange(sum(lengths)) % 90 + 3
        samples = Samples(torch.tensor(lengths), {"ids": ids, "mask": torch.ones(len(ids), dtype=torch.bool)})
        samples.tokens["mask"][samples.offsets[:-1]] = False
        model.forward_backward(samples.with_tokens(weight=torch.ones(len(ids))), weighted, temperature=1.0)
        counts.append(backend.graphs)
    # A layer, and the last norm; prompts that are shared add a variant of the layer.
    assert set(counts) == {2}
    model.forward_backward(make_groups(), weighted, temperature=1.0)
    assert backend.graphs == 3


def test_the_operator_takes_what_the_rule_gives_to_the_kernel() -> None:
    for width in (8, 20, 64, 72, 128, 256, 264):
        name = choose_attention("auto", gpu=True, narrow=True, head_dim=width, flash_attn=False)
        assert takes_head(width) == (name == "varlen")
    assert not attends_in_graph("auto", torch.zeros(1)) and not attends_in_graph("sdpa", torch.zeros(1))
