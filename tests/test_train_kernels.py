"""The Triton kernels of training equal plain torch, on odd shapes.

Without a GPU they run in Triton's interpreter, which ``conftest`` turns on.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch for GPUs")

from meshloom.train.attention import use_layouts  # noqa: E402
from meshloom.train.fused_logprobs import Blocks, fused_logprobs_and_entropy  # noqa: E402
from meshloom.train.gather import RowIndex  # noqa: E402
from meshloom.train.gather_kernels import sum_copies  # noqa: E402
from tests.models import tiny_model  # noqa: E402
from tests.test_train_model import make_samples, trained, weighted  # noqa: E402

N, D, V = 13, 24, 301
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


class Head:
    """What the log-probs need of an output head, with weights of this test's own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None) -> None:
        self.weight, self.bias, self.scale, self.softcap = weight, bias, scale, softcap
        self.gradient_total = self.part = None


def make_head(dtype: torch.dtype, *, bias: bool, scale: float = 1.0, softcap: float | None = None) -> Head:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator).to(DEVICE, dtype).requires_grad_()
    offsets = torch.randn(V, generator=generator).to(DEVICE, dtype).requires_grad_() if bias else None
    return Head(weight, offsets, scale, softcap)


def reference(head: Head, hidden_ND, targets_N, temperature: float, grads) -> list[torch.Tensor]:
    """Log-probs, entropy and gradients in float64 from whole logits."""
    inputs = [x.detach().double().requires_grad_() for x in (hidden_ND, head.weight, head.bias) if x is not None]
    logits = torch.nn.functional.linear(*inputs) * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    logp = torch.log_softmax(logits / temperature, -1)
    logprob, entropy = logp.gather(-1, targets_N[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)
    found = torch.autograd.grad(loss_of(logprob, entropy, grads), inputs)
    return [logprob.detach(), entropy.detach(), *found]


def loss_of(logprob, entropy, grads):
    """A loss whose gradients are ``grads``; none: the entropy is not asked for."""
    total = (logprob * grads[0].to(logprob.dtype)).sum()
    return total if grads[1] is None else total + (entropy * grads[1].to(entropy.dtype)).sum()


def fused(head: Head, hidden_ND, targets_N, temperature: float, grads, chunk_bytes: int) -> list[torch.Tensor]:
    inputs = [x for x in (hidden_ND, head.weight, head.bias) if x is not None]
    logprob, entropy = fused_logprobs_and_entropy(
        head, hidden_ND, targets_N, temperature=temperature, chunk_bytes=chunk_bytes
    )
    found = torch.autograd.grad(loss_of(logprob, entropy, grads), inputs, allow_unused=True)
    return [logprob.detach(), entropy.detach(), *found]


CASES = {
    "plain": ({"bias": False}, 1.0, True),
    "bias and temperature": ({"bias": True}, 0.6, True),
    "no entropy": ({"bias": True}, 1.0, False),
    "scale": ({"bias": False, "scale": 0.25}, 0.9, True),
    "softcap": ({"bias": True, "scale": 0.5, "softcap": 5.0}, 0.8, True),
}


def make_inputs(dtype: torch.dtype, entropy: bool):
    generator = torch.Generator().manual_seed(2)
    hidden_ND = torch.randn(N, D, generator=generator).to(DEVICE, dtype).requires_grad_()
    targets_N = torch.randint(0, V, (N,), generator=generator).to(DEVICE)
    grads = [torch.randn(N, generator=generator).to(DEVICE) for _ in range(2)]
    return hidden_ND, targets_N, grads if entropy else [grads[0], None]


@pytest.mark.parametrize("chunk_bytes", [4 * N * V, 4 * 900])
@pytest.mark.parametrize("case", CASES)
def test_fused_logprobs_equal_whole_logits_in_float64(case: str, chunk_bytes: int) -> None:
    of_head, temperature, entropy = CASES[case]
    head, (hidden_ND, targets_N, grads) = make_head(torch.float32, **of_head), make_inputs(torch.float32, entropy)
    expected = reference(head, hidden_ND, targets_N, temperature, grads)
    for ours, theirs in zip(fused(head, hidden_ND, targets_N, temperature, grads, chunk_bytes), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-5)


def test_fused_gradients_in_bfloat16_add_up_in_float32() -> None:
    """Blocks of a few rows and tokens: were a total rounded after each, the error would be several times larger."""
    head, (hidden_ND, targets_N, grads) = make_head(torch.bfloat16, bias=True), make_inputs(torch.bfloat16, True)
    expected = reference(head, hidden_ND, targets_N, 0.8, grads)
    found = fused(head, hidden_ND, targets_N, 0.8, grads, 6 * 250)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found, expected, strict=True):
        # Each addend is rounded to the 8 bits of bfloat16 once, and the sum once.
        assert (ours.double() - theirs).abs().max() <= 2.0**-6 * theirs.abs().max()


def test_the_weight_gradient_adds_to_a_total_that_the_head_names() -> None:
    head, (hidden_ND, targets_N, grads) = make_head(torch.bfloat16, bias=False), make_inputs(torch.bfloat16, True)
    total_VD = torch.ones(V, D, device=DEVICE)
    head.gradient_total = lambda: total_VD
    *_, grad_weight = fused(head, hidden_ND, targets_N, 1.0, grads, 6 * 300)
    assert grad_weight is None
    expected = reference(head, hidden_ND, targets_N, 1.0, grads)[-1]
    assert (total_VD.double() - 1.0 - expected).abs().max() <= 2.0**-6 * expected.abs().max()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_model_trains_through_the_fused_head_as_through_whole_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied and untied heads of a bfloat16 model: every master has its gradient, the head's too."""
    models = []
    for head in (None, fused_logprobs_and_entropy):
        module = tiny_model(family, torch.bfloat16)
        use_layouts(module)
        model = trained(module.to(DEVICE), 100)
        if head is not None:
            monkeypatch.setattr("meshloom.train.head.logprobs_and_entropy", head)
        model.forward_backward(make_samples(), weighted, temperature=1.0)
        models.append(model)
    plain, ours = ({name: m.grad for name, m in model.optimizer.masters.items()} for model in models)
    for name, grad in ours.items():
        assert (grad - plain[name]).abs().max() <= 0.03 * plain[name].abs().max(), name
    models[1].optim_step(total_updates=2)


def test_no_rows_give_a_zero_gradient() -> None:
    head, (hidden_ND, targets_N, grads) = make_head(torch.float32, bias=True), make_inputs(torch.float32, True)
    none = [x[:0].detach().requires_grad_(x.is_floating_point()) for x in (hidden_ND, targets_N)]
    logprob, _, *found = fused(head, *none, 1.0, [g[:0] for g in grads], 1000)
    assert logprob.shape == (0,) and not any(grad.any() for grad in found)


@pytest.mark.parametrize(("rows", "vocabulary"), [(65536, 151936), (100, 151936), (5, 97), (70000, 97), (1, 1)])
def test_blocks_cover_everything_within_the_bound(rows: int, vocabulary: int) -> None:
    for most in (1, 96, 5000, 256 * 2**20 // 6):
        blocks = Blocks.of(rows, vocabulary, most)
        assert blocks.rows * blocks.width <= most
        assert sum(part.stop - part.start for part in blocks.of_rows()) == rows
        assert sum(part.stop - part.start for part in blocks.of_vocabulary()) == vocabulary
    large = Blocks.of(65536, 151936, 256 * 2**20 // 6)
    assert large.rows % 128 == large.width % 128 == 0 and min(large.rows, large.width) > 5000
