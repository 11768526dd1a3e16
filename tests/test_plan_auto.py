"""The search for a placement: never worse than what people write by hand, always accepted by the plan, quick at any size."""

import json
import random
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshloom.cli import main
from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.loop.train import run_training
from meshloom.plan import Plan, build_plan
from meshloom.plan.auto import arranged, choose
from meshloom.plan.candidates import Candidates, Given
from meshloom.plan.carried_out import planned_only
from meshloom.plan.constants import Cluster
from meshloom.plan.device_checks import lay_out
from meshloom.plan.fitting import Case
from meshloom.plan.hardware import find_device
from meshloom.plan.meshes import Divisible
from meshloom.plan.parameters import count_parameters
from meshloom.plan.placement import Role
from meshloom.plan.ranking import Ranking
from meshloom.plan.search import search
from meshloom.plan.topology import Topology
from meshloom.plan.weigh import Scales
from meshloom.plan.weighed import Lack, Weighed
from tests.lesson_runs import train_settings, write_inputs
from tests.test_plan_outlook import DATA, PUBLIC, public

VLLM = "rollout.engine=vllm"


def settings_of(path: Path, *given: str) -> TrainSettings:
    return load_settings(TrainSettings, None, [*DATA, f"model.path={path}", *given])


def auto(path: Path, *given: str, **more: Any) -> Ranking:
    return choose(settings_of(path, "placement=auto", *given), **more)


def planned(settings: TrainSettings) -> Plan:
    return build_plan(settings, 1000)


def require_accepted(ranking: Ranking) -> Plan:
    """The plan of the chosen settings: nothing is refused, all fits with its margin, and it takes as long as was said."""
    assert ranking.chosen is not None and not ranking.problems
    assert not ranking.chosen.placement.auto
    plan = planned(ranking.chosen)
    assert plan.problems == ()
    assert not [warning for warning in plan.warnings if warning.code in ("M005", "M008", "P009")]
    if ranking.chosen.cluster.device is not None:
        assert plan.value("step") == pytest.approx(ranking.ranked[0].step_s, rel=1e-4)
    return plan


# What guides and launch scripts recommend: everything on all devices, sharded over all of them, the engine over two devices of
# large models; layers recomputed, and on small devices the optimizer away between phases.
BY_HAND: dict[int, list[list[str]]] = {
    80: [
        ["parallel.rollout.tensor=2", "rollout.vllm.gpu_memory_utilization=0.6", "batch.tokens_per_microbatch=16384"],
        ["parallel.rollout.tensor=1", "rollout.vllm.gpu_memory_utilization=0.5", "batch.tokens_per_microbatch=8192"],
        ["parallel.rollout.tensor=2", "rollout.vllm.gpu_memory_utilization=0.5", "model.gradient_checkpointing=true"],
        ["parallel.actor.fsdp_size=2", "parallel.rollout.tensor=2", "batch.tokens_per_microbatch=4096"],
        ["parallel.actor.sequence=2", "parallel.rollout.tensor=2", "rollout.vllm.gpu_memory_utilization=0.4"],
    ],
    40: [
        [
            "parallel.rollout.tensor=2",
            "rollout.vllm.gpu_memory_utilization=0.4",
            "batch.tokens_per_microbatch=4096",
            "model.gradient_checkpointing=true",
            "offload.actor.optimizer=host",
        ],
        [
            "parallel.rollout.tensor=2",
            "rollout.vllm.gpu_memory_utilization=0.5",
            "batch.tokens_per_microbatch=8192",
            "model.gradient_checkpointing=true",
            "offload.actor={parameters: host, optimizer: host}",
            "offload.reference.parameters=host",
        ],
        ["parallel.rollout.tensor=1", "rollout.vllm.gpu_memory_utilization=0.6", "batch.tokens_per_microbatch=4096"],
    ],
}


