"""What every rollout engine promises, run against each engine there is: tokens, log-probabilities, endings, isolation.

Another engine joins by an entry in ``ENGINES``. Real vLLM joins where it is asked for (``pytest -m vllm``).
"""

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from meshloom.config.errors import UserError
from meshloom.rollout.decode_stack import reason_against
from meshloom.rollout.feed import RequestFeed
from meshloom.rollout.paged_engine import PagedEngine
from meshloom.rollout.protocol import Completion, Engine, FinishReason, Request, SamplingParams
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.attention import PackedAttention, use_layouts
from meshloom.train.head import OutputHead, decoder_of
from tests.models import FAMILIES, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EOS = 1
LARGE = 10**8


def letters(ids: Sequence[int]) -> str:
    """A toy tokenizer: token 0 is nothing, 3 to 9 are pieces of several characters, the others one letter each."""
    pieces = {0: "", 3: "ab", 4: "END", 5: "xENDy", 6: "E", 7: "N", 8: "D", 9: " D"}
    return "".join(pieces.get(token, chr(0x100 + token)) for token in ids)


def torch_engine(family: str, dtype: torch.dtype = torch.float64, **options) -> tuple[TorchEngine, torch.nn.Module]:
    model = tiny_model(family, dtype).to(DEVICE)
    use_layouts(model)
    options = {
        "eos_ids": (EOS,),
        "max_sequences": 8,
        "kv_cache_bytes": LARGE,
        "prefill_tokens": 64,
        "decode": letters,
    } | options
    return TorchEngine(model, **options), model


def token_bytes(engine: str) -> int:
    """Keys and values of a token of the tiny models: 2 × layers × heads × width × bytes of a number."""
    return 2 * 3 * 2 * 16 * (4 if engine == "paged" and DEVICE == "cuda" else 8)


def paged_engine(family: str, dtype: torch.dtype | None = None, **options) -> tuple[PagedEngine, torch.nn.Module]:
    """The engine for GPUs; without one its kernels are replaced by the same operations in torch."""
    # Kernels know no float64.
    model = tiny_model(family, torch.float32 if DEVICE == "cuda" else dtype or torch.float64).to(DEVICE)
    use_layouts(model)
    assert reason_against(model) is None
    defaults = {"eos_ids": (EOS,), "max_sequences": 8, "kv_cache_bytes": LARGE, "prefill_tokens": 64, "decode": letters}
    return PagedEngine(model, page=16, **defaults | options), model


def real_vllm(family: str, dtype: torch.dtype | None = None, **options) -> tuple[Engine, torch.nn.Module]:
    from tests.vllm_engines import vllm_engine

    return vllm_engine(family, dtype, **{"decode": letters} | options)


EMBEDDED: dict[str, Callable[..., tuple[Engine, torch.nn.Module]]] = {"torch": torch_engine, "paged": paged_engine}
ENGINES = {**EMBEDDED, "vllm": real_vllm}
NAMES = [*EMBEDDED, pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=NAMES)
def make(request) -> Callable[..., tuple[Engine, torch.nn.Module]]:
    return ENGINES[request.param]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 97, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def ask(id: int, ids: list[int], *, seeds: Sequence[int] = (0,), **params) -> Request:
    return Request(
        id=id, prompt_ids=ids, params=SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | params), seeds=seeds
    )


def collect(
    engine: Engine, requests: Sequence[Request], deadline_s: float = 120.0
) -> dict[tuple[int, int], Completion]:
    done = {}
    for completion in engine.generate(requests, deadline_s=deadline_s):
        assert (completion.request_id, completion.index) not in done
        assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
        done[completion.request_id, completion.index] = completion
    assert set(done) == {(request.id, index) for request in requests for index in range(len(request.seeds))}
    return done


