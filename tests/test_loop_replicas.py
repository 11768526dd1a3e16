"""Replicas of an engine: turns, shares, and samples on their way between processes."""

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshloom.fabric.local import LocalSite
from meshloom.fabric.wire import decode, encode
from meshloom.fabric.workers import Workers
from meshloom.loop.interrupts import Interrupts
from meshloom.loop.model_role import in_order, merged
from meshloom.loop.replicas import RemoteEngine
from meshloom.loop.shares import Share
from meshloom.loop.telling import tell_each
from meshloom.rollout.feed import ReplicaFeed, RequestFeed
from meshloom.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from meshloom.rollout.travel import Completions
from meshloom.samples import Samples
from tests.engine_hosts import engine_of

TOKENS = st.lists(st.tuples(st.integers(0, 2**31), st.floats(-1e9, 0), st.integers(0, 9)), max_size=5)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(TOKENS)
    return Completion(
        request_id=draw(st.integers(0, 2**62)),
        index=draw(st.integers(0, 99)),
        ids=[token for token, _, _ in tokens],
        logprobs=[logprob for _, logprob, _ in tokens],
        versions=[version for _, _, version in tokens],
        finish=draw(st.sampled_from(FinishReason)),
    )


@given(st.lists(completions(), max_size=4))
def test_samples_come_out_of_the_wire_as_they_went_in(given: list[Completion]) -> None:
    """Log-probabilities to the last bit, samples without tokens too."""
    header, blobs = encode(Completions.of(given))
    assert decode(header, blobs).each() == given


def request(number: int, prompt: int = 3, samples: int = 2, longest: int = 10, *, ignore_eos: bool = False) -> Request:
    params = SamplingParams(max_tokens=longest, ignore_eos=ignore_eos)
    return Request(id=number, prompt_ids=[1] * prompt, params=params, seeds=list(range(samples)))


def engine(replicas: int) -> RemoteEngine:
    ranks = [[rank] for rank in range(replicas)]
    return RemoteEngine(None, ranks, vocabulary=10, move_weights=lambda version: None, takes_turns=True)


def shares(found: RemoteEngine, requests: Sequence[Request]) -> dict[int, list[int]]:
    return {replica.ranks[0]: [each.id for each in share] for replica, share in found.spread(requests)}


def test_prompts_go_to_the_replica_with_least_to_do() -> None:
    """Whole prompts, the same number for each; and what a replica has not finished counts."""
    found = engine(2)
    assert shares(found, [request(i) for i in range(6)]) == {0: [0, 2, 4], 1: [1, 3, 5]}
    assert shares(found, [request(6, longest=100)]) == {0: [6]}
    assert shares(found, [request(i) for i in range(7, 11)]) == {1: [7, 8, 9, 10]}


def test_a_turn_goes_where_the_one_before_it_was_made() -> None:
    """Unless that replica has more than twice as much to do as another and eight such turns besides; of a request that nobody
    has told of nothing is known. It used to be one: with slow environments, which leave little to do, most turns went away."""
    found = engine(2)
    replicas = [replica for replica, _ in found.spread([request(i) for i in range(2)])]
    turns = [dataclasses.replace(request(number), after=0) for number in range(2, 13)]
    made_by = {0: replicas[1]}
    for number in range(10):
        assert found.spread(turns[number : number + 1], made_by)[0][0] is replicas[1], number
    assert replicas[1].waiting_tokens == 11 * replicas[0].waiting_tokens
    assert found.spread(turns[10:], made_by)[0][0] is replicas[0]
    assert found.spread([dataclasses.replace(request(13), after=99)], made_by)[0][0] is replicas[0]


def test_a_replica_without_a_prompt_is_left_alone() -> None:
    assert shares(engine(4), [request(0), request(1)]) == {0: [0], 1: [1]}


def test_what_no_engine_could_answer_is_refused_before_it_travels() -> None:
    bad = Request(id=0, prompt_ids=[10], params=SamplingParams(max_tokens=1), seeds=[0])
    with pytest.raises(ValueError, match="outside the model's 0 to 9"):
        engine(1).generate([bad], deadline_s=1.0)


def test_answers_of_replicas_stand_in_the_order_of_the_samples() -> None:
    lengths = torch.tensor([2, 1, 3, 1])
    samples = Samples(lengths, {"ids": torch.arange(7)})
    parts = [[1, 2], [], [0, 3]]
    found = [{"ids": samples.select(part)["ids"]} if part else {"ids": torch.zeros(0)} for part in parts]
    assert torch.equal(in_order(samples, parts, found)["ids"], samples["ids"])