@pytest.mark.parametrize("name", ["Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-32B"])
@pytest.mark.parametrize("gigabytes", [40, 80])
def test_never_worse_than_what_is_recommended_by_hand(tmp_path: Path, name: str, gigabytes: int) -> None:
    path, compared = public(tmp_path, name), 0
    for devices, more in product((4, 6, 8), ([], ["algorithm.kl=loss"])):
        batch = "batch.prompts_per_step=60" if devices == 6 else "batch.prompts_per_step=64"
        hardware = [f"cluster.devices_per_node={devices}", f"cluster.device=a100-{gigabytes}gb", VLLM, batch, *more]
        ranking = auto(path, *hardware)
        hands = [*BY_HAND[gigabytes]]
        if devices == 6:
            hands += [["placement.actor=[0-3]", "placement.reference=[0-3]", "placement.rollout=[4-5]"]]
        for hand in hands:
            plan = planned(settings_of(path, *hardware, *hand))
            if plan.problems or [warning for warning in plan.warnings if warning.code == "M008"]:
                continue
            compared += 1
            assert ranking.ranked, f"{hand} fits on {devices} of {gigabytes} GB, and nothing was found"
            assert ranking.ranked[0].step_s <= plan.value("step") * (1 + 1e-6), (devices, hand)
        if ranking.ranked:
            require_accepted(ranking)
    assert compared or name == "Qwen2.5-32B"


def test_seventy_billion_on_eight_devices_fit_with_adapters_or_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    path, eight = public(tmp_path, "Llama-3.1-70B"), ["cluster.devices_per_node=8", "cluster.device=h100", VLLM]
    refused = auto(path, *eight)
    (problem,) = refused.problems
    assert problem.code == "X001" and refused.chosen is None
    assert "fits on 8 devices of 79.6 GiB" in problem.what
    assert "update lacks" in problem.why and "model.lora.rank=16" in problem.fix
    assert all(one.why for one in refused.refused)
    require_accepted(auto(path, "cluster.nodes=4", *eight))


