"""Who runs in the paged engine, with a device that only notes which tokens a page holds.

A cell of a page holds the tokens up to its own, so a page that was shared, copied or given away wrongly is seen at once.
"""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshloom.rollout.paged_scheduler import PagedScheduler, Running
from meshloom.rollout.pages import Pages
from meshloom.rollout.protocol import FinishReason, Request, SamplingParams
from meshloom.rollout.requests import kv_tokens
from meshloom.rollout.scheduler import Sample
from meshloom.rollout.slot_state import Field
from meshloom.rollout.step_runner import HostSlots, SlotSizes
from meshloom.rollout.stopping import StopRule


class Notebook:
    """The device: pages of notes, and steps that draw tokens from nothing but a sample's tokens and seed."""

    def __init__(self, requests: list[Request], count: int, size: int, max_sequences: int, prefill_tokens: int) -> None:
        self.pages, self.cells = Pages(count, size), [[()] * size for _ in range(count)]
        self.most_tokens = count * size
        self.host = HostSlots(SlotSizes(max_sequences, count + 1, 1, 1, 1), pinned=False)
        self.scheduler = PagedScheduler(
            self.pages,
            self.host,
            max_sequences=max_sequences,
            prefill_tokens=prefill_tokens,
            rule_of=lambda sample: 0,
            counted=self.count,
        )
        self.prompt_tokens = [0, 0]
        self.samples: list[Sample] = []
        self.num_requests = 0
        for request in requests:
            self.submit(request)

    def submit(self, request: Request) -> None:
        rule = StopRule(request.params.max_tokens, frozenset(range(8)))
        own = [Sample(request, index, rule) for index in range(len(request.seeds))]
        self.scheduler.submit(list(request.prompt_ids), own)
        self.samples += own
        self.num_requests += 1

    def count(self, computed: int, reused: int) -> None:
        self.prompt_tokens[0] += computed
        self.prompt_tokens[1] += reused

    def start(self) -> None:
        while todo := self.scheduler.admit():
            self._copy(todo.before)
            for prompt in todo.prompts:
                for place in range(len(prompt.ids)):
                    cells, at = self.cells[prompt.pages[place // self.pages.size]], place % self.pages.size
                    if place < prompt.start:
                        assert cells[at] == tuple(prompt.ids[: place + 1])
                    cells[at] = tuple(prompt.ids[: place + 1])
            self._copy(todo.after)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        sources = [list(self.cells[source]) for source, _ in pairs]
        assert len({target for _, target in pairs}) == len(pairs)
        for (_, target), cells in zip(pairs, sources, strict=True):
            self.cells[target] = cells

    def step(self, slot: int, one: Running) -> None:
        """Compute a sample's newest token and draw the next, as the kernels do."""
        sample, state = one.sample, self.host.state[:, slot]
        known = (*sample.request.prompt_ids, *sample.ids)
        where = len(known) - 1
        assert (state[Field.TOKEN], state[Field.LENGTH], state[Field.COUNT]) == (known[-1], where, len(sample.ids))
        page = self.host.table[slot, where // self.pages.size]
        assert self.pages.holders(page) == 1, "a page that others hold is written to"
        self.cells[page][where % self.pages.size] = known
        for place in range(len(known)):
            page = self.host.table[slot, place // self.pages.size]
            assert self.cells[page][place % self.pages.size] == known[: place + 1]
        sample.append(hash((known, sample.request.seeds[sample.index])) % 60, 0.0, 0)
        state[Field.TOKEN] = sample.ids[-1]
        state[[Field.LENGTH, Field.COUNT]] += 1

    def run(self, steps: int) -> None:
        """A round: steps for all that run, or room made for them."""
        running = self.scheduler.running
        oldest = min(running, key=lambda one: one.turn)
        steps, back = self.scheduler.reserve(steps)
        assert oldest not in back
        if back:
            self.scheduler.set_back(back)
            self.start()
            steps, again = self.scheduler.reserve(1)
            assert not again, "room was made, and no step could run"
        for slot, one in enumerate(running):
            for _ in range(steps):
                if one.sample.finish is None:
                    self.step(slot, one)
        done = [one for one in running if one.sample.finish is not None]
        self.scheduler.remove(done)
        for one in done:
            if one.sample.request.keep and one.sample.finish is FinishReason.STOP:
                self.go_on(one.sample)

    def go_on(self, sample: Sample) -> None:
        """The next turn of a conversation, if there is room for it."""
        ids = [*sample.request.prompt_ids, *sample.ids, *range(200, 200 + len(sample.ids) % 5)]
        params, room = sample.request.params, self.most_tokens + 1 - len(ids)
        if room > 0 and self.num_requests < 30:
            params = SamplingParams(max_tokens=min(params.max_tokens, room))
            keep = self.num_requests % 3 > 0
            self.submit(Request(id=self.num_requests, prompt_ids=ids, params=params, seeds=[sample.index], keep=keep))

    def abort(self, request_id: int) -> None:
        gone = [one for one in self.scheduler.running if one.sample.request.id == request_id]
        for one in gone:
            one.sample.finish = FinishReason.ABORTED
        self.scheduler.remove(gone)
        self.scheduler.end_waiting(lambda sample: sample.request.id == request_id, FinishReason.ABORTED)


requests_of = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 30), st.integers(1, 9), st.booleans()), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=150)
@given(
    sizes=requests_of,
    size=st.sampled_from([1, 2, 4, 8]),
    spare=st.sampled_from([0, 1, 2, 5, 20, 100]),
    max_sequences=st.integers(1, 12),
    prefill_tokens=st.sampled_from([1, 10, 100]),
    rounds=st.lists(st.sampled_from(["run", "run far", "new weights", "abort"]), max_size=20),
)
@example(sizes=[(2, 1, 2, False)], size=4, spare=0, max_sequences=2, prefill_tokens=10, rounds=[])
def test_every_sample_ends_and_no_page_is_mixed_up(sizes, size, spare, max_sequences, prefill_tokens, rounds):
    """With room for little more than the longest sequence: the oldest always goes on, and all pages come back, also where
    samples are kept for conversations that go on."""
    requests = [
        Request(
            id=i,
            prompt_ids=range(100, 100 + length),
            params=SamplingParams(max_tokens=tokens),
            seeds=range(num_samples),
            keep=keep,
        )
        for i, (length, tokens, num_samples, keep) in enumerate(sizes)
    ]
    count = max(-(-kv_tokens(request) // size) for request in requests) + spare
    book = Notebook(requests, count, size, max_sequences, prefill_tokens)
    most = sum(request.params.max_tokens * len(request.seeds) for request in requests) + len(rounds) + 30 * 30
    for number in range(most + 1):
        if not book.scheduler.has_work:
            break
        kind = rounds[number] if number < len(rounds) else "run"
        if kind == "new weights":
            book.scheduler.forget()
        elif kind == "abort":
            book.abort(number % len(requests))
        else:
            book.start()
            book.run(16 if kind == "run far" else 2)
    assert not book.scheduler.has_work and book.scheduler.num_available == count
    while book.scheduler.kept.evict():
        pass
    assert book.pages.num_free == count
    assert all(sample.finish is not None for sample in book.samples)


def test_a_turn_computes_what_is_new():
    """Of the turn before all tokens but the last are there, whole pages and a part of one; that one is computed, and what came
    behind it."""
    book = Notebook([], 100, 4, 8, 100)
    params = SamplingParams(max_tokens=99)
    book.submit(Request(id=0, prompt_ids=range(100, 110), params=params, seeds=[3], keep=True))
    for there in (13, 24):
        before = book.samples[-1]
        while book.samples[-1] is before:
            book.start()
            book.run(4)
        assert there == len(before.request.prompt_ids) + len(before.ids) - 1
        book.prompt_tokens[:] = 0, 0
        book.start()
        assert book.prompt_tokens == [len(book.samples[-1].request.prompt_ids) - 1 - there, there]