def test_reports_of_replicas_add_up_and_one_without_samples_reports_its_loss_alone() -> None:
    whole = {"loss": torch.tensor(2.0), "entropy": torch.tensor(3.0)}
    assert merged([whole, {"loss": torch.tensor(0.0)}, whole]) == {
        "loss": torch.tensor(4.0),
        "entropy": torch.tensor(6.0),
    }


class Watched(Workers):
    """Workers that note which requests went to which rank."""

    def submit(self, verb: str, arguments: Any = None, **options: Any) -> Any:
        if verb == "generate":
            self.given.append((options["ranks"][0], [each.id for each in arguments["requests"]]))
        return super().submit(verb, arguments, **options)

    def note(self, note: str, arguments: Any, **options: Any) -> None:
        if note == "bring_requests" and self.before is not None:
            self.before([each.id for each in arguments["requests"]])
            time.sleep(0.1)  # the engine looks at what ends
        super().note(note, arguments, **options)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, RemoteEngine]]:
    """Two replicas, one of which is far slower."""
    logs = tmp_path_factory.mktemp("logs")
    host = "tests.engine_hosts:EngineHost"
    with LocalSite(["cpu"] * 2) as site, Watched(host, site=site, logs=logs, collectives=False) as workers:
        workers.given, workers.before = [], None
        engine = RemoteEngine(workers, [[0], [1]], vocabulary=97, move_weights=lambda version: None, takes_turns=True)
        yield workers, engine


def test_an_uneven_load_is_evened_and_samples_stay_the_same(uneven: tuple[Watched, RemoteEngine]) -> None:
    """The fast replica takes over what the slow one has not begun."""
    workers, found = uneven
    requests = [request(i, prompt=2 + i % 3, samples=2, longest=30) for i in range(24)]
    told = list(found.generate(requests, deadline_s=120))
    alone = list(engine_of(8).generate(requests, deadline_s=120))
    assert {(c.request_id, c.index): c.ids for c in told} == {(c.request_id, c.index): c.ids for c in alone}
    assert len(told) == len(alone) == 48 and not any(c.finish is FinishReason.ABORTED for c in told)
    first, *later = [ids for rank, ids in workers.given if rank == 1]
    given_to_slow = next(ids for rank, ids in workers.given if rank == 0)
    taken = {number for ids in later for number in ids}
    assert len(taken) >= 3 and taken < set(given_to_slow) and not taken & set(first)
    assert [replica.waiting_tokens for replica in found._replicas] == [0, 0]


def test_a_request_is_aborted_on_another_device(uneven: tuple[Watched, RemoteEngine]) -> None:
    _, found = uneven
    long = [request(i, samples=1, longest=4000, ignore_eos=True) for i in (0, 1)]
    short = [request(i, samples=1, longest=3) for i in (2, 3)]
    told: dict[int, Completion] = {}
    for completion in found.generate([*short, *long], deadline_s=120):
        told[completion.request_id] = completion
        found.abort(0)
        found.abort(1)
    assert all(told[i].finish is FinishReason.ABORTED and len(told[i].ids) < 4000 for i in (0, 1))
    assert all(told[i].finish is not FinishReason.ABORTED for i in (2, 3))


class Aborting(RemoteEngine):
    """All but request 0 go to the slow replica; requests are aborted where they are in no share."""

    at: str
    lost: list[int]

    def _choose(self, request: Request, made_by: Any) -> int:
        return int(request.id == 0)

    def _abort(self, at: str, numbers: Sequence[int]) -> None:
        if at == self.at and not self.lost:
            self.lost += numbers
            for number in numbers:
                self.abort(number)

    def spread(self, requests: Sequence[Request], *more: Any) -> Any:
        found = super().spread(requests, *more)
        self._abort("spread", [each.id for each in requests if each.id])
        return found

    def _wait_for(self, *given: Any) -> list[Request]:
        back = super()._wait_for(*given)
        self._abort("back", [each.id for each in back])
        return back


@pytest.mark.parametrize("at", ["asked", "spread", "back", "feed", "brought"])
def test_an_abort_is_never_lost_on_the_way(uneven: tuple[Watched, RemoteEngine], at: str) -> None:
    """One that came before a request was in a share, or on its way from one to another, let it run to its end."""
    workers, other = uneven
    found = Aborting(workers, [[0], [1]], vocabulary=97, move_weights=lambda version: None, takes_turns=True)
    found._numbers, found.at, found.lost, done = other._numbers, at, [], {}
    requests = [request(i, samples=1, longest=5 if i == 0 else 4000, ignore_eos=True) for i in range(7)]
    feed = RequestFeed(request(0, samples=9, longest=4000, ignore_eos=True)) if at in ("feed", "brought") else None
    workers.before = (lambda numbers: found._abort("brought", numbers)) if at == "brought" else None
    stream = found.generate(requests[:4] if feed else requests, deadline_s=120, feed=feed)
    if at == "asked":
        found._abort("asked", [4, 5])
    for completion in stream:
        if not done and feed is not None:
            feed.put(requests[4:])
            found._abort("feed", [4, 5])
            feed.close()
        done[completion.request_id] = completion
        if found.lost:
            for number in {*range(1, 7)}.difference(found.lost):
                found.abort(number)
    workers.before = None
    assert found.lost and set(done) == set(range(7))
    assert all(done[number].finish is FinishReason.ABORTED for number in range(1, 7)), at
    assert all(len(done[number].ids) < 200 for number in found.lost), at
    assert not found._jobs and not found._shares and [each.waiting_tokens for each in found._replicas] == [0, 0]