def trainer_logprobs(model: torch.nn.Module, completion: Completion, request: Request) -> torch.Tensor:
    """Log-probabilities of a response from one packed forward, filters included, the plain way."""
    ids = torch.tensor([*request.prompt_ids, *completion.ids], device=DEVICE)
    place = torch.arange(len(ids), device=DEVICE)[None]
    with torch.no_grad():
        passed = decoder_of(model)(
            input_ids=ids[None], position_ids=place, layout=PackedAttention([len(ids)]), use_cache=False
        )
        logits = OutputHead(model).logits(passed.last_hidden_state[0, len(request.prompt_ids) - 1 : -1])
    logits = logits.double() / request.params.temperature
    best, order = logits.sort(1, descending=True)
    if request.params.top_k:
        best[:, request.params.top_k :] = -torch.inf
    before = best.softmax(1).cumsum(1) - best.softmax(1)
    best[before >= request.params.top_p] = -torch.inf
    best[best.softmax(1) < request.params.min_p * best.softmax(1)[:, :1]] = -torch.inf
    kept = torch.full_like(logits, -torch.inf).scatter(1, order, best)
    return kept.log_softmax(1).gather(1, ids[len(request.prompt_ids) :, None])[:, 0].cpu()


def plain_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in float64, with transformers' own attention."""
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    return plain.to(DEVICE, torch.float64).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(make, family):
    """Prompts shorter and longer than the sliding window, responses that cross it and several sizes of cache slots."""
    engine, model = make(family)
    plain = plain_copy(model)
    plain.generation_config.eos_token_id = None
    requests = [
        ask(i, prompt(n, i), temperature=0, max_tokens=tokens)
        for i, (n, tokens) in enumerate([(3, 70), (13, 90), (30, 40), (90, 12)])
    ]
    done = collect(engine, requests)
    for request in requests:
        ids = torch.tensor([request.prompt_ids], device=DEVICE)
        expected = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.params.max_tokens
        )
        assert done[request.id, 0].ids == expected[0, ids.shape[1] :].tolist()
        assert done[request.id, 0].logprobs == [0.0] * request.params.max_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_the_trainers_packed_forward(make, family):
    engine, model = make(family, torch.float32)
    requests = [
        ask(0, prompt(5), seeds=[1, 2], max_tokens=80),
        ask(1, prompt(21), seeds=[3], temperature=0.6, max_tokens=30),
        ask(2, prompt(2), seeds=[4], temperature=1.4, top_k=20, max_tokens=30),
        ask(3, prompt(9), seeds=[5], top_p=0.7, max_tokens=30),
        ask(4, prompt(9), seeds=[6], top_k=50, min_p=0.05, max_tokens=30),
        ask(5, prompt(9), seeds=[7], top_k=50, top_p=0.9, max_tokens=30),
    ]
    if make is not real_vllm:  # which refuses this
        requests.append(ask(6, prompt(9), seeds=[6], top_k=50, top_p=0.9, min_p=0.05, max_tokens=30))
    for (id, _), completion in collect(engine, requests).items():
        expected = trainer_logprobs(model, completion, requests[id])
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0)


def mixed_requests() -> list[Request]:
    return [
        ask(0, prompt(3), seeds=[1, 2, 3], max_tokens=70, ignore_eos=False),
        ask(1, prompt(40), seeds=[4], max_tokens=5, top_k=9),
        ask(2, prompt(17), seeds=[5, 6, 7, 8, 9], max_tokens=33, temperature=1.3),
        ask(3, prompt(60), seeds=[10, 11], max_tokens=80, top_p=0.9),
        ask(4, prompt(1), seeds=[12], max_tokens=1, temperature=0),
    ]


def tokens_of(done: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], list[int]]:
    return {key: completion.ids for key, completion in done.items()}


@functools.cache
def mixed_tokens(name: str) -> dict[tuple[int, int], list[int]]:
    engine, _ = ENGINES[name]("gemma3", max_sequences=32)
    return tokens_of(collect(engine, mixed_requests()))


@settings(deadline=None, max_examples=6)
@given(
    max_sequences=st.integers(1, 14),
    prefill_tokens=st.sampled_from([1, 30, 200]),
    cache_tokens=st.sampled_from([190, 260, 500, 100_000]),
    order=st.permutations(range(5)),
)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_batching_memory_or_order(name, max_sequences, prefill_tokens, cache_tokens, order):
    """Short memory sets samples back and computes them again; that too must leave the tokens as they are."""
    engine, _ = ENGINES[name](
        "gemma3",
        max_sequences=max_sequences,
        prefill_tokens=prefill_tokens,
        kv_cache_bytes=cache_tokens * token_bytes(name),
    )
    requests = mixed_requests()
    assert tokens_of(collect(engine, [requests[i] for i in order])) == mixed_tokens(name)


