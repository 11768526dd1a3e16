"""The kernels of the paged engine compute what plain torch computes.

Without a GPU they run in Triton's interpreter, which ``conftest`` turns on.
"""

import numpy as np
import pytest
import torch

from meshloom.rollout.paged_ops import HeadNorms, HeadShape, NormKind, Pool, Rope, Slots, TermNorms, TorchOps
from meshloom.rollout.sampling import seed_keys
from meshloom.rollout.slot_state import Field, Finish, Number
from meshloom.rollout.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SHAPES = [HeadShape(4, 2, 32, 16), HeadShape(7, 1, 64, 16), HeadShape(3, 3, 16, 32)]


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def normal(*size: int, random: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=random).to(dtype)


def pool_of(shape: HeadShape, pages: int, random: torch.Generator, device: torch.device, layers: int = 2) -> Pool:
    cells = [normal(pages, 2, shape.num_kv_heads, shape.page, shape.head_dim, random=random) for _ in range(layers)]
    cells = [cell.to(device) for cell in cells]
    return Pool(cells, torch.tensor([cell.data_ptr() for cell in cells], device=device))


def slots_of(lengths: list[int], shape: HeadShape, random: torch.Generator, *, stops=((5, 6), (-1, -1))) -> Slots:
    """Rows whose newest token stands at ``lengths``; a negative length is a row that is not in use."""
    count, most = len(lengths), max(lengths) // shape.page + 2
    state = torch.zeros(len(Field), count + 3, dtype=torch.int64)
    state[Field.FINISH] = Finish.EMPTY
    state[Field.LENGTH, :count] = torch.tensor(lengths).clamp(min=0)
    state[Field.FINISH, :count] = torch.where(torch.tensor(lengths) < 0, Finish.EMPTY, Finish.RUNNING)
    state[Field.LIMIT], state[Field.ROW, :count] = 4, torch.randperm(count, generator=random)
    state[Field.COUNT, :count] = torch.arange(count) % 4
    state[Field.KEY, :count] = torch.from_numpy(seed_keys(range(count)).view(np.int64))
    state[Field.RULE, :count] = torch.arange(count) % 2
    numbers = torch.zeros(len(Number), count + 3)
    numbers[Number.TEMPERATURE], numbers[Number.TOP_P] = 1.0, 1.0
    table = torch.randperm(count * most, generator=random).view(count, most).int()
    return Slots(
        state=state,
        numbers=numbers,
        table=table,
        seen=torch.full((count + 3,), -9),
        places=torch.full((count + 3,), -9),
        stops=torch.tensor(stops),
        ids=torch.zeros(count, 5, dtype=torch.int32),
        logprobs=torch.zeros(count, 5),
    )


