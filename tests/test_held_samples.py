"""A step's samples stay on the ranks that have them: what ranks compute with is what they would have been sent whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.fabric.dispatch import GroupLayout
from meshloom.fabric.wire import decode, encode
from meshloom.loop.correction import learned
from meshloom.loop.held import HeldSamples, Shares, what_is_new
from meshloom.loop.parcels import KeptSamples, Parcel
from meshloom.loop.sharing import Sharing, shared_out
from meshloom.plan.placement import Role
from meshloom.plan.role_numbers import kept_width, unread_logprobs
from meshloom.samples import Samples
from meshloom.samples.balance import Costs

PAIRS = GroupLayout((0, 1, 2, 3), (0, 0, 1, 1))
"""Two replicas of two ranks."""
SHARING = Sharing(tokens_per_microbatch=10_000)


def batch_of(prompts: int, samples: int = 4, *, seed: int = 0, invalid: Sequence[int] = ()) -> Samples:
    """Groups of responses whose lengths differ."""
    chance = torch.Generator().manual_seed(seed)
    count = prompts * samples
    prompt = torch.randint(3, 9, (prompts,), generator=chance).repeat_interleave(samples)
    lengths = prompt + torch.randint(5, 60, (count,), generator=chance)
    total = int(lengths.sum())
    inside = torch.cat([torch.arange(n) for n in lengths.tolist()])
    return Samples(
        lengths,
        {
            "ids": torch.randint(0, 90_000, (total,), generator=chance),
            "mask": inside >= prompt.repeat_interleave(lengths),
            "sampler_logprob": torch.randn(total, generator=chance),
            "version": torch.ones(total, dtype=torch.int32),
        },
        {
            "group": torch.arange(prompts).repeat_interleave(samples),
            "valid": torch.tensor([i not in invalid for i in range(count)]),
        },
    )


def cut_by(prompts: int) -> Callable[[Samples], list[Samples]]:
    """Updates of so many prompts each."""

    def cut(batch: Samples) -> list[Samples]:
        number = batch["group"] // prompts
        return [learned(batch.select((number == i).nonzero().squeeze(1))) for i in range(int(number.max()) + 1)]

    return cut


@dataclass
class Cluster:
    """Ranks of a layout, and the controller's view of them."""

    layout: GroupLayout = PAIRS
    keeping: Sequence[int] = (0, 1, 2, 3)
    hosts: dict[int, KeptSamples] = field(default_factory=lambda: {rank: KeptSamples() for rank in range(4)})
    sent: int = 0

    def __post_init__(self) -> None:
        self.held = HeldSamples(self.keeping, lambda ranks: [self.hosts[rank].let_go() for rank in ranks])

    def call(self, samples: Samples, computes: str | None = None, parts: list[list[int]] | None = None) -> int:
        """Ranks get their parts, as the wire brings them, and have what was sent whole; bytes that were sent."""
        parts = parts or shared_out(SHARING, samples, self.layout, self.held)
        before = self.sent
        each = what_is_new("samples")({"samples": Shares(samples, parts, self.held)}, self.layout)
        column_T = torch.randn(samples.num_tokens, generator=torch.Generator().manual_seed(5))
        answer = Samples(samples.lengths, {"answer": column_T})
        for rank, index, arguments in zip(self.layout.ranks, self.layout.data_index, each, strict=True):
            parcel = decode(*encode(arguments["samples"]))
            self.sent += parcel.nbytes
            if parcel.comes_from is not None:
                source = each[self.layout.ranks.index(parcel.comes_from)]["samples"]
                assert rank in source.hand_to and source.comes_from is None and not parcel.pieces
                parcel = replace(parcel, pieces=source.pieces)
            found, whole = self.hosts[rank].take(parcel), samples.select(parts[index])
            assert found.tokens.keys() == samples.tokens.keys() or not parts[index]
            for name, column in found.tokens.items():
                assert torch.equal(column, whole[name]) and (column.dtype == whole[name].dtype or not parts[index])
            if computes:
                self.hosts[rank].keep(parcel, computes, answer.select(parts[index])["answer"])
        if computes:
            ranks = dict(zip(self.layout.ranks, self.layout.data_index, strict=True))
            self.held.computed(computes, column_T, samples, parts, ranks)
            self.answer = column_T
        return self.sent - before

    @property
    def kept_bytes(self) -> int:
        return sum(host.num_bytes for host in self.hosts.values())


def asked(batch: Samples) -> Samples:
    return Samples(batch.lengths, {name: batch[name] for name in ("ids", "mask")}, batch.rows)