def test_a_group_equals_separate_requests(make):
    engine, _ = make("qwen3", max_sequences=3)
    seeds = [5, -3, 5, 2**80, 0, 1, 2]
    group = collect(engine, [ask(0, prompt(12), seeds=seeds)])
    alone = collect(engine, [ask(i, prompt(12), seeds=[seed]) for i, seed in enumerate(seeds)])
    assert [group[0, i].ids for i in range(7)] == [alone[i, 0].ids for i in range(7)]
    assert group[0, 0].ids == group[0, 2].ids != group[0, 1].ids


@pytest.mark.parametrize("max_sequences", [2, 20])
def test_a_greedy_sample_shares_the_prompt_of_its_group_and_changes_no_other(make, request, max_sequences):
    """It used to be a request of its own, whose prompt was computed once more."""
    engine, _ = make("llama", max_sequences=max_sequences)
    sampled = ask(0, prompt(50), seeds=range(4), temperature=0.9, top_k=20)
    apart = collect(engine, [sampled, ask(1, prompt(50), temperature=0)])
    if "vllm" not in request.node.name:
        engine.take_prompts()
    together = collect(engine, [dataclasses.replace(sampled, seeds=range(5), num_greedy=1)])
    assert [together[0, i].ids for i in range(5)] == [apart[0, i].ids for i in range(4)] + [apart[1, 0].ids]
    assert together[0, 4].logprobs == [0.0] * 20
    assert max(together[0, 0].logprobs) < 0.0
    if "vllm" not in request.node.name:
        assert engine.take_prompts().computed in (49, 50)


@pytest.mark.parametrize("max_sequences", [2, 5, 20])
def test_the_prompt_of_a_group_is_computed_once(max_sequences):
    engine, model = torch_engine("llama", max_sequences=max_sequences)
    seen = []
    decoder_of(model).register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    collect(
        engine, [ask(0, prompt(50), seeds=range(7), max_tokens=4), ask(1, prompt(40), seeds=range(3), max_tokens=2)]
    )
    assert sum(seen) == 50 + 7 * 3 + 40 + 3 * 1


def test_global_random_state_is_neither_read_nor_moved(make):
    engine, _ = make("llama")
    torch.manual_seed(1)
    first = tokens_of(collect(engine, [ask(0, prompt(4), seeds=[3])]))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert tokens_of(collect(engine, [ask(0, prompt(4), seeds=[3])])) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def first_sample(make, **params) -> Completion:
    engine, _ = make("llama")
    return collect(engine, [ask(0, prompt(6), seeds=[11], **{"max_tokens": 40} | params)])[0, 0]


def test_a_sample_ends_at_its_length_its_end_token_or_a_stop_id(make):
    free = first_sample(make)
    assert (free.finish, len(free.ids)) == (FinishReason.LENGTH, 40)
    token = free.ids[7]
    until = free.ids.index(token) + 1
    stopped = first_sample(make, stop_ids=(token, 96))
    assert (stopped.finish, stopped.ids) == (FinishReason.STOP, free.ids[:until])
    assert stopped.logprobs == pytest.approx(free.logprobs[:until], abs=1e-5)
    engine, _ = make("llama", eos_ids=(95, token))
    params = {"seeds": [11], "max_tokens": 40}
    ends = collect(engine, [ask(0, prompt(6), ignore_eos=False, **params), ask(1, prompt(6), **params)])
    assert (ends[0, 0].finish, ends[0, 0].ids) == (FinishReason.STOP, free.ids[:until])
    assert (ends[1, 0].finish, ends[1, 0].ids) == (FinishReason.LENGTH, free.ids)


def test_a_stop_string_ends_a_sample_in_the_step_that_completes_it(make):
    """Inside one token, at its end, and over several tokens with others of no text between."""
    free = first_sample(make)
    for stop in (letters(free.ids[4:5]), letters(free.ids[10:14]), letters(free.ids[:40])):
        until = next(n for n in range(1, 41) if stop in letters(free.ids[:n]))
        stopped = first_sample(make, stop_strings=("never there", stop))
        assert (stopped.finish, stopped.ids) == (FinishReason.STOP, free.ids[:until])


def test_stop_strings_without_a_decoder_are_refused(make):
    engine, _ = make("llama", decode=None)
    with pytest.raises(UserError, match="decode"):
        engine.generate([ask(0, prompt(3), stop_strings=("x",))], deadline_s=10)


