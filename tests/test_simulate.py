"""The control loop on virtual devices: what it says must follow from the lengths, and agree with the plan."""

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import meshloom.loop.control
import meshloom.simulate.outcome
from meshloom.cli import main
from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan.forecast import Lengths
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.simulate.compare import Comparison, Question, as_json, compare
from meshloom.simulate.costs import Costs
from meshloom.simulate.engine import VirtualEngine
from meshloom.simulate.lengths import LengthSource, parse_distribution, read_recorded
from meshloom.simulate.outcome import Outcome, control_of
from meshloom.simulate.replica import Replica, Share, Speed
from meshloom.simulate.stage import VirtualStage
from meshloom.simulate.variants import given_case
from tests.test_plan_outlook import public

EIGHT = ("cluster.devices_per_node=8", "rollout.max_sequences=128")
SPLIT = (*EIGHT, "placement.actor=[0-1]", "placement.rollout=[2-7]")
TAIL = "0.9*fixed:100+0.1*fixed:1000"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return public(tmp_path_factory.mktemp("models"), "Qwen2.5-1.5B")


def settings(model: Path, *given: str) -> TrainSettings:
    fixed = ("run_dir=r", f"model.path={model}", "data.train.reasoning_gym=basic_arithmetic", "cluster.device=h200")
    lengths = ("rollout.max_response_tokens=1024", "data.max_prompt_tokens=128")
    return load_settings(TrainSettings, None, [*fixed, *lengths, *given])


def found(comparison: Comparison) -> dict[str, Outcome]:
    """Outcomes by the names of their variants; the given one as ``given``."""
    named = {variant.name: outcome for variant, outcome in comparison.found if outcome is not None}
    first = comparison.found[0][1]
    return named if first is None else {**named, "given": first}


def costs_of(given: TrainSettings, prompt: int = 128, response: int = 1024) -> Costs:
    made = Costs.of(given_case(given).look({}), Lengths(prompt=prompt, response=response, longest=response))
    assert made is not None
    return made


def test_the_same_command_gives_the_same_bytes_and_another_seed_others(model: Path) -> None:
    def text(seed: int) -> str:
        question = Question(steps=4, lengths="lognormal:200:1", reward_s="geometric:2", seed=seed, lags=(0, 1))
        return json.dumps(as_json(compare(settings(model, *EIGHT), question)))

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize("given", [(), EIGHT, (*EIGHT, "algorithm.kl=loss", "batch.prompts_per_update=32")])
def test_in_turns_with_equal_lengths_a_step_takes_what_the_plan_says(model: Path, given: tuple[str, ...]) -> None:
    outcome = compare(settings(model, *given), Question(steps=3, lags=(0,), rollout_devices=())).found[0][1]
    assert outcome is not None
    assert outcome.step_s == pytest.approx(outcome.plan_step_s, rel=0.03)
    assert outcome.slowest_step_s == pytest.approx(outcome.step_s)
    assert outcome.lags == {0: 1.0}


def test_a_lag_hides_the_shorter_side(model: Path) -> None:
    outcomes = found(compare(settings(model, *SPLIT), Question(steps=6, lags=(0, 1, 2), rollout_devices=())))
    turns, lagged, more = outcomes["given"], outcomes["as given, but lag 1"], outcomes["as given, but lag 2"]
    work = {
        name: {pool: outcome.step_s * (1 - idle) for pool, idle in outcome.idle.items()}
        for name, outcome in (("turns", turns), ("lagged", lagged))
    }
    costs = costs_of(settings(model, *SPLIT))
    beside = costs.beside_s - costs.sync_s
    assert turns.step_s == pytest.approx(sum(work["turns"].values()) + beside, rel=0.02)
    assert work["lagged"]["rollout"] == pytest.approx(work["turns"]["rollout"], rel=0.02)
    # Log-probs of the weights that sampled are computed too, now that they are older than those that learn.
    assert work["lagged"]["actor"] > 1.2 * work["turns"]["actor"]
    assert lagged.step_s == pytest.approx(max(work["lagged"].values()), rel=0.05)
    assert lagged.step_s == pytest.approx(lagged.plan_step_s, rel=0.03)
    assert lagged.step_s < 0.9 * turns.step_s
    assert (turns.lags, lagged.lags) == ({0: 1.0}, {1: 1.0})
    # All samples have the same length: there is no tail that more lag could hide.
    assert more.step_s == pytest.approx(lagged.step_s, rel=0.1)
    shared = outcomes["all roles share all devices"]
    assert set(shared.idle) == {"actor, rollout"}
    assert set(lagged.idle) == {"actor", "rollout"}