@pytest.mark.parametrize("per_update", [1, 3, 8], ids=["uneven updates", "updates", "one update"])
def test_ranks_compute_with_what_they_would_have_been_sent_whole(per_update: int) -> None:
    """Log-probs, the reference's, values, and two epochs of updates that leave out invalid samples; then nothing is kept."""
    cluster = Cluster()
    batch = cluster.held.begin(batch_of(8, invalid=(2, 3, 17)), cut_by(per_update))
    first = cluster.call(asked(batch), "old_logprob")
    batch = batch.with_tokens(old_logprob=cluster.answer)
    assert cluster.call(asked(batch), "reference_logprob") < first / 4
    batch = batch.with_tokens(reference_logprob=cluster.answer)
    batch = batch.with_tokens(
        advantages=batch["mask"] * torch.linspace(-1, 1, len(batch)).double().repeat_interleave(batch.lengths)
    )
    whole = [cluster.call(update) for update in cut_by(per_update)(batch)]
    again = [cluster.call(update) for update in cut_by(per_update)(batch)]
    assert sum(again) < sum(whole) / 2
    assert cluster.kept_bytes > 0
    cluster.held.end()
    assert cluster.kept_bytes == 0


def test_samples_of_even_updates_stay_where_they_were_asked_about() -> None:
    """Shared out for the updates at once: an update sends log-probs of the sampler and a few numbers for each sample; ranks
    keep what the plan says."""
    cluster = Cluster()
    batch = cluster.held.begin(batch_of(32), cut_by(16))
    cluster.call(asked(batch), "old_logprob")
    batch = batch.with_tokens(old_logprob=cluster.answer)
    batch = batch.with_tokens(advantages=batch["mask"].double())
    sent = sum(cluster.call(update) for update in cut_by(16)(batch))
    few = 128
    assert sent <= 4 * batch.num_tokens + few * len(batch)
    ranks_of_a_replica, settings = 2, settings_with("batch.prompts_per_step=32", "batch.prompts_per_update=16")
    assert cluster.kept_bytes == ranks_of_a_replica * kept_width(settings, Role.ACTOR) * batch.num_tokens


@pytest.mark.parametrize("seed", range(3))
def test_samples_that_stay_cost_no_balance(seed: int) -> None:
    """Updates that cannot be even make ranks uneven over the whole batch; then each call has parts of its own."""
    for per_update in (1, 4):
        cluster = Cluster()
        batch = cluster.held.begin(batch_of(12, 2, seed=seed), cut_by(per_update))
        calls = [asked(batch), *cut_by(per_update)(batch)]
        for samples in calls:
            parts = shared_out(SHARING, samples, PAIRS, cluster.held)
            assert sorted(i for part in parts for i in part) == list(range(len(samples)))
            costs, alone = Costs.of(samples), SHARING.parts(samples, 2)
            assert max(map(costs.of_part, parts)) <= 1.01 * max(map(costs.of_part, alone))
            cluster.call(samples, parts=parts)


def test_log_probs_that_only_the_loss_reads_stay_on_ranks() -> None:
    """The controller has none of them; updates that are made of them are those that they would be, and stay where they are."""
    cluster = Cluster()
    cluster.held = HeldSamples(cluster.keeping, learner=PAIRS, readers=[1, 3], untold=["old_logprob"])
    batch = cluster.held.begin(batch_of(32), cut_by(16))
    parts = shared_out(SHARING, asked(batch), PAIRS, cluster.held)
    assert cluster.held.need_tell("values", asked(batch), parts, PAIRS, [1, 3])
    assert cluster.held.need_tell("old_logprob", asked(batch), parts[::-1], PAIRS, [1, 3])
    assert not cluster.held.need_tell("old_logprob", asked(batch), parts, PAIRS, [1, 3])
    last_stage, name = {1: 0, 3: 1}, "old_logprob"
    for rank, parcel in brought(cluster, asked(batch), parts):
        ids = cluster.hosts[rank].take(parcel)["ids"]
        if rank in last_stage:
            cluster.hosts[rank].keep(parcel, name, ids.float())
    batch = batch.with_tokens(old_logprob=cluster.held.computed(name, None, asked(batch), parts, last_stage))
    assert bool(batch[name].isnan().all())
    for update in cut_by(16)(batch):
        parts = shared_out(SHARING, update, PAIRS, cluster.held)
        for rank, parcel in brought(cluster, update, parts):
            found = cluster.hosts[rank].take(parcel)
            assert (name in found.tokens) == (rank in last_stage)
            if rank in last_stage:
                assert torch.equal(found[name], update.select(parts[last_stage[rank]])["ids"].float())
        with pytest.raises(RuntimeError, match="would go to rank"):
            cluster.held.parcels(update, parts[::-1], PAIRS)


