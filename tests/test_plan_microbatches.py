"""Microbatches that a plan counts with are those that samples are packed into."""

import random
import re

import pytest
import torch

from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan import build_plan
from meshloom.plan.forecast import Lengths, work_of_role
from meshloom.plan.ledger import fewest_in_full, most_microbatches
from meshloom.plan.residency import ModelRole, Phase
from meshloom.plan.training_time import microbatches
from meshloom.samples import Samples
from meshloom.samples.balance import share_out
from meshloom.simulate.costs import work_of
from meshloom.simulate.engine import Made
from meshloom.simulate.lengths import Drawn
from meshloom.train.sharing import pack_samples
from tests.test_plan_time import actor

CASES = [
    # Groups, samples of each, tokens of prompt and response, bounds of a microbatch in tokens and in samples.
    (8, 8, 512, 1024, 16384, None),  # room for ten samples, and for one group of eight
    (5, 4, 100, 50, 1000, None),
    (6, 8, 30, 20, 120, None),  # a group is cut, its rests go together
    (7, 5, 16, 16, 96, None),
    (8, 8, 32, 32, 16384, 4),  # far fewer tokens than the bound
    (3, 8, 32, 32, 16384, 16),
    (8, 2, 500, 500, 2500, 3),  # room for two, though three were allowed
    (4, 1, 10, 90, 1000, None),
]