def test_samples_come_as_they_finish(make):
    engine, _ = make("llama", max_sequences=2)
    requests = [ask(0, prompt(4), max_tokens=60), ask(1, prompt(4), max_tokens=5), ask(2, prompt(4), max_tokens=5)]
    assert [completion.request_id for completion in engine.generate(requests, deadline_s=60)] == [1, 2, 0]


def test_requests_that_come_later_get_the_tokens_they_would_get_alone(make):
    """A feed is read while others generate, and while nothing does; the end is when it is closed."""
    engine, _ = make("qwen3")
    first, second, third = (ask(i, prompt(4 + 9 * i, seed=i), seeds=(i, i + 7), max_tokens=6) for i in range(3))
    feed = RequestFeed(ask(0, prompt(30), seeds=range(6), max_tokens=6))
    found: dict[tuple[int, int], Completion] = {}
    for completion in engine.generate([first], deadline_s=60, feed=feed):
        found[completion.request_id, completion.index] = completion
        if len(found) == 1:
            feed.put([second])
        if len(found) == 4:  # nothing runs any more
            threading.Timer(0.05, lambda: (feed.put([third]), feed.close())).start()
    alone = {(r.id, c.index): c.ids for r in (first, second, third) for c in engine.generate([r], deadline_s=60)}
    assert tokens_of(found) == alone


def test_a_request_that_a_feed_brings_and_that_is_aborted_at_once_ends(make):
    """Between two looks of the engine, at the feed and at what ends, both came: the abort found nothing, and was forgotten."""
    engine, _ = make("qwen3")

    class Late(RequestFeed):
        @property
        def has_requests(self) -> bool:
            found = super().has_requests
            if late:
                self.put([late.pop()])
                engine.abort(1)
                self.close()
            return found

    late = [ask(1, prompt(5), max_tokens=3000)]
    feed = Late(ask(0, prompt(30), seeds=range(2), max_tokens=3000))
    done = {c.request_id: c for c in engine.generate([ask(0, prompt(4), max_tokens=4)], deadline_s=60, feed=feed)}
    assert done[0].finish is FinishReason.LENGTH
    assert (done[1].finish, list(done[1].ids)) == (FinishReason.ABORTED, [])


def test_a_generation_with_a_feed_ends_at_its_deadline(make):
    engine, _ = make("qwen3")
    feed = RequestFeed(ask(0, prompt(8), seeds=(0,), max_tokens=3))
    assert [c.finish for c in engine.generate([ask(0, prompt(4), max_tokens=3)], deadline_s=2.0, feed=feed)] == [
        FinishReason.LENGTH
    ]
    assert list(engine.generate([], deadline_s=0.05, feed=feed)) == []


def test_a_feed_whose_requests_could_never_fit_is_refused(make):
    engine, _ = make("qwen3", kv_cache_bytes=10_000)
    with pytest.raises(UserError, match="does not fit"):
        engine.generate([], deadline_s=1, feed=RequestFeed(ask(0, prompt(4), max_tokens=10_000)))


def test_a_request_is_withdrawn_only_if_it_has_not_begun(make):
    engine, _ = make("llama", max_sequences=2)
    requests = [ask(i, prompt(4, i), seeds=[i, 50 + i, 90 + i], max_tokens=9) for i in range(3)]
    expected = tokens_of(collect(engine, requests))
    found = {}
    for completion in engine.generate(requests, deadline_s=60):
        if not found:
            engine.withdraw(0)
            engine.withdraw(2)
        found[completion.request_id, completion.index] = completion
    for (number, index), completion in found.items():
        assert completion.ids == ([] if number == 2 else expected[number, index])
        assert (completion.finish is FinishReason.ABORTED) is (number == 2)
    assert len(found) == 9


def test_an_aborted_request_ends_and_the_others_go_on(make):
    engine, _ = make("llama", max_sequences=3)
    requests = [ask(i, prompt(4 + i), seeds=[i, i + 10], max_tokens=5 if i == 0 else 30) for i in range(4)]
    undisturbed = tokens_of(collect(engine, requests))
    done = {}
    for completion in engine.generate(requests, deadline_s=60):
        if not done:
            engine.abort(1)
            engine.abort(3)
            engine.abort(99)
        done[completion.request_id, completion.index] = completion
    assert len(done) == 8
    for (id, index), completion in done.items():
        expected = undisturbed[id, index]
        if id in (1, 3):
            assert completion.finish == FinishReason.ABORTED
            assert completion.ids == expected[: len(completion.ids)] != expected
        else:
            assert completion.ids == expected
    assert tokens_of(collect(engine, requests)) == undisturbed