def on(slots: Slots, device: torch.device) -> Slots:
    return Slots(**{name: tensor.to(device, copy=True) for name, tensor in vars(slots).items()})


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("width", [64, 100, 896])
def test_norms(random, gemma, width):
    kind = NormKind(1e-5, gemma)
    x, y, residual = normal(3, 5, width, random=random)
    weight, *norms = normal(3, width, random=random)
    results = []
    for ops, device in ((TorchOps(), CPU), (TritonOps(DEVICE), DEVICE)):
        a, b, c, w = (tensor.to(device, copy=True) for tensor in (x, y, residual, weight))
        terms = TermNorms(*(norm.to(device) for norm in norms))
        found = [ops.rms_norm(a, w, kind), *ops.norm_of_sum(c, a, w, kind), *ops.norm_of_sum(c, a, w, kind, terms)]
        torch.testing.assert_close(c.cpu(), residual, rtol=0, atol=0)
        kept = c.clone()
        found += [ops.norm_of_kept_sum(kept, a, b, w, kind, terms), kept]
        found.append(ops.norm_of_kept_sum(c, a, b, w, kind))
        found.append(ops.norm_of_kept_sum(c, a, b, w, kind))
        results.append([tensor.cpu() for tensor in (*found, c)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(results[0][-1], residual + 2 * (x + y))


def exact_norm(x: torch.Tensor, weight: torch.Tensor, kind: NormKind) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + kind.eps) * (weight + kind.gemma)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_only_what_leaves_a_layer_is_rounded(random, name):
    """Sums, norms and activations on the way to it were: sampler and compiled trainer then rounded at different places.

    In float16: Triton's interpreter cuts bfloat16 where a GPU rounds it.
    """
    ops, device = (TorchOps(), CPU) if name == "torch" else (TritonOps(DEVICE), DEVICE)
    kind, shape, tokens = NormKind(1e-6, True), HeadShape(3, 3, 64, 16), 40
    narrow = [normal(*size, random=random, dtype=torch.float16).to(device) for size in [(3, tokens, 576), (5, 576)]]
    (x, y, residual), (weight, *norms, query, key) = narrow
    wide_x, wide_y, wide_residual, wide_weight = (tensor.double() for tensor in (x, y, residual, weight))
    total = wide_residual + exact_norm(wide_x, norms[0].double(), kind)
    expected = [exact_norm(total, wide_weight, kind), total + exact_norm(wide_y, norms[1].double(), kind)]
    found = [ops.norm_of_sum(residual, x, weight, kind, TermNorms(*norms))[0], residual.clone()]
    ops.norm_of_kept_sum(found[1], x, y, weight, kind, TermNorms(*norms))
    found.append(ops.gated(x, True))
    gate, up = wide_x.chunk(2, -1)
    expected.append(torch.nn.functional.gelu(gate, approximate="tanh") * up)
    cos, sin = (normal(50, 32, random=random, dtype=torch.float16).to(device) for _ in range(2))
    head_norms, places = HeadNorms(query[:64], key[:64], kind), torch.full((tokens,), -1, device=device)
    cells = torch.zeros(1, 2, 3, 16, 64, dtype=torch.float16, device=device)
    pool = Pool([cells], torch.tensor([cells.data_ptr()], device=device))
    turned = ops.rope_store(
        x.clone(), shape, Rope(cos, sin), torch.arange(tokens, device=device), places, pool, 0, head_norms, False
    )
    found.append(turned[:, : 3 * 64])
    low, high = exact_norm(wide_x[:, : 3 * 64].unflatten(1, (3, 64)), query[:64].double(), kind).chunk(2, -1)
    c, s = cos[:tokens, None].double(), sin[:tokens, None].double()
    expected.append(torch.cat([low * c - high * s, high * c + low * s], -1).flatten(1))
    for ours, exact in zip(found, expected, strict=True):
        assert (ours == exact.half()).double().mean() > 0.98


@pytest.mark.parametrize("is_gelu", [False, True])
def test_gated(random, is_gelu):
    x = normal(3, 2 * 1100, random=random)
    torch.testing.assert_close(TritonOps(DEVICE).gated(x.to(DEVICE), is_gelu).cpu(), TorchOps().gated(x, is_gelu))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", [None, False, True])
def test_rotation_and_storing(random, shape, norm):
    tokens, half = 5, shape.head_dim // 2
    qkv = normal(tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, random=random)
    rope = Rope(normal(40, half, random=random), normal(40, half, random=random))
    norms = None if norm is None else HeadNorms(*normal(2, shape.head_dim, random=random), NormKind(1e-6, norm))
    positions, places = torch.tensor([3, 39, 0, 7, 8]), torch.tensor([17, -1, 0, 33, 34])
    for keep_key in (False, True):
        results = []
        for ops, device in ((TorchOps(), CPU), (TritonOps(DEVICE), DEVICE)):
            work, pool = qkv.to(device, copy=True), pool_of(shape, 3, torch.Generator().manual_seed(1), device)
            its_norms = None if norms is None else HeadNorms(norms.query.to(device), norms.key.to(device), norms.kind)
            its_rope = Rope(rope.cos.to(device), rope.sin.to(device))
            ops.rope_store(work, shape, its_rope, positions.to(device), places.to(device), pool, 1, its_norms, keep_key)
            results.append([work.cpu(), *(layer.cpu() for layer in pool.layers)])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_over_pages(random, shape, window, splits, monkeypatch):
    monkeypatch.setattr(TritonOps, "_splits", lambda self, programs: splits)
    slots = slots_of([0, 15, 16, 100, -1, 47], shape, random)
    pages = slots.table.numel()
    qkv = normal(6, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, random=random)
    results = []
    for ops, device in ((TorchOps(), CPU), (TritonOps(DEVICE), DEVICE)):
        here, pool = on(slots, device), pool_of(shape, pages, torch.Generator().manual_seed(1), device)
        # Nothing that was not written may matter.
        for layer in pool.layers:
            layer[slots.table[1, 1].item()] = torch.nan
        ops.prepare(here, 6, shape.page)
        results.append(ops.attend(qkv.to(device), shape, here, pool, 1, 0.3, window).cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert not results[0][4].any() and results[0][0].any()


def test_where_a_row_is(random):
    slots = slots_of([0, 15, 16, 100, -1], SHAPES[0], random)
    theirs, ours = on(slots, CPU), on(slots, DEVICE)
    TorchOps().prepare(theirs, 5, 16)
    TritonOps(DEVICE).prepare(ours, 5, 16)
    assert ours.seen.tolist() == theirs.seen.tolist() == [1, 16, 17, 101, 0, -9, -9, -9]
    assert ours.places.tolist() == theirs.places.tolist()
    assert theirs.places[3] == slots.table[3, 6] * 16 + 4 and theirs.places[4] == -1


@pytest.mark.parametrize("vocabulary", [9, 4096, 9000])
@pytest.mark.parametrize("filtered", [False, True])
def test_drawing(random, vocabulary, filtered):
    """Every row with its own temperature and filters; one is greedy, one is not in use."""
    count = 24
    slots = slots_of([5] * (count - 1) + [-1], SHAPES[0], random)
    slots.numbers[Number.TEMPERATURE, :count] = torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(6)
    if filtered:
        slots.state[Field.TOP_K, :count] = torch.tensor([0, 0, 1, 3, 10**6, 0]).repeat_interleave(4)
        slots.numbers[Number.TOP_P, :count] = torch.tensor([1.0, 0.4, 1.0, 0.7, 1.0, 0.95]).repeat_interleave(4)
        slots.numbers[Number.MIN_P, :count] = torch.tensor([0.2, 0.0, 0.0, 0.0, 0.5, 0.01]).repeat_interleave(4)
    logits = 3 * normal(count, vocabulary, random=random)
    theirs, ours = on(slots, CPU), on(slots, DEVICE)
    TorchOps().draw(logits.clone(), theirs, filtered=filtered)
    TritonOps(DEVICE).draw(logits.to(DEVICE, copy=True), ours, filtered=filtered)
    assert ours.state.tolist() == theirs.state.tolist()
    assert ours.ids.tolist() == theirs.ids.tolist()
    torch.testing.assert_close(ours.logprobs.cpu(), theirs.logprobs, rtol=1e-4, atol=1e-5)
    assert (ours.logprobs.cpu() < 0).any()


def test_a_stop_token_ends_a_row_and_the_limit_does(random):
    slots = slots_of([5] * 8, SHAPES[0], random)
    slots.numbers[Number.TEMPERATURE] = 0.0
    logits = torch.zeros(8, 9)
    logits[:, 5] = 9.0
    for ops, device in ((TorchOps(), CPU), (TritonOps(DEVICE), DEVICE)):
        here = on(slots, device)
        ops.draw(logits.to(device, copy=True), here, filtered=False)
        # Rule 0 stops at token 5; rule 1 has no stops, and its rows 3 and 7 have made their last token.
        running, stop, limit = Finish.RUNNING, Finish.STOP, Finish.LENGTH
        assert here.state[Field.FINISH, :8].tolist() == [stop, running, stop, limit] * 2


def test_broken_logits_give_no_number(random):
    slots = slots_of([5, 5, 5], SHAPES[0], random)
    logits = torch.zeros(3, 50)
    logits[1, 7], logits[2, 7] = torch.nan, torch.inf
    here = on(slots, DEVICE)
    TritonOps(DEVICE).draw(logits.to(DEVICE), here, filtered=False)
    found = here.logprobs.cpu()[here.state.cpu()[Field.ROW, :3], slots.state[Field.COUNT, :3]]
    assert found.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("place", [0, 5000])
def test_one_broken_logit_is_found_through_filters_and_in_greedy_rows(random, place):
    """A filter dropped a NaN as if it were unlikely, and a maximum passes over it: such a row gave a number."""
    slots = slots_of([5, 5, 5, 5], SHAPES[0], random)
    slots.numbers[Number.TEMPERATURE, :4] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    slots.state[Field.TOP_K, :4] = 3
    logits = normal(4, 9000, random=random)
    logits[[0, 2], place] = torch.nan
    here = on(slots, DEVICE)
    TritonOps(DEVICE).draw(logits.to(DEVICE), here, filtered=True)
    found = here.logprobs.cpu()[here.state.cpu()[Field.ROW, :4], slots.state[Field.COUNT, :4]]
    assert found.isfinite().tolist() == [False, True, False, True]