def test_samples_stay_with_their_log_probs_where_one_rank_has_all_of_them_for_a_critic() -> None:
    """It has as many columns of the others' samples as they have."""
    both, critic = GroupLayout((0, 1), (0, 1)), GroupLayout((0,), (0,))
    held = HeldSamples([0, 1], learner=both, readers=[0, 1], untold=["old_logprob"])
    batch = held.begin(batch_of(8), cut_by(4))
    parts = shared_out(SHARING, asked(batch), both, held)
    assert not held.need_tell("old_logprob", asked(batch), parts, both, [0, 1])
    held.parcels(asked(batch), parts, both)
    batch = batch.with_tokens(old_logprob=held.computed("old_logprob", None, asked(batch), parts, {0: 0, 1: 1}))
    everything = [list(range(len(batch)))]
    held.parcels(asked(batch), everything, critic)
    held.computed("values", torch.zeros(batch.num_tokens), asked(batch), everything, {0: 0})
    for update in cut_by(4)(batch):
        found = shared_out(SHARING, update, both, held)
        places = [update["place"][part].tolist() for part in found]
        assert all(set(own) <= set(part) for own, part in zip(places, parts, strict=True))
        held.parcels(update, found, both)


def test_log_probs_of_stages_are_told_to_ranks_that_cut_layers() -> None:
    """A reference in stages has them on its last rank alone; both ranks of an actor on the same devices compute the loss."""
    pair = GroupLayout((0, 1), (0, 0))
    held = HeldSamples([0, 1], learner=pair, readers=[0, 1], untold=["reference_logprob"])
    batch = held.begin(batch_of(4), cut_by(4))
    parts = shared_out(SHARING, asked(batch), pair, held)
    assert held.need_tell("reference_logprob", asked(batch), parts, pair, [1])
    assert not held.need_tell("reference_logprob", asked(batch), parts, pair, [0, 1])
    held.parcels(asked(batch), parts, pair)
    batch = batch.with_tokens(reference_logprob=held.computed("reference_logprob", None, asked(batch), parts, {1: 0}))
    with pytest.raises(RuntimeError, match="would go to rank 0"):
        held.parcels(cut_by(4)(batch)[0], parts, pair)


@pytest.mark.parametrize(
    ("change", "unread"),
    [
        ("algorithm.kl=loss", {"old_logprob", "reference_logprob"}),
        ("algorithm.kl=reward", set()),
        ("algorithm.correction={reject: k2, reject_threshold: 2.0}", {"reference_logprob"}),
        ("rollout.from_samples=samples.jsonl", {"reference_logprob"}),
    ],
    ids=["divergence in the loss", "divergence in the reward", "rejection", "samples of a file"],
)
def test_log_probs_that_the_loop_reads_are_told(change: str, unread: set[str]) -> None:
    assert set(unread_logprobs(settings_with(change))) == unread


def settings_with(*changes: str) -> TrainSettings:
    given = ["run_dir=r", "model.path=m", "data.train.reasoning_gym=basic_arithmetic", *changes]
    return load_settings(TrainSettings, None, given)


def brought(cluster: Cluster, samples: Samples, parts: list[list[int]]) -> list[tuple[int, Parcel]]:
    """Parcels of pairs of ranks, with what the first of each hands on."""
    each = cluster.held.parcels(samples, parts, PAIRS)
    assert [parcel.comes_from for parcel in each] == [None, 0, None, 2]
    return [(rank, replace(parcel, pieces=each[rank // 2 * 2].pieces)) for rank, parcel in enumerate(each)]


def test_a_sample_that_moves_is_sent_once_more() -> None:
    cluster = Cluster()
    batch = cluster.held.begin(batch_of(2, 2), cut_by(2))
    cluster.call(asked(batch), parts=[[0, 1], [2, 3]])
    moved = cluster.call(asked(batch), parts=[[0, 1, 2], [3]])
    assert 0 < moved <= 4 * int(batch.lengths[2]) + 300


def test_ranks_that_are_only_asked_keep_nothing() -> None:
    cluster = Cluster(keeping=())
    batch = cluster.held.begin(batch_of(4), cut_by(2))
    assert cluster.call(asked(batch), "reference_logprob") == cluster.call(asked(batch), "reference_logprob")
    assert cluster.kept_bytes == 0


def test_a_step_that_fails_leaves_nothing_on_ranks() -> None:
    cluster = Cluster()
    batch = cluster.held.begin(batch_of(4), cut_by(2))
    with pytest.raises(ZeroDivisionError), cluster.held.ended_by_failure():
        cluster.call(asked(batch), "old_logprob")
        assert cluster.kept_bytes > 0
        raise ZeroDivisionError
    assert cluster.kept_bytes == 0 and not cluster.held.knows(batch)


def test_a_batch_that_comes_ends_the_one_before() -> None:
    """Also where that was never ended, as its step failed."""
    cluster = Cluster()
    for seed in range(2):
        batch = cluster.held.begin(batch_of(4, seed=seed), cut_by(2))
        cluster.call(asked(batch))
        assert cluster.kept_bytes == 2 * sum(asked(batch)[name].nbytes for name in ("ids", "mask"))


def test_what_neither_came_nor_is_kept_is_an_error() -> None:
    parcel = Parcel(torch.tensor([2]), ("ids",), (), torch.tensor([0]), 1)
    with pytest.raises(RuntimeError, match="ids of 1 samples did not come"):
        KeptSamples().take(parcel)