def test_a_message_that_is_early_waits_and_one_that_is_late_is_dropped() -> None:
    interrupts, found = Interrupts(), engine_of(8)
    asked = [request(0, longest=5), request(1, longest=5)]
    interrupts.tell(1, [1], only_unbegun=False)
    for number, ends in ((0, set()), (1, {1}), (2, set())):
        stream = found.generate(asked, deadline_s=60)
        with interrupts.hearing(number, found):
            assert {c.request_id for c in stream if c.finish is FinishReason.ABORTED} == ends
        interrupts.tell(number, [0], only_unbegun=True)


def test_a_finished_sample_is_told_while_the_next_one_runs() -> None:
    """It used to wait for the next one where it was an early one; those of one moment are told together."""
    told: list[list[int]] = []
    is_told = threading.Event()

    def tell(batch: list[Completion]) -> None:
        told.append([completion.request_id for completion in batch])
        if told[-1][-1] == 2:
            is_told.set()

    def finished() -> Iterator[Completion]:
        for number in range(3):
            yield Completion(request_id=number, index=0, ids=[], logprobs=[], versions=[], finish=FinishReason.LENGTH)
        assert is_told.wait(60)
        yield Completion(request_id=3, index=0, ids=[], logprobs=[], versions=[], finish=FinishReason.LENGTH)

    tell_each(finished(), tell)
    assert [number for batch in told for number in batch] == [0, 1, 2, 3] and told[-1] == [3]


def joined(found: RemoteEngine, requests: Sequence[Request]) -> dict[int, Sequence[int]]:
    """Tokens of requests of which the last comes, by a feed, when the first has ended, and the others run."""
    feed, told = RequestFeed(request(0, longest=200, samples=len(requests))), {}
    feed.put(requests[:-1])
    for completion in found.generate([], deadline_s=120, feed=feed):
        if not told:
            feed.put(requests[-1:])
            feed.close()
        told[completion.request_id] = completion.ids
    return told


def test_what_a_feed_brings_joins_what_a_replica_generates(uneven: tuple[Watched, RemoteEngine]) -> None:
    """It used to wait until all others had ended."""
    workers, found = uneven
    fast = RemoteEngine(workers, [[1]], vocabulary=97, move_weights=lambda version: None, takes_turns=True)
    fast._numbers = found._numbers
    requests = [request(i, samples=1, longest=2 if i in (0, 3) else 200) for i in range(4)]
    workers.given = []
    told = joined(fast, requests)
    assert workers.given == [(1, [0, 1, 2])], "the last one was brought"
    assert list(told)[1] == 3, "and ended first of those that ran"
    assert told == {c.request_id: c.ids for c in engine_of(8).generate(requests, deadline_s=120)}
    assert fast._replicas[0].waiting_tokens == 0 and not fast._shares


def test_who_waits_for_a_replica_goes_before_what_a_feed_brings(uneven: tuple[Watched, RemoteEngine]) -> None:
    """New weights need not wait for the last turn of the last episode."""
    workers, found = uneven
    fast = RemoteEngine(workers, [[1]], vocabulary=97, move_weights=lambda version: None, takes_turns=True)
    fast._numbers = found._numbers
    (replica,) = fast._replicas
    feed = RequestFeed(request(0, longest=200, samples=2))
    feed.put([request(0, samples=1, longest=2), request(1, samples=1, longest=200)])
    moved, order = threading.Thread(target=fast.load_weights, args=(1,)), []
    for completion in fast.generate([], deadline_s=120, feed=feed):
        order.append((completion.request_id, fast.version))
        if len(order) == 1:
            moved.start()
            while not replica.turns.waiting:
                moved.join(0.001)
            feed.put([request(2, samples=1, longest=2)])
            feed.close()
    assert order == [(0, 0), (1, 0), (2, 1)] or order == [(0, 0), (1, 1), (2, 1)]


