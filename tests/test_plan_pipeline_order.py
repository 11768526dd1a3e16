"""The order of interleaved stages: what it must keep, and what the plan says of it, against the table that ranks go by."""

from itertools import product

import pytest

from meshloom.plan.pipeline_order import Interleaving, Task, bubble, passes_in_flight

COUNTS = [*range(1, 10), 12, 17]
SIZES = list(product((2, 3, 4, 8), (2, 3, 4)))


def ticks_of(order: Interleaving) -> tuple[dict[Task, int], dict[Task, int]]:
    """When each pass is made, forward and backward."""
    forward: dict[Task, int] = {}
    backward: dict[Task, int] = {}
    for tick, device in product(range(order.num_ticks(backward=True)), range(order.devices)):
        for found, task in ((forward, order.forward(device, tick)), (backward, order.backward(device, tick))):
            if task is not None:
                assert task not in found and task.stage % order.devices == device
                found[task] = tick
    return forward, backward


@pytest.mark.parametrize(("devices", "each"), SIZES)
def test_every_stage_gets_what_it_needs_a_tick_before(devices: int, each: int) -> None:
    """For any number of microbatches, and no tick is there for nothing at the end."""
    assert ticks_of(Interleaving(devices=devices, stages_per_device=each, microbatches=0)) == ({}, {})
    for count in COUNTS:
        order = Interleaving(devices=devices, stages_per_device=each, microbatches=count)
        forward, backward = ticks_of(order)
        assert len(forward) == len(backward) == count * devices * each
        assert max(forward.values()) + 1 == order.num_ticks(backward=False)
        assert max(backward.values()) + 1 == order.num_ticks(backward=True)
        for task, tick in forward.items():
            if task.stage:
                assert forward[Task(task.microbatch, task.stage - 1)] < tick
            if task.stage < order.num_stages - 1:
                assert backward[Task(task.microbatch, task.stage + 1)] < backward[task]
            assert tick <= backward[task]  # in a tick, the pass forward comes first


@pytest.mark.parametrize(("devices", "each"), SIZES)
def test_the_plan_counts_passes_in_flight_and_empty_time_as_the_table_has_them(devices: int, each: int) -> None:
    """A backward pass takes twice as long as one forward, and a tick as long as its longest device."""
    for count in COUNTS:
        order = Interleaving(devices=devices, stages_per_device=each, microbatches=count)
        forward, backward = ticks_of(order)
        spent = sum(1 for _ in set(forward.values())) + 2 * len(set(backward.values()))
        share = bubble(devices=devices, stages_per_device=each, microbatches=count)
        assert spent == pytest.approx(3 * count * each * (1 + share))
        for device in range(devices):
            own = [task for task in forward if task.stage % devices == device]
            most = max(
                sum(forward[task] <= tick <= backward[task] for task in own) for tick in {forward[task] for task in own}
            )
            said = passes_in_flight(devices=devices, device=device, stages_per_device=each, microbatches=count)
            assert most == said if count >= devices else most <= said


def test_the_published_numbers() -> None:
    """Four devices: the share of Narayanan et al., and Megatron's warm-up of 2 (p − 1) + (v − 1) p passes before the first one
    backward on the first device."""
    assert bubble(devices=4, stages_per_device=1, microbatches=8) == 3 / 8
    assert bubble(devices=4, stages_per_device=2, microbatches=8) == 3 / 16
    assert passes_in_flight(devices=4, device=0, stages_per_device=2, microbatches=8) == 2 * 3 + 4 + 1
    assert passes_in_flight(devices=4, device=0, stages_per_device=1, microbatches=8) == 4
