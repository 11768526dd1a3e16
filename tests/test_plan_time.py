"""The cost model, against what one GPU was measured to take, and against what must follow from its own formulas."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from meshloom.plan.arithmetic import Work
from meshloom.plan.constants import ASSUMED, Cluster, Constants, assumptions
from meshloom.plan.decoder_numbers import DecoderNumbers, Layers
from meshloom.plan.forecast import Lengths
from meshloom.plan.hardware import MEASURED_H200, find_device
from meshloom.plan.ledger import LedgerLine
from meshloom.plan.parameters import count_parameters
from meshloom.plan.residency import EngineRole, ModelRole, Move, Phase, Residency
from meshloom.plan.shards import Cut
from meshloom.plan.time import (
    PhaseTime,
    Requests,
    decode_step,
    forward_time,
    generate_time,
    movement_time,
    offload_time,
    step_seconds,
    update_time,
)
from meshloom.plan.worked import worked

PUBLIC: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "public_models.json").read_text())
H200 = find_device("H200")
assert H200 is not None
ONE, NODE, NODES = (
    Cluster(device=H200),
    Cluster(device=H200, devices_per_node=8),
    Cluster(device=H200, devices_per_node=4),
)
C = Constants()
STEP = Requests(samples=512, prompts=64, prompt_tokens=34, response_tokens=512, longest=512)


def numbers(name: str) -> DecoderNumbers:
    return count_parameters(PUBLIC[name])


def engine(name: str, sequences: int = 256, tensor: int = 1, **more: Any) -> EngineRole:
    given = {"own_weights": False, "sequences": sequences, "slot_tokens": 1024, **more}
    return EngineRole(model=numbers(name), width=2, tensor=tensor, **given)


def actor(name: str, tokens: int = 32768, **more: Any) -> ModelRole:
    given: dict[str, Any] = {"recompute": False, "compiled": True, "chunk_bytes": 2**28, "logit_bytes": 6, **more}
    return ModelRole(name="actor", model=numbers(name), computes=(Phase.UPDATE,), width=2, tokens=tokens, **given)


def work(samples: int, group: int = 1, prompt: int = 34, response: int = 512) -> Work:
    """Of samples of which each group shares its prompt."""
    pairs = samples * (prompt * (prompt + 1) // 2 // group + response * prompt + response * (response + 1) // 2)
    return Work(samples * response + samples * prompt // group, samples * response, pairs)


def part(phase: PhaseTime, name: str) -> float:
    return sum(each.seconds for each in phase.parts if each.name == name)


@pytest.mark.parametrize(
    ("name", "rows", "measured_ms"),
    [
        ("Qwen2.5-0.5B", 256, 1.70),
        ("Qwen2.5-1.5B", 128, 2.38),
        ("Qwen2.5-1.5B", 256, 2.93),
        ("Qwen2.5-7B", 128, 5.8),
        ("Qwen2.5-7B", 256, 8.80),
        ("Qwen2.5-0.5B", 512, 2.79),
        ("Qwen2.5-1.5B", 512, 5.37),
        ("Qwen2.5-3B", 256, 4.91),
    ],
)
def test_a_decode_step_takes_what_was_measured(name: str, rows: int, measured_ms: float) -> None:
    """On an H200: prompts of about 34 tokens, in the middle of 512."""
    seconds = sum(each.seconds for each in decode_step(engine(name, rows), rows, 34 + 256, ONE, C))
    assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize(("name", "measured_ms"), [("Qwen2.5-0.5B", 122), ("Qwen2.5-1.5B", 303)])
def test_a_training_pass_takes_what_was_measured(name: str, measured_ms: float) -> None:
    """Forward and backward over thirty samples of 546 tokens; the optimizer's step is not in it."""
    found = update_time(actor(name, 16384), work(30), ONE, C)
    assert (found.seconds - part(found, "optimizer")) * 1e3 == pytest.approx(measured_ms, rel=0.1)
    assert part(found, "waiting for launches") == 0


def test_a_short_pass_waits_for_its_launches() -> None:
    found = update_time(actor("Qwen2.5-0.5B", 2048), work(30), ONE, C)
    kernels = sum(part(found, name) for name in ("products", "attention", "activations", "logits"))
    assert kernels + part(found, "waiting for launches") == pytest.approx(8 * 24 * C.pass_layer_s)