def test_a_long_tail_leaves_slots_idle_and_a_lag_in_flight_fills_them(model: Path) -> None:
    """Equal lengths of the same mean take less; with the tail, most slots wait for the longest samples of a step."""
    given = settings(model, *SPLIT, "placement.rollout=[2]", "placement.actor=[0,1]", "rollout.max_sequences=256")
    even, tail = (
        found(compare(given, Question(steps=8, lengths=lengths, lags=(0, 1, 3), rollout_devices=(), in_flight=True)))
        for lengths in ("fixed:190", TAIL)
    )
    assert tail["given"].slots_used < 0.8 * even["given"].slots_used
    assert tail["given"].step_s > 1.2 * even["given"].step_s
    assert tail["as given, but lag 3"].slots_used > 1.5 * tail["given"].slots_used
    assert tail["as given, but lag 3"].step_s < tail["as given, but lag 1"].step_s < tail["given"].step_s


def test_weights_between_rollouts_wait_for_the_samples_on_their_way(model: Path) -> None:
    """The wait is in the sync then; in the midst of samples they come at once."""
    given = settings(model, *SPLIT, "algorithm.max_lag_versions=1", "placement.rollout=[2]")
    between, midst = (
        compare(given, Question(steps=4, lags=(1,), rollout_devices=(), in_flight=in_flight)).found[0][1]
        for in_flight in (False, True)
    )
    assert between is not None
    assert midst is not None
    assert between.sync_s > 10 * midst.sync_s
    assert between.waited_s == pytest.approx(0, abs=0.1)
    assert midst.waited_s > 0.5 * between.sync_s


def test_a_lag_gains_nothing_where_the_reference_waits_for_the_rollout_ahead(model: Path) -> None:
    """It is on the devices that generate, and judges when they have finished the next rollout."""
    judged = (
        *SPLIT,
        "algorithm.kl=loss",
        "placement.rollout=[2-3]",
        "placement.reference=[2-3]",
        "cluster.devices_per_node=4",
    )
    question = Question(steps=4, lags=(1,), rollout_devices=())
    alone, lagged = (
        found(compare(settings(model, *judged), question))[name] for name in ("given", "as given, but lag 1")
    )
    assert lagged.step_s > 0.95 * alone.step_s
    assert lagged.plan_step_s > 0.95 * alone.plan_step_s
    elsewhere = found(compare(settings(model, *judged, "placement.reference=[0-1]"), question))
    assert elsewhere["as given, but lag 1"].step_s < 0.9 * elsewhere["given"].step_s


def test_samples_that_wait_for_a_slot_are_younger_than_their_rollout(model: Path) -> None:
    given = settings(model, *SPLIT, "algorithm.max_lag_versions=2", "placement.rollout=[2]", "rollout.max_sequences=64")
    question = Question(steps=6, lengths="lognormal:300:1", lags=(2,), rollout_devices=(), in_flight=True)
    outcome = compare(given, question).found[0][1]
    assert outcome is not None
    assert len(outcome.lags) > 1
    assert max(outcome.lags) <= 2
    assert sum(outcome.lags.values()) == pytest.approx(1)


def test_the_control_loop_is_the_one_that_trains(model: Path) -> None:
    given = settings(model, *SPLIT, "algorithm.max_lag_versions=2")
    costs = costs_of(given)
    fixed = parse_distribution("fixed:64", "")
    lengths = LengthSource(0, 8, 1024, 128, fixed, parse_distribution("0", ""))
    engine = VirtualEngine(costs.speed, 6, lengths, deadline_s=1e9, workers=1, in_flight=False)
    stage = VirtualStage(costs, engine, 1, {}, until=5)
    control = control_of(costs, stage, 10)
    assert type(control) is meshloom.loop.control.ControlLoop
    assert not control.run()
    assert (control.step, control.version, control.draws) == (5, 5, 5 * 64 + 2 * 64)
    assert stage.ends == sorted(stage.ends)
    assert all(not replica.waiting_tokens for replica in engine.replicas)