def packed(groups: int, group: int, prompt: int, response: int, tokens: int, bound: int | None) -> tuple[int, int]:
    """Microbatches that samples of one length are packed into, and prompts that are computed in them."""
    prompts = [torch.full((prompt,), number) for number in range(groups)]
    ids = [torch.cat([prompts[number], torch.arange(response)]) for number in range(groups) for _ in range(group)]
    mask = (torch.arange(prompt + response) >= prompt).repeat(groups * group)
    samples = Samples(torch.full((groups * group,), prompt + response), {"ids": torch.cat(ids), "mask": mask})
    found = pack_samples(samples, tokens_per_microbatch=tokens, samples_per_microbatch=bound)
    return len(found), sum(len({index // group for index in chosen}) for chosen in found)


def role_of(group: int, tokens: int, bound: int | None) -> ModelRole:
    return actor("Qwen2.5-0.5B", tokens, bound=tokens, samples=bound, group=group)


@pytest.mark.parametrize("case", CASES)
def test_a_plan_counts_the_microbatches_that_are_made(case: tuple[int, int, int, int, int, int | None]) -> None:
    """Tokens alone were counted, and prompts once for each group, however few samples a microbatch may have."""
    groups, group, prompt, response, tokens, bound = case
    count, prompts = packed(*case)
    role, lengths = role_of(group, tokens, bound), Lengths(prompt=prompt, response=response, longest=response)
    assert role.computes == (Phase.UPDATE,)
    work = work_of_role(role, lengths, groups * group)
    assert microbatches(role, work) == count
    assert work.tokens == groups * group * response + prompts * prompt


def test_no_packing_of_whole_groups_makes_more_microbatches_than_the_plan_says() -> None:
    """Two groups that do not fit together had one microbatch in the plan, which counted samples one by one."""
    chance = random.Random(0)
    for _ in range(60):
        groups, group, length = chance.randint(1, 9), chance.randint(1, 9), chance.randint(2, 40)
        tokens, bound = length * chance.randint(1, 20) + chance.randint(0, length - 1), chance.choice([None, 1, 3, 8])
        prompt = chance.randint(1, length - 1)
        count, _ = packed(groups, group, prompt, length - prompt, tokens, bound)
        assert count <= most_microbatches(groups * group, length, tokens, bound, group)


def test_a_simulated_step_computes_prompts_as_often_as_the_trainer() -> None:
    """They were computed once for each group, however many microbatches it was cut into."""
    chance, computed, counted = random.Random(2), 0, 0
    for _ in range(60):
        groups, group, longest = chance.randint(1, 9), chance.randint(1, 9), chance.randint(2, 40)
        bound = longest * chance.randint(1, 12) + chance.randint(0, 9)
        samples = random_samples(chance, groups, group, longest)
        owner, prompt = (
            samples["group"],
            [int((~mask).sum()) for mask in samples["mask"].split(samples.lengths.tolist())],
        )
        made = [
            Made(Drawn(prompt[members[0]], tuple((samples.lengths[members] - prompt[members[0]]).tolist()), ()), ())
            for members in ((owner == number).nonzero().squeeze(-1) for number in owner.unique())
        ]
        packed = pack_samples(samples, tokens_per_microbatch=bound, samples_per_microbatch=None)
        prompts = sum(sum({int(owner[i]): prompt[i] for i in chosen}.values()) for chosen in packed)
        work = work_of(made, role_of(group, bound, None))
        made_T = int(samples["mask"].sum())
        assert work.predictions == made_T
        assert work.tokens >= prompts + made_T  # the third part of a group may find room beside its first
        computed, counted = computed + prompts, counted + work.tokens - made_T
    assert counted == pytest.approx(computed, rel=0.01)


@pytest.mark.parametrize(("tokens", "bound"), [(16384, None), (500, None), (2000, 3)])
def test_a_plan_and_a_simulated_step_of_equal_lengths_compute_alike(tokens: int, bound: int | None) -> None:
    role, lengths = role_of(8, tokens, bound), Lengths(prompt=100, response=60, longest=60)
    made = [Made(Drawn(100, (60,) * 8, ()), ())] * 6
    for updates in (1, 2):
        planned = work_of_role(role, lengths, 48 * 2, updates=updates)
        assert work_of(made, role, epochs=2, updates=updates) == planned


def test_samples_that_differ_fill_microbatches_but_for_a_bound_in_samples() -> None:
    lengths = Lengths(prompt=100, response=100, longest=1000)
    assert microbatches(role_of(8, 2000, None), lengths.work(64, 8)) == 7
    assert microbatches(role_of(8, 2000, 4), lengths.work(64, 8)) == 16
    assert microbatches(role_of(8, 2000, 4), lengths.work(128, 8), updates=2) == 32


def random_samples(chance: random.Random, groups: int, group: int, longest: int) -> Samples:
    """Groups of any lengths, some of whose samples are missing."""
    prompts = [chance.randint(1, longest - 1) for _ in range(groups)]
    kept = [number for number in range(groups) for _ in range(chance.choice([group, group, chance.randint(1, group)]))]
    responses = [chance.choice([1, longest - prompts[n], chance.randint(1, longest - prompts[n])]) for n in kept]
    ids = [torch.cat([torch.full((prompts[n],), n), torch.arange(r)]) for n, r in zip(kept, responses, strict=True)]
    mask = [torch.arange(prompts[n] + r) >= prompts[n] for n, r in zip(kept, responses, strict=True)]
    tokens = {"ids": torch.cat(ids), "mask": torch.cat(mask)}
    return Samples(torch.tensor([len(one) for one in ids]), tokens, {"group": torch.tensor(kept)})


def test_no_lengths_and_no_sharing_out_make_more_microbatches_than_the_plan_says() -> None:
    """A replica that got parts of groups, or more and shorter samples than others, made more than the most that was planned."""
    chance = random.Random(1)
    uneven = 0
    for _ in range(300):
        groups, group, longest = chance.randint(1, 12), chance.randint(1, 9), chance.randint(2, 40)
        tokens, bound = longest * chance.randint(1, 12) + chance.randint(0, 9), chance.choice([None, None, 1, 3, 8])
        samples = random_samples(chance, groups, group, longest)
        replicas = chance.randint(1, min(6, len(samples)))
        parts = share_out(samples, replicas, tokens_per_microbatch=tokens, pair_cost=chance.choice([0.0, 0.02]))
        given = {"tokens_per_microbatch": tokens, "samples_per_microbatch": bound}
        counts = [len(pack_samples(samples.select(part), **given)) if part else 0 for part in parts]
        fewest = fewest_in_full(longest, tokens, bound, group)
        assert all(count <= -(-len(part) // fewest) for count, part in zip(counts, parts, strict=True))
        assert sum(counts) <= (len(samples) + replicas * (fewest - 1)) // fewest
        if replicas == 1:
            assert counts[0] <= most_microbatches(groups * group, longest, tokens, bound, group)
        uneven += max(counts) > most_microbatches(-(-groups * group // replicas), longest, tokens, bound, group)
    assert uneven > 0


@pytest.mark.parametrize(
    ("group", "tokens", "bound"), [(8, 3000, None), (8, 600, None), (6, 900, None), (8, 4000, 5), (1, 500, None)]
)
def test_the_lines_of_several_devices_are_what_the_longest_samples_make(
    group: int, tokens: int, bound: int | None
) -> None:
    """A formula left out that samples of a prompt stay together, and gave another number than the value beside it."""
    given = [
        "run_dir=r",
        "model.path=m",
        "data.train.reasoning_gym=basic_arithmetic",
        "cluster.devices_per_node=3",
        "device=cuda",
        "data.max_prompt_tokens=40",
        "rollout.max_response_tokens=60",
        "batch.prompts_per_step=9",
        f"batch.samples_per_prompt={group}",
        f"batch.tokens_per_microbatch={tokens}",
        f"batch.samples_per_microbatch={bound or 'null'}",
    ]
    lines = {line.name: line for line in build_plan(load_settings(TrainSettings, None, given), 90).lines}
    prompts = [torch.full((40,), number) for number in range(9)]
    ids = [torch.cat([prompts[n], torch.arange(60)]) for n in range(9) for _ in range(group)]
    mask = (torch.arange(100) >= 40).repeat(9 * group)
    columns = {"ids": torch.cat(ids), "mask": mask}
    owner = torch.arange(9).repeat_interleave(group)
    samples = Samples(torch.full((9 * group,), 100), columns, {"group": owner})
    parts = share_out(samples, 3, tokens_per_microbatch=tokens)
    asked = {"tokens_per_microbatch": tokens, "samples_per_microbatch": bound}
    counts = [len(pack_samples(samples.select(part), **asked)) for part in parts]
    each, total = lines["update microbatches per device"], lines["update microbatches in all"]
    assert ([each.value] * 3, total.value) == (counts, sum(counts))
    if match := re.search(r"⌈samples per device per update ÷ (\d+)⌉", each.formula):
        assert each.value == -(-3 * group // int(match[1]))
