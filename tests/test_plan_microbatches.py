"""Microbatches that a plan counts with are those that samples are packed into."""

import random

import pytest
import torch

from meshloom.plan.forecast import Lengths, work_of_role
from meshloom.plan.ledger import most_microbatches
from meshloom.plan.residency import ModelRole, Phase
from meshloom.plan.training_time import microbatches
from meshloom.samples import Samples
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


def test_samples_that_differ_fill_microbatches_but_for_a_bound_in_samples() -> None:
    lengths = Lengths(prompt=100, response=100, longest=1000)
    assert microbatches(role_of(8, 2000, None), lengths.work(64, 8)) == 7
    assert microbatches(role_of(8, 2000, 4), lengths.work(64, 8)) == 16
    assert microbatches(role_of(8, 2000, 4), lengths.work(128, 8), updates=2) == 32