def test_a_run_is_controlled_by_that_class() -> None:
    from meshloom.loop import train

    assert train.ControlLoop is meshloom.loop.control.ControlLoop is meshloom.simulate.outcome.ControlLoop


class Notes:
    """Times at which samples ended."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}

    def began(self, sample: int, version: int) -> None:
        assert sample not in self.ends

    def ended(self, sample: int, at: float) -> None:
        self.ends[sample] = at


def step_by_step(speed: Speed, samples: Sequence[tuple[int, int, int]], new: Sequence[bool]) -> dict[int, float]:
    """The same, with each decode step on its own."""
    now, ends = speed.start_s, {}
    rows: list[list[int]] = []
    waiting = list(zip(samples, new, strict=True))
    while rows or waiting:
        while waiting and len(rows) < speed.slots:
            (sample, prompt, response), is_new = waiting.pop(0)
            now += prompt * speed.prompt_s * is_new
            rows.append([sample, prompt, response])
        now += speed.step_s(len(rows)) + speed.token_s * sum(past for _, past, _ in rows)
        rows = [[sample, past + 1, left - 1] for sample, past, left in rows]
        ends |= {sample: now for sample, _, left in rows if not left}
        rows = [row for row in rows if row[2]]
    return ends


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_replica_takes_what_its_steps_take_one_by_one(seed: int, in_flight: bool) -> None:
    """Whether it is asked in between or not."""
    chance = random.Random(seed)
    speed = Speed(lambda rows: 0.01 + 0.001 * rows, 1e-6 * chance.randint(0, 50), 2e-4, 0.05, chance.randint(1, 9))
    samples = [(i, chance.randint(1, 300), chance.randint(1, 200)) for i in range(40)]
    new = [i % 4 == 0 for i in range(40)]
    notes, replica = Notes(), Replica(speed, in_flight=in_flight)
    replica.submit(share := Share(notes, samples, new), 0.0)
    for _ in range(chance.randint(0, 30)):
        replica.advance(replica.now + chance.uniform(0, 1))
    replica.finish(share)
    expected = step_by_step(speed, samples, new)
    assert notes.ends == pytest.approx(expected)
    assert share.ended_at == pytest.approx(max(expected.values())) == replica.busy_s


def test_groups_that_miss_the_deadline_are_tried_again_and_dropped(model: Path) -> None:
    """Every tenth sample is longer than the deadline lets be; most groups have one."""
    given = settings(model, "rollout.deadline_s=4", "rollout.max_response_tokens=4096")
    outcome = compare(given, Question(steps=3, lengths="0.9*fixed:64+0.1*fixed:4096")).found[0][1]
    assert outcome is not None
    assert outcome.dropped == outcome.retried > 0
    assert outcome.waited_s > 8
    with pytest.raises(UserError, match="no group of this step was finished"):
        compare(given, Question(steps=3, lengths="fixed:4096"))


def test_rewards_take_their_time_on_the_workers_there_are(model: Path) -> None:
    def waits(*changes: str) -> float:
        given = settings(model, "batch.prompts_per_step=8", "batch.samples_per_prompt=4", *changes)
        outcome = compare(given, Question(steps=2, lengths="fixed:64", reward_s="1.5")).found[0][1]
        assert outcome is not None
        return outcome.waited_s

    enough, four = waits(), waits("reward.workers=4")
    assert enough > 1.5
    assert four == pytest.approx(enough + 1.5 * (32 / 4 - 1))


@pytest.mark.parametrize(
    ("text", "mean", "rel"),
    [
        ("fixed:7", 7, 0),
        ("300", 300, 0),
        ("geometric:50", 50, 0.05),
        ("uniform:10:30", 20, 0.05),
        ("lognormal:100:0.5", 100 * math.exp(0.125), 0.05),
        ("3*fixed:10+1*fixed:50", 20, 0.05),
    ],
)
def test_distributions_have_their_means(text: str, mean: float, rel: float) -> None:
    drawn, chance = parse_distribution(text, "--lengths"), random.Random(0)
    values = [drawn.draw(chance) for _ in range(4000)]
    assert sum(values) / 4000 == pytest.approx(mean, rel=rel)
    assert min(values) >= 0


@pytest.mark.parametrize(
    "text", ["", "normal:3", "fixed", "fixed:a", "lognormal:3", "fixed:-1", "0*fixed:3", "geometric:0"]
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="distribution|above 0") as caught:
        parse_distribution(text, "--lengths")
    assert (caught.value.where, "lognormal:MEDIAN:SIGMA" in caught.value.fix) == ("--lengths", True)


def samples_file(path: Path, groups: Sequence[Sequence[int]]) -> Path:
    records = [
        {"step": 1, "kind": "train", "group": number, "prompt_ids": [0] * (10 + number), "response_ids": [0] * length}
        for number, lengths in enumerate(groups)
        for length in lengths
    ]
    other = {"step": 1, "kind": "validation", "group": 0, "prompt_ids": [0], "response_ids": [0] * 999}
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, other]))
    return path


def test_lengths_of_a_run_come_group_by_group(tmp_path: Path) -> None:
    groups = [[5, 6, 7, 8], [500, 600, 700, 800], [90, 90]]
    samples_file(tmp_path / "samples.jsonl", groups)
    recorded = read_recorded(tmp_path)
    source = LengthSource(0, 4, 750, 128, recorded, parse_distribution("0", ""))
    seen = {source.of(number).prompt: sorted(source.of(number).responses) for number in range(30)}
    assert seen == {10: [5, 6, 7, 8], 11: [500, 600, 700, 750], 12: [90] * 4}


@pytest.mark.parametrize(
    ("text", "said"), [("", "no training samples"), ("nonsense\n", "line 1"), ('{"kind": "train"}\n', "line 1")]
)
def test_a_file_without_samples_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "samples.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        read_recorded(tmp_path / "samples.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_recorded(tmp_path / "none.jsonl")


def test_a_thousand_steps_take_seconds(model: Path) -> None:
    given, began = settings(model), time.process_time()
    compare(given, Question(steps=150, lengths="lognormal:200:1"))
    assert time.process_time() - began < 50


def test_variants_that_cannot_work_are_named_with_the_reason(model: Path) -> None:
    given = settings(model, *EIGHT, "parallel.actor.sequence=4", "rollout.max_sequences=64")
    comparison = compare(given, Question(steps=1, lags=(1,), rollout_devices=(4, 6)))
    refused = {variant.name: variant.refused for variant, _ in comparison.found}
    assert refused["4 train, 4 generate, lag 1"] == ""
    assert "4" in refused["2 train, 6 generate, lag 1"]
    small = settings(model, *EIGHT, "device_memory_bytes=13000000000")
    comparison = compare(small, Question(steps=1, lags=(1,), rollout_devices=(6,)))
    assert "holds" in comparison.found[1][0].refused
    assert comparison.found[1][1] is None


def test_a_placement_that_is_searched_is_what_is_given(model: Path) -> None:
    given = settings(model, "cluster.devices_per_node=4", "placement.auto=true")
    chosen = compare(given, Question(steps=1, lags=(0,), rollout_devices=())).found[0]
    assert chosen[0].name.startswith("as given: ")
    assert chosen[1] is not None
    by_hand = compare(settings(model, "cluster.devices_per_node=4"), Question(steps=1, lags=(0,), rollout_devices=()))
    assert by_hand.found[0][1] is not None
    assert chosen[1].step_s <= by_hand.found[0][1].step_s * 1.03


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: r\nmodel: {{path: {model}}}\ndata: {{train: {{reasoning_gym: basic_arithmetic}}}}\n")
    size = ["--devices-per-node", "4", "--device-kind", "h200", "--steps", "2", "--lengths", "geometric:90"]
    args = ["simulate", str(file), *size, "--rollout-devices", "1,2", "batch.prompts_per_step=16"]
    assert main([*args, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["steps"] == 2
    names = [variant["name"] for variant in answer["variants"]]
    assert names[:2] == ["as given: 4 generate, 4 train, in turns", "3 train, 1 generate, in turns"]
    assert len(names) == 7
    lagged = answer["variants"][2]
    assert lagged["overrides"] == ["placement.actor=[0-2]", "placement.rollout=[3]", "algorithm.max_lag_versions=1"]
    assert lagged["outcome"]["lags"] == {"1": 1.0}
    # What a variant says can be given to a run.
    load_settings(TrainSettings, file, lagged["overrides"])
    assert main(args) == 0
    assert "as given: 4 generate" in capsys.readouterr().out
    assert main([*args, "--lags", "x"]) == main([*args, "--rollout-devices", "9"]) == 2
    assert main(["simulate", str(file)]) == 2
    assert "kind of the devices" in capsys.readouterr().err
    assert main(["simulate", str(file), "--device-kind", "h200", "algorithm.max_lag_versions=1"]) == 2


def test_nothing_heavy_is_imported(model: Path) -> None:
    code = (
        "import sys; from meshloom.cli import main\n"
        f"main(['simulate', 'run_dir=r', 'model.path={model}', 'data.train.reasoning_gym=basic_arithmetic',"
        " '--device-kind', 'h200', '--steps', '1'])\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_rounds_of_dynamic_sampling_cost_what_the_share_of_spread_says(model: Path, lag: int) -> None:
    """Half of the groups have spread: two rounds a step in the long run, since the surplus of a step is kept."""
    sifted = ("algorithm.filter_groups.enabled=true", "batch.prompts_per_step=32", *(SPLIT if lag else EIGHT))
    question = Question(steps=20, lags=(lag,), rollout_devices=(), spread=0.5)
    outcome = compare(settings(model, *sifted, f"algorithm.max_lag_versions={lag}"), question).found[0][1]
    assert outcome is not None
    assert outcome.rounds == pytest.approx(2.0, rel=0.15)
    # With a lag, a round that turns out to be needed waits for the one before it, which the plan does not know.
    assert outcome.step_s == pytest.approx(outcome.plan_step_s, rel=0.3)
    assert max(outcome.lags) <= lag + 1


def test_greedy_samples_are_generated_and_not_trained_on(model: Path) -> None:
    question = Question(steps=3, lags=(0,), rollout_devices=())
    few = ("batch.samples_per_prompt=2", *EIGHT)
    plain, greedy = (
        compare(settings(model, *few, f"algorithm.advantage={name}"), question).found[0][1]
        for name in ("reinforce_plus_plus", "remax")
    )
    assert plain is not None
    assert greedy is not None
    assert greedy.tokens_per_second * greedy.step_s > 1.2 * plain.tokens_per_second * plain.step_s
    assert greedy.step_s > plain.step_s
    assert greedy.step_s == pytest.approx(greedy.plan_step_s, rel=0.03)


CRITIC = (*SPLIT, "algorithm.advantage=gae", "placement.critic=[0-1]")


def test_steps_of_a_critic_that_warms_up_are_told_apart(model: Path) -> None:
    """They lack the actor's update, and the steps after them take what they do without a warm-up."""
    question = Question(steps=3, lags=(0,), rollout_devices=())
    both = [compare(settings(model, *CRITIC, f"critic.warmup_steps={steps}"), question) for steps in (0, 4)]
    plain, warm = (comparison.found[0][1] for comparison in both)
    assert plain is not None and warm is not None and warm.warmup_step_s is not None
    assert plain.warmup_step_s is None
    assert warm.step_s == pytest.approx(plain.step_s, rel=1e-3)
    update = costs_of(settings(model, *CRITIC)).expected.seconds(Role.ACTOR, Phase.UPDATE)
    assert update > 0.05 * warm.step_s
    assert warm.step_s - warm.warmup_step_s == pytest.approx(update, rel=0.05)
    assert as_json(both[1])["variants"][0]["outcome"]["warmup_step_s"] == warm.warmup_step_s
    endless = compare(settings(model, *CRITIC, "critic.warmup_steps=1000000"), question).found[0][1]
    assert endless is not None and endless.warmup_step_s == pytest.approx(warm.warmup_step_s, rel=0.02)


def test_a_critic_that_warms_up_makes_no_version(model: Path) -> None:
    """As in the loop that trains: samples that were begun ahead are as new as the weights until the actor learns."""
    costs = costs_of(settings(model, *CRITIC, "algorithm.max_lag_versions=1", "critic.warmup_steps=3"))
    lengths = LengthSource(0, 8, 1024, 128, parse_distribution("fixed:64", ""), parse_distribution("0", ""))
    engine = VirtualEngine(costs.speed, 6, lengths, deadline_s=1e9, workers=1, in_flight=False)
    stage = VirtualStage(costs, engine, 1, {}, until=5, warmup_steps=costs.warmup_steps)
    control = control_of(costs, stage, 10)
    control.run()
    assert (control.step, control.version) == (5, 2)
    of_step = 64 * 8
    assert stage.counts.lags == {0: 4 * of_step, 1: of_step}
    worked = stage.counts.worked_s
    assert 0 < worked["actor"] < worked["critic"]