def test_after_the_deadline_the_rest_come_unfinished(make):
    engine, _ = make("llama", max_sequences=2)
    requests = [ask(i, prompt(4), seeds=[0, 1], max_tokens=20_000 if i else 3) for i in range(3)]
    done = collect(engine, requests, deadline_s=0.4)
    assert {done[0, i].finish for i in range(2)} == {FinishReason.LENGTH}
    assert {done[i, j].finish for i in (1, 2) for j in range(2)} == {FinishReason.DEADLINE}
    assert done[1, 0].ids and done[2, 1].ids == []
    assert {c.finish for c in collect(engine, requests, deadline_s=0.0).values()} == {FinishReason.DEADLINE}


def test_closing_early_leaves_the_engine_as_it_was(make):
    engine, _ = make("llama")
    requests = [ask(i, prompt(5), max_tokens=4 + 20 * i) for i in range(3)]
    expected = tokens_of(collect(engine, requests))
    stream = engine.generate(requests, deadline_s=60)
    next(stream)
    with pytest.raises(RuntimeError, match="already"):
        next(engine.generate(requests, deadline_s=60))
    stream.close()
    assert tokens_of(collect(engine, requests)) == expected


def test_no_requests_give_no_samples(make):
    engine, _ = make("llama")
    assert list(engine.generate([], deadline_s=1)) == []


def test_malformed_requests_are_refused_before_any_work(make):
    engine, _ = make("llama")
    for wrong in (
        [ask(0, [])],
        [ask(0, prompt(3), seeds=[])],
        [ask(0, prompt(3)), ask(0, prompt(4))],
        [ask(0, [5, 97])],
        [ask(0, [-1])],
    ):
        with pytest.raises(ValueError, match="request"):
            engine.generate(wrong, deadline_s=1)


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_request_that_can_never_fit_is_refused_with_numbers(name):
    make, size = EMBEDDED[name], token_bytes(name)
    engine, _ = make("llama", kv_cache_bytes=200 * size)
    with pytest.raises(UserError, match="100 prompt tokens and up to 150") as error:
        engine.generate([ask(0, prompt(5)), ask(1, prompt(100), max_tokens=150)], deadline_s=1)
    assert f"{size:,} a token" in str(error.value) and f"{200 * size:,}" in str(error.value)
    needed = int(error.value.fix.split("at least ")[1].split(" or")[0].strip(",").replace(",", ""))
    engine, _ = make("llama", kv_cache_bytes=needed)
    assert len(collect(engine, [ask(1, prompt(100), max_tokens=150)])[1, 0].ids) == 150


def test_tokens_carry_the_version_of_the_weights_that_drew_them(make):
    engine, model = make("llama", max_sequences=2)
    engine.load_weights(3)
    requests = [ask(0, prompt(4), max_tokens=5), ask(1, prompt(4), max_tokens=9)]
    stream = engine.generate(requests, deadline_s=60)
    assert next(stream).versions == [3] * 5
    engine.load_weights(4)
    assert next(stream).versions == [3] * 5 + [4] * 4
    before = tokens_of(collect(engine, requests))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    engine.load_weights(5)
    after = collect(engine, requests)
    assert tokens_of(after) != before and after[0, 0].versions == [5] * 5


def test_samples_that_start_after_new_weights_see_nothing_of_the_old_ones(make):
    """Their prompt was computed for the whole group before the weights changed."""
    request = ask(0, prompt(8), seeds=range(4), max_tokens=6)
    engine, model = make("llama", max_sequences=2)
    done = {}
    for completion in engine.generate([request], deadline_s=60):
        if len(done) == 1:
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(-1)
            engine.load_weights(1)
        done[completion.index] = completion
    fresh = collect(engine, [request])
    assert [done[i].ids for i in (2, 3)] == [fresh[0, i].ids for i in (2, 3)]
    assert done[0].versions + done[1].versions == [0] * 12 and done[3].versions == [1] * 6


def test_a_sleeping_engine_refuses_and_wakes(make):
    engine, _ = make("llama")
    stream = engine.generate([ask(0, prompt(4)), ask(1, prompt(4), max_tokens=3)], deadline_s=60)
    next(stream)
    with pytest.raises(RuntimeError, match="generating"):
        engine.sleep()
    stream.close()
    engine.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        engine.generate([ask(0, prompt(4))], deadline_s=60)
    engine.wake()
    assert len(collect(engine, [ask(0, prompt(4))])) == 1