def test_a_replica_without_requests_waits_for_more_until_somebody_wants_it(
    uneven: tuple[Watched, RemoteEngine],
) -> None:
    """What it has computed of an episode is there for the next turn."""
    workers, found = uneven
    fast = RemoteEngine(workers, [[1]], vocabulary=97, move_weights=lambda version: None, takes_turns=True)
    fast._numbers, workers.given = found._numbers, []
    feed, waited_s = RequestFeed(request(0, samples=2)), 0.0
    feed.put([request(0, samples=1)])
    for completion in fast.generate([], deadline_s=120, feed=feed):
        if completion.request_id == 0:
            time.sleep(0.2)
            feed.put([request(1, samples=1)])
        elif completion.request_id == 1:
            began = time.monotonic()
            fast.load_weights(1)
            waited_s = time.monotonic() - began
            feed.put([request(2, samples=1)])
            feed.close()
    assert workers.given == [(1, [0]), (1, [2])] and waited_s < 8
    assert fast._replicas[0].waiting_tokens == 0 and not fast._shares


def test_a_request_that_is_aborted_while_it_comes_back_comes_back_whole() -> None:
    """Of two samples one was told as aborted, and the other one was nobody's."""
    share = Share((0,), number=3, asked_back={0})
    share.add([request(0)])
    aborted = {"ids": [], "logprobs": [], "versions": [], "finish": FinishReason.ABORTED}
    assert share.take([Completion(request_id=0, index=0, **aborted)]) == ([], [])
    share.aborted.add(0)
    kept, back = share.take([Completion(request_id=0, index=1, **aborted)])
    assert not kept and [each.id for each in back] == [0]


def test_what_is_kept_between_turns_stays_while_another_replica_has_room_for_its_own(
    uneven: tuple[Watched, RemoteEngine],
) -> None:
    """A replica whose episodes waited for their environments gave its generation up, and with it what it kept, as soon as
    another one generated anything at all, which had begun."""
    workers, other = uneven
    options: dict[str, Any] = {"vocabulary": 97, "move_weights": lambda version: None, "takes_turns": True}
    found = RemoteEngine(workers, [[0], [1]], slots=1, **options)
    found._numbers, workers.given = other._numbers, []
    long = request(0, samples=1, longest=400, ignore_eos=True)
    first = dataclasses.replace(request(1, prompt=70, samples=1, longest=3), keep=True)
    feed, made = RequestFeed(request(0, prompt=99, samples=3, longest=400)), {}
    feed.put([long, first])
    for completion in found.generate([], deadline_s=120, feed=feed):
        made[completion.request_id] = completion
        if completion.request_id == 1:
            time.sleep(0.3)  # its environment
            feed.put([dataclasses.replace(request(2, prompt=72, samples=1, longest=3), after=1)])
            feed.close()
    assert list(made) == [1, 2, 0], "the long one was on all the while"
    assert workers.given == [(0, [0]), (1, [1])], "the next turn was brought"
    assert found.take_prompts().reused >= 64


def test_requests_that_come_too_late_for_a_generation_are_nobodys() -> None:
    share = Share((0,), number=3)
    share.add([request(0), request(1, samples=1), request(2)])
    told = {"index": 0, "ids": [5], "logprobs": [0.0], "versions": [0], "finish": FinishReason.LENGTH}
    share.take([Completion(request_id=0, **told), Completion(request_id=0, **told | {"index": 1})])
    share.take([Completion(request_id=1, **told)])
    assert [each.id for each in share.left_over()] == [2] and not share.requests and share.tokens == 0


def test_a_feed_of_a_replica_ends_when_there_is_nothing_to_do_and_all_devices_take_what_the_first_has() -> None:
    feed = ReplicaFeed(request(9), lambda number: number)
    feed.offer([request(0), request(1)])
    assert feed.has_requests and [each.id for each in feed.take()] == [0, 1] and not feed.has_requests
    following = ReplicaFeed(request(9), lambda number: 1)
    threading.Timer(0.05, lambda: following.offer([request(2), request(3)])).start()
    assert following.has_requests and [each.id for each in following.take()] == [2], "which it waits for"
    feed.let_go()
    feed.wait(60)
    feed.offer([request(4)])
    assert feed.is_exhausted and not feed.has_requests and feed.take() == []


def test_a_message_that_brings_requests_may_be_early_or_late() -> None:
    interrupts, found = Interrupts(), engine_of(8)
    interrupts.bring(1, [request(5, longest=3)])
    for number in (0, 1):
        feed = ReplicaFeed(request(0), found.first_says)
        stream = found.generate([request(0, longest=5)], deadline_s=60, feed=feed)
        interrupts.let_go(number)
        with interrupts.hearing(number, found, feed):
            assert {c.request_id for c in stream} == ({0} if number == 0 else {0, 5})
        interrupts.bring(number, [request(6)])