def test_settings_by_chance_are_chosen_so_that_the_plan_accepts_them(tmp_path: Path) -> None:
    pick, found, refused = random.Random(5), 0, 0
    paths = [public(tmp_path, name) for name in ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen3-0.6B")]
    for _ in range(24):
        given = [
            f"cluster.nodes={pick.choice([1, 1, 2, 3])}",
            f"cluster.devices_per_node={pick.choice([1, 2, 4, 5, 8])}",
            f"cluster.device={pick.choice(['h100', 'a100-40gb', 'rtx-4090', 'h200'])}",
            f"rollout.engine={pick.choice(['torch', 'vllm'])}",
            f"algorithm.kl={pick.choice(['none', 'loss', 'reward'])}",
            f"batch.prompts_per_step={pick.choice([8, 48, 64, 100])}",
            f"rollout.max_response_tokens={pick.choice([256, 1024, 3000])}",
        ]
        given += pick.sample(
            [
                "parallel.rollout.tensor=1",
                "model.gradient_checkpointing=true",
                "batch.tokens_per_microbatch=8192",
                "offload.actor.optimizer=host",
                "parallel.actor.sequence=1",
                "rollout.vllm.sleep=false",
                "rollout.kv_cache_bytes=8000000000",
            ],
            k=2,
        )
        ranking = auto(pick.choice(paths), *given)
        if ranking.problems:
            refused += 1
            assert [problem.code for problem in ranking.problems] == ["X001"]
            continue
        found += 1
        require_accepted(ranking)
        kinds = {(one.arrangement, one.budget) for one in ranking.ranked}
        assert len(kinds) == len(ranking.ranked)
        assert all(one.reason for one in ranking.ranked)
        first = [one.step_s for one in ranking.ranked[:10]]
        assert first == sorted(first)
    assert found > 10 and refused >= 1


def case_of(name: str, devices: int, kind: str, *given: str) -> tuple[Case, Topology]:
    config = PUBLIC[name]
    settings = settings_of(
        Path("m"), f"cluster.devices_per_node={devices}", f"cluster.device={kind}", "device=cuda", *given
    )
    device = find_device(kind)
    case = Case(
        settings=settings,
        model=count_parameters(config),
        divisible=Divisible.of(config),
        adapters=None,
        memory=device.memory_bytes,
        device=device,
        machine=0,
    )
    return case, Topology(devices_per_node=devices)


def test_what_a_file_of_any_name_gives_is_kept(tmp_path: Path) -> None:
    """A file called default.yaml gave nothing, so a search changed what stood in it."""
    (tmp_path / "default.yaml").write_text("batch: {tokens_per_microbatch: 4096}\n")
    settings = load_settings(TrainSettings, tmp_path / "default.yaml", [*DATA, f"model.path={tmp_path}"])
    assert "batch.tokens_per_microbatch" in Given.of(settings)


@pytest.mark.parametrize(
    ("name", "kind", "given"),
    [("Qwen2.5-7B", "a100-80gb", [VLLM]), ("Qwen2.5-1.5B", "rtx-4090", ["algorithm.kl=loss"])],
)
def test_nothing_that_can_be_arranged_by_trying_everything_is_faster(name: str, kind: str, given: list[str]) -> None:
    """Every arrangement of four devices with budgets of a grid, forecast as the plan does, one by one."""
    case, topology = case_of(name, 4, kind, *given)
    kept = Given(frozenset())
    candidates = Candidates(settings=case.settings, topology=topology, model=case.divisible, given=kept)
    scales = Scales(case, Cluster(device=case.device, devices_per_node=4), kept)
    best, tried = float("inf"), 0
    for family in candidates.families():
        least = scales.family_bound(family)
        for arrangement in family.arrangements():
            bound, closer, weighed = (
                scales.bound(arrangement),
                scales.closer_bound(arrangement),
                scales.weigh(arrangement),
            )
            assert least <= bound * (1 + 1e-9)
            if isinstance(weighed, Lack):
                continue
            assert not isinstance(closer, Lack) and bound <= closer * (1 + 1e-9) <= weighed.step_s * (1 + 1e-8)
            best, tried = min(best, weighed.step_s), tried + 1
            require_no_better_budget(case, weighed)
    assert tried > 10
    found = search(candidates.families(), scales)
    assert found.complete and found.best[0].step_s == best


def require_no_better_budget(case: Case, weighed: Weighed) -> None:
    base = replace(case, settings=weighed.settings)
    for tokens, recompute in product((2048, 4096, 8192, 16384), (False, True)):
        change = {"batch.tokens_per_microbatch": tokens, "model.gradient_checkpointing": recompute}
        look = base.look(change)
        if not look.lacking() and not look.wrong and look.forecast is not None:
            stages = weighed.arrangement.placed[Role.ACTOR].cut.pipeline > 1
            slack = 1e-2 if stages else 1e-9
            assert weighed.step_s <= look.forecast.step_s * (1 + slack), (weighed.arrangement.words(), change)


def test_what_is_given_is_kept(tmp_path: Path) -> None:
    path, eight = public(tmp_path, "Qwen2.5-7B"), ["cluster.devices_per_node=8", "cluster.device=h100", VLLM]
    given = ["parallel.rollout.tensor=1", "batch.tokens_per_microbatch=6000", "parallel.actor.fsdp_size=4"]
    ranking = auto(path, *eight, *given)
    chosen = ranking.chosen
    assert chosen is not None
    assert (chosen.parallel.rollout.tensor, chosen.batch.tokens_per_microbatch, chosen.parallel.actor.fsdp_size) == (
        1,
        6000,
        4,
    )
    assert set(ranking.kept) == {path.partition("=")[0] for path in given}
    assert ranking.ranked[0].step_s >= auto(path, *eight).ranked[0].step_s
    apart = load_settings(
        TrainSettings, None, [*DATA, f"model.path={path}", *eight, "placement={auto: true, actor: [0-4]}"]
    )
    chosen = choose(apart).chosen
    assert chosen is not None and chosen.placement.actor == ("0-4",)
    assert require_accepted(choose(apart)).layout.idle == type(planned(chosen).layout.idle)()


def test_generation_that_runs_ahead_gets_devices_of_its_own(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-1.5B")
    ranking = auto(path, "cluster.devices_per_node=4", "cluster.device=h100", "algorithm.max_lag_versions=2")
    layout = require_accepted(ranking).layout
    assert len(layout.shared) == 2
    assert all("train" in one.arrangement for one in ranking.ranked)
    assert all(0 <= share < 1 for one in ranking.ranked for share in one.waits.values())


def test_what_fits_but_for_an_engine_that_is_asleep_is_refused(tmp_path: Path) -> None:
    """The search used to end with an AssertionError."""
    path = public(tmp_path, "Llama-3.1-8B")
    require_accepted(auto(path, "cluster.devices_per_node=4", "cluster.device=a100-40gb"))


def test_a_run_that_begins_chooses_only_what_is_carried_out(tmp_path: Path) -> None:
    path, four = public(tmp_path, "Qwen2.5-7B"), ["cluster.devices_per_node=4", "cluster.device=h100"]
    settings = settings_of(path, "placement=auto", *four)
    whole, ours = choose(settings), choose(settings, to_run=True)
    assert whole.chosen == ours.chosen and not whole.warnings
    assert ours.chosen is not None and ours.chosen.parallel.rollout.tensor == 2
    assert not any(one.planned_only for one in ours.ranked)
    laid_out = lay_out(ours.chosen, None, 0)
    assert planned_only(laid_out.settings, laid_out.layout) == ()
    begun, ranking = arranged(settings)
    assert begun == ours.chosen and ranking is not None
    assert arranged(begun) == (begun, None)
    idle = settings_of(path, "placement={auto: true, critic: [0]}", *four)
    with pytest.raises(UserError, match="X001"):
        arranged(idle)


def test_devices_that_are_not_known_are_said_to_be_assumed(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-1.5B")
    ranking = auto(path, "cluster.devices_per_node=4", "device=cuda", f"device_memory_bytes={40 * 2**30}")
    assert [warning.code for warning in ranking.warnings][0] == "X002"
    assert "A100 40GB" in ranking.warnings[0].what
    require_accepted(ranking)
    unknown = auto(path, "device=cpu")
    assert unknown.chosen is not None and unknown.chosen.batch == settings_of(path).batch
    assert "does not ask whether it fits" in unknown.warnings[0].what


def test_the_command_prints_writes_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    public(tmp_path, "Qwen2.5-7B")
    (tmp_path / "run.yaml").write_text(
        "run_dir: r\nmodel: {path: Qwen2.5-7B}\ndata: {train: {reasoning_gym: basic_arithmetic}}\nplacement: auto\n"
    )
    eight = ["--devices-per-node", "8", "--device-kind", "h100"]
    assert main(["plan", "run.yaml", *eight, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["auto"]
    assert data["chosen"] == data["ranking"][0]["change"] and data["complete"]
    assert main(["plan", "run.yaml", "--auto", *eight, "--write", "out.yaml"]) == 0
    out = capsys.readouterr().out
    for words in (
        "placements, by the time of a step",
        "the fastest: ",
        "waits",
        "refused",
        "chosen: ",
        "not divisible",
    ):
        assert words in out
    assert "auto" not in [line.partition(":")[0].strip() for line in (tmp_path / "out.yaml").read_text().splitlines()]
    assert main(["plan", "out.yaml", "--json"]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["step"]["value"] == pytest.approx(data["ranking"][0]["step_s"], rel=1e-4)
    assert main(["plan", "run.yaml", "--auto", "--kind", "sft"]) == 2
    assert main(["plan", "run.yaml", "--write", "again.yaml"]) == 2
    assert "--write goes with --verl or --auto" in capsys.readouterr().err


def test_eight_devices_and_four_thousand_are_searched_in_seconds(tmp_path: Path) -> None:
    path = public(tmp_path, "Llama-3.1-70B")
    for given, most_s in ((["cluster.nodes=1"], 40), (["cluster.nodes=512", "batch.prompts_per_step=2048"], 150)):
        started = time.process_time()
        ranking = auto(path, "cluster.devices_per_node=8", "cluster.device=h100", VLLM, "algorithm.kl=loss", *given)
        assert time.process_time() - started < most_s
    require_accepted(ranking)


def test_a_run_trains_with_the_placement_that_it_chose(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    settings = train_settings(
        inputs,
        tmp_path / "run",
        "placement=auto",
        "batch.steps=1",
        "data.validation=null",
        "checkpoint.asynchronous=false",
    )
    assert run_training(settings, resume=False) == 0
    saved = load_settings(TrainSettings, tmp_path / "run" / "settings.yaml")
    assert not saved.placement.auto and saved.batch == settings.batch
    more = train_settings(
        inputs,
        tmp_path / "run",
        "placement=auto",
        "batch.steps=2",
        "data.validation=null",
        "checkpoint.asynchronous=false",
    )
    assert run_training(more, resume=True) == 0