def test_shared_prompts_fill_microbatches_though_they_are_computed_once() -> None:
    """The bound of a microbatch counts the tokens of all of its samples."""
    shared = Lengths(prompt=512, response=32, longest=32).work(512, 8)
    assert shared.tokens == 512 * (32 + 64) and shared.packed == 512 * 544
    alone = replace(shared, packed=0)
    many, few = (update_time(actor("Qwen2.5-0.5B", 2048), done, ONE, C) for done in (shared, alone))
    assert part(many, "products") == part(few, "products")
    assert many.seconds == pytest.approx(-(-512 // 3) * 24 * C.pass_layer_s, rel=0.01)
    assert few.seconds < many.seconds / 4


@pytest.mark.parametrize(
    ("name", "generate_s", "update_s", "step_s"),
    [("Qwen2.5-0.5B", 1.43, 2.04, 3.51), ("Qwen2.5-1.5B", 2.75, 4.97, 7.77)],
)
def test_a_step_takes_what_was_measured(name: str, generate_s: float, update_s: float, step_s: float) -> None:
    """64 prompts × 8 samples of 512 tokens, all in flight, microbatches of 32,768 tokens."""
    generated = generate_time(engine(name, 512), STEP, ONE, C)
    updated = update_time(actor(name), work(512, group=8), ONE, C)
    assert generated.seconds == pytest.approx(generate_s, rel=0.13)
    assert updated.seconds == pytest.approx(update_s, rel=0.12)
    assert step_seconds([generated], [updated], C) == pytest.approx(step_s, rel=0.1)


def test_turns_take_what_does_not_stay_in_the_cache() -> None:
    """Nothing where there is room for all episodes; without any, the conversation so far for each turn."""

    def prompts(cache: int | None, turns: int) -> float:
        found = generate_time(engine(name, 512, cache_bytes=cache), replace(STEP, later_turns=turns), ONE, C)
        return next(part.seconds for part in found.parts if part.name == "prompts")

    name = "Qwen2.5-1.5B"
    once, token = prompts(None, 0), 28 * 2 * 256 * 2
    assert prompts(None, 5) == prompts(512 * (34 + 512) * token, 5) == once
    anew = once * (1 + 512 * 5 * (34 + 512 / 2) / (64 * 34))
    assert prompts(1, 5) == pytest.approx(anew)
    assert prompts(256 * (34 + 512) * token, 5) == pytest.approx((once + anew) / 2)


def test_the_engine_of_now_makes_as_many_tokens_as_measured() -> None:
    """87,500 a second with 1.5B and 256 in flight; 53,800 with 128."""
    for rows, measured in ((256, 87_500), (128, 53_800)):
        load = Requests(samples=rows, prompts=rows, prompt_tokens=34, response_tokens=512, longest=512)
        found = generate_time(engine("Qwen2.5-1.5B", rows), load, ONE, C)
        assert rows * 512 / found.seconds == pytest.approx(measured, rel=0.12)


def test_shares_are_those_of_the_measured_device() -> None:
    """What was measured alone bounds or equals what the constants say of it."""
    rate, memory = (
        MEASURED_H200.matrix_flops / H200.matrix_flops,
        MEASURED_H200.memory_bandwidth / H200.memory_bandwidth,
    )
    assert C.attention_share < C.training_matrix_share < rate > C.decode_matrix_share
    assert C.cache_read_share < C.weight_read_share < C.memory_share == pytest.approx(memory, rel=0.01)
    assert C.host_share == pytest.approx(MEASURED_H200.host_bandwidth / H200.host_bandwidth, rel=0.01)
    assert C.gather_share == pytest.approx(MEASURED_H200.all_gather_bandwidth / H200.peer_bandwidth, rel=0.01)
    assert C.broadcast_share == pytest.approx(MEASURED_H200.broadcast_bandwidth / H200.peer_bandwidth, rel=0.01)


def everything(constants: Constants) -> list[float]:
    """Seconds of runs that between them use every part of the model."""
    cut = Cut(replicate=2, fsdp=2, sequence=2, tensor=2, pipeline=2)
    role = actor("Qwen2.5-7B", 8192, cut=cut)
    away = Move(role="actor", name="moments", bytes=10**9, ways=2, at=Residency.HOST)
    apart = engine("Qwen2.5-7B", tensor=2, own_weights=True)
    return [
        generate_time(engine("Qwen2.5-0.5B", 8), STEP, ONE, constants).seconds,
        generate_time(apart, STEP, NODE, constants).seconds,
        update_time(role, work(512), NODES, constants).seconds,
        update_time(actor("Qwen2.5-7B", cut=Cut(fsdp=8)), work(64), NODES, constants).seconds,
        update_time(actor("Qwen2.5-0.5B", 2048), work(64), ONE, constants).seconds,
        forward_time(role, work(512), NODES, constants, Phase.LOGPROB).seconds,
        movement_time(apart, role, Cluster(device=H200, devices_per_node=64), constants, apart=True).seconds,
        movement_time(replace(apart, tensor=1), actor("Qwen2.5-7B"), ONE, constants, apart=False).seconds,
        *(each.seconds for each in offload_time([away, replace(away, at=Residency.DISK)], NODE, constants)),
        step_seconds([], [], constants),
    ]


@pytest.mark.parametrize("name", [field.name for field in fields(Constants)])
def test_every_constant_counts(name: str) -> None:
    """A slower share or a longer overhead makes something slower, and nothing faster."""
    worse = {"_s": 2.0, "activation_passes": 2.0, "forward_part": 1.5}
    factor = next((by for end, by in worse.items() if name.endswith(end)), 0.5)
    before, after = everything(C), everything(replace(C, **{name: getattr(C, name) * factor}))
    assert all(new >= old for old, new in zip(before, after, strict=True))
    assert sum(after) > sum(before)


def test_assumptions_are_listed_and_say_where_they_come_from() -> None:
    lines = {line.name: line for line in assumptions(replace(C, beside_phases_s=1.0), ONE)}
    assert len(lines) == 5 + len(fields(Constants))
    assert lines["beside phases"].formula == "as given"
    assert lines["network share"].formula == "assumed"
    assert lines["decode layer"].formula == "fitted to one H200"
    assert lines["matrix rate"].value == 989e12
    assert set(ASSUMED) < {field.name for field in fields(Constants)}


def test_a_batch_that_empties_costs_the_steps_of_its_longest() -> None:
    even = generate_time(engine("Qwen2.5-1.5B"), STEP, ONE, C)
    tail = generate_time(engine("Qwen2.5-1.5B"), replace(STEP, longest=4096), ONE, C)
    assert part(tail, "launches") == pytest.approx(part(even, "launches") * (512 + 4096) / 1024)
    assert part(tail, "attention") == pytest.approx(part(even, "attention"))


def test_a_mixture_reads_the_experts_that_its_rows_meet() -> None:
    mixture = engine("Qwen3-30B-A3B")
    model = mixture.model
    one, many = (decode_step(mixture, rows, 0, ONE, C)[0].formula for rows in (1, 10_000))
    assert one.startswith(f"max({2 * (model.active - model.embedding) / 1e9:.2f} GB")
    assert many.startswith(f"max({2 * (model.total - model.embedding) / 1e9:.2f} GB")


def test_tensor_parallelism_divides_reading_and_adds_sums() -> None:
    alone, four = (decode_step(engine("Llama-3.1-70B", tensor=tensor), 64, 1000, NODE, C) for tensor in (1, 4))
    assert [each.name for each in four] == ["products", "attention", "launches", "drawing", "sums", "gathered logits"]
    for index in (0, 1, 3):
        assert four[index].seconds == pytest.approx(alone[index].seconds / 4)
    assert four[2].seconds == alone[2].seconds
    within = sum(each.seconds for each in four)
    across = sum(each.seconds for each in decode_step(engine("Llama-3.1-70B", tensor=4), 64, 1000, ONE, C))
    assert within < across


def test_devices_share_the_work_of_an_update() -> None:
    one = update_time(actor("Qwen2.5-7B"), work(512), NODE, C)
    eight = update_time(actor("Qwen2.5-7B", cut=Cut(fsdp=8)), work(512), NODE, C)
    for name in ("products", "attention", "activations", "logits"):
        assert part(eight, name) == pytest.approx(part(one, name) / 8)
    assert part(eight, "optimizer") == pytest.approx(part(one, "optimizer") / 8, rel=0.01)
    assert eight.seconds == pytest.approx(one.seconds / 8, rel=0.01)
    slow = update_time(actor("Qwen2.5-7B", 2048, cut=Cut(fsdp=8)), work(512), NODE, C)
    assert part(slow, "shards") > part(eight, "shards") == 0
    whole = update_time(actor("Qwen2.5-7B", 2048, cut=Cut(fsdp=8), gathered_whole=True), work(512), NODE, C)
    assert part(whole, "shards") < part(slow, "shards")


def operations(layer_passes: float, head_passes: float) -> float:
    """Operations of 7B, in passes over layers and head that are a forward pass each."""
    model, done = numbers("Qwen2.5-7B"), work(512)
    return 2 * (layer_passes * model.computed * done.tokens + head_passes * model.head_matrix * done.predictions)


@pytest.mark.parametrize(
    ("more", "layer_passes", "head_passes"),
    [
        ({}, 3, 4),
        ({"recompute": True}, 4, 4),
        ({"trained": 10**7}, 2, 3),
        ({"trained": 10**7, "recompute": True}, 3, 3),
    ],
    ids=str,
)
def test_passes_are_those_that_gradients_need(more: dict[str, Any], layer_passes: int, head_passes: int) -> None:
    """Logits are computed again in any case; frozen weights need no gradient of their own."""
    found = update_time(actor("Qwen2.5-7B", **more), work(512), ONE, C)
    rate = H200.matrix_flops * C.training_matrix_share
    assert part(found, "products") == pytest.approx(operations(layer_passes, head_passes) / rate)
    forward = forward_time(actor("Qwen2.5-7B", **more), work(512), ONE, C, Phase.LOGPROB)
    assert part(forward, "products") == pytest.approx(operations(1, 1) / rate)


def test_adapters_have_a_small_optimizer() -> None:
    adapters, whole = (update_time(actor("Qwen2.5-7B", **more), work(512), ONE, C) for more in ({"trained": 10**7}, {}))
    assert part(adapters, "optimizer") < part(whole, "optimizer") / 100


@pytest.mark.parametrize(("backward", "measured_s"), [(False, 0.045), (True, 0.151)])
def test_log_probs_of_a_large_vocabulary_take_what_was_measured(backward: bool, measured_s: float) -> None:
    """64k tokens, 151,936 tokens of vocabulary, 896 wide, on an H200; nothing was fitted to it."""
    role = actor("Qwen2.5-0.5B", 65536)
    role = replace(role, model=replace(role.model, layers=Layers(()), final_norm=0))
    alone = Work(tokens=0, predictions=65536)
    found = update_time(role, alone, ONE, C) if backward else forward_time(role, alone, ONE, C, Phase.LOGPROB)
    assert found.seconds - part(found, "optimizer") == pytest.approx(measured_s, rel=0.1)


def test_stages_stand_empty_the_less_the_more_microbatches_there_are() -> None:
    empty = [
        part(update_time(actor("Qwen2.5-7B", tokens, cut=Cut(pipeline=4)), work(512), NODE, C), "empty stages")
        for tokens in (32768, 8192)
    ]
    assert empty[1] == pytest.approx(empty[0] * 9 / 35, rel=0.01)


def test_several_stages_of_each_device_stand_empty_less_and_send_more() -> None:
    """They win where there are few microbatches, and lose where there are many and neighbours are far apart."""
    role, far = actor("Qwen2.5-7B", 16384, cut=Cut(pipeline=4)), Cluster(device=H200, devices_per_node=1)

    def phase(stages: int, cluster: Cluster, tokens: int = 16384) -> PhaseTime:
        cut = Cut(pipeline=4, stages_per_device=stages)
        return update_time(replace(role, cut=cut, tokens=tokens), work(512), cluster, C)

    one, two = phase(1, NODE), phase(2, NODE)
    assert part(two, "hidden states between stages") == pytest.approx(2 * part(one, "hidden states between stages"))
    assert part(two, "empty stages") == pytest.approx(part(one, "empty stages") / 2, rel=0.01)
    assert two.seconds < one.seconds
    assert phase(2, far, tokens=1024).seconds > phase(1, far, tokens=1024).seconds


def test_links_are_those_of_the_node_or_of_the_network() -> None:
    """Eight neighbours; then two nodes of four, whose four ports carry what enters; then every fourth device."""
    inside, across, apart = NODE.link(8, 1, C), NODES.link(8, 1, C), NODES.link(2, 4, C)
    assert inside == pytest.approx(MEASURED_H200.all_gather_bandwidth, rel=0.01)
    assert across == pytest.approx(4 * 50e9 * C.network_share)
    assert apart == pytest.approx(50e9 * C.network_share)


def test_weights_move_by_the_way_that_there_is() -> None:
    role, copy = actor("Qwen2.5-7B"), engine("Qwen2.5-7B", own_weights=True)
    count = 2 * numbers("Qwen2.5-7B").total
    assert movement_time(engine("Qwen2.5-7B"), role, ONE, C, apart=False).seconds == 0
    here = movement_time(engine("Qwen2.5-1.5B", own_weights=True), actor("Qwen2.5-1.5B"), ONE, C, apart=False).seconds
    assert here == pytest.approx(0.0050, rel=0.03)  # measured on an H200, from the trainer to vLLM
    there = movement_time(copy, role, NODE, C, apart=True).seconds
    assert there == pytest.approx(count / MEASURED_H200.broadcast_bandwidth, rel=0.01)
    gathered = movement_time(copy, replace(role, cut=Cut(fsdp=8)), NODE, C, apart=False).seconds
    assert gathered == pytest.approx(count / MEASURED_H200.all_gather_bandwidth, rel=0.01)


def test_offload_takes_the_links_time() -> None:
    move = Move(role="actor", name="weights", bytes=55 * 10**9, ways=2, at=Residency.HOST)
    (host,) = offload_time([move], NODE, C)
    assert host.seconds == pytest.approx(2, rel=0.01)
    (disk,) = offload_time([replace(move, at=Residency.DISK)], NODE, C)
    assert disk.seconds == pytest.approx(2 * 55e9 * 8 / C.disk_bandwidth)


def test_a_lag_lets_rollout_and_training_work_at_once() -> None:
    sampled, trained = (
        generate_time(engine("Qwen2.5-1.5B"), STEP, ONE, C),
        update_time(actor("Qwen2.5-1.5B"), work(512), ONE, C),
    )
    together = step_seconds([sampled], [trained], C, offload=0.5)
    assert together == pytest.approx(sampled.seconds + trained.seconds + C.beside_phases_s + 0.5)
    assert (
        step_seconds([sampled], [trained], C, apart=True) == max(sampled.seconds, trained.seconds) + C.beside_phases_s
    )
    lines = list(sampled.lines())
    assert lines[0].value == pytest.approx(sum(float(line.value or 0) for line in lines[1:]), abs=1e-5)
    assert lines[0].formula.endswith("% are products; products + attention + launches + drawing + prompts + start")


def test_parts_of_a_phase_are_not_taken_for_numbers_of_the_same_name() -> None:
    """``logits`` are bytes in the memory ledger, and a part of an update in time: that one was shown in place of the other."""
    update = list(update_time(actor("Qwen2.5-1.5B"), work(512), ONE, C).lines())
    logits = LedgerLine(section="memory", name="logits", value=268435456, formula="a × b", source="")
    twice = LedgerLine(section="memory", name="twice", value=0, formula="2 × logits", source="")
    step = LedgerLine(section="time", name="step", value=18.7, formula="all phases", source="")
    kept = LedgerLine(section="memory", name="kept", value=0, formula="1,024 tokens of a step × 21", source="")
    lines = [logits, twice, step, kept, *update]
    assert worked(lines, {}) == {("memory", "twice"): "2 × 268,435,456"}


def test_the_cost_model_needs_no_torch() -> None:
    code = (
        "import sys, meshloom.plan.time, meshloom.plan.sharded_memory\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