CONVERSATION_PARTS = [70, 3, 40, 130]
"""Tokens of a prompt, and of what comes behind each turn."""


def converse(engine: Engine, *, keep: bool, seeds: Sequence[int] = (0, 1), **params) -> list[Completion]:
    """Conversations that begin with the same prompt, each turn's request put as soon as the one before it has ended."""
    params = {"max_tokens": 60, "stop_ids": range(2, 30)} | params
    longest = ask(0, prompt(430), seeds=seeds, **params)
    feed, asked, turns = RequestFeed(longest), {}, []

    def put(ids: list[int], turn: int, seeds: Sequence[int]) -> None:
        more = turn + 1 < len(CONVERSATION_PARTS)
        request = dataclasses.replace(ask(len(asked), ids, seeds=seeds, **params), keep=keep and more)
        asked[request.id] = (request, turn)
        feed.put([request])

    put(prompt(CONVERSATION_PARTS[0]), 0, seeds)
    unfinished = len(seeds) * len(CONVERSATION_PARTS)
    for completion in engine.generate([], deadline_s=120, feed=feed):
        request, turn = asked[completion.request_id]
        turns.append((request.seeds[completion.index] % 100, turn, completion))
        unfinished -= 1
        if turn + 1 < len(CONVERSATION_PARTS):
            new = prompt(CONVERSATION_PARTS[turn + 1], turn)
            put([*request.prompt_ids, *completion.ids, *new], turn + 1, [request.seeds[completion.index] + 100])
        if not unfinished:
            feed.close()
    return [completion for _, _, completion in sorted(turns, key=lambda each: each[:2])]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", EMBEDDED)
@pytest.mark.parametrize("cache_tokens", [600, 100_000])
def test_turns_that_go_on_from_what_was_kept_are_those_that_were_computed_anew(name, family, cache_tokens):
    """In float32, also with a sliding window, a temperature, and so little memory that little can be kept."""
    options = {"dtype": torch.float32, "kv_cache_bytes": cache_tokens * token_bytes(name) // 2, "prefill_tokens": 500}
    engine, _ = EMBEDDED[name](family, **options)
    anew = converse(engine, keep=False)
    counted = engine.take_prompts()
    kept = converse(engine, keep=True)
    again = engine.take_prompts()
    assert [each.ids for each in kept] == [each.ids for each in anew]
    for one, other in zip(kept, anew, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert counted.reused == 0 < again.reused
    if cache_tokens == 100_000:
        last = int(name == "torch")  # the other engine computes a prompt's last token as a step
        first, *later = CONVERSATION_PARTS
        assert again.computed == first - 1 + last + 2 * sum(new + last for new in later)
        assert again.computed + again.reused == counted.computed


@pytest.mark.parametrize("name", EMBEDDED)
def test_nothing_is_kept_over_a_change_of_weights(name):
    """Neither what was kept before, nor a turn that began before and ended after."""
    engine, model = EMBEDDED[name]("llama")
    first, longer = (ask(i, prompt(40), max_tokens=60, stop_ids=range(2, 20)) for i in (0, 1))
    longest = dataclasses.replace(first, prompt_ids=prompt(100), seeds=range(2))
    ended = collect(engine, [first])[0, 0]
    expected = {}
    for has_changed in (False, True):
        engine.take_prompts()
        feed = RequestFeed(longest)
        feed.put([dataclasses.replace(first, keep=True)])
        assert ended.finish is FinishReason.STOP
        for completion in engine.generate([], deadline_s=60, feed=feed):
            if completion.request_id == 0:
                if has_changed:
                    with torch.no_grad():
                        model.get_input_embeddings().weight.mul_(-1)
                    engine.load_weights(1)
                feed.put([dataclasses.replace(longer, prompt_ids=[*first.prompt_ids, *completion.ids, 5])])
                feed.close()
            else:
                expected[has_changed] = completion.ids
        assert (engine.take_prompts().reused == 0) is has_changed
    alone = collect(engine, [dataclasses.replace(longer, prompt_ids=[*first.prompt_ids, *ended.ids, 5])])
    assert expected[True] == alone[1, 0].ids != expected[False]
