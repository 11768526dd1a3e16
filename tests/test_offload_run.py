"""Whole runs whose models leave the device between phases: the same run, less memory in the phases that do not need them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.errors import RunFault, UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.loop.residents import Residents, check_room, folder_of
from meshloom.loop.rl import RLStage
from meshloom.loop.train import run_training
from meshloom.observe.records import read_samples
from meshloom.plan.build import build_plan
from meshloom.plan.device_checks import lay_out
from meshloom.plan.forecast import count_roles
from meshloom.plan.parameters import count_parameters
from meshloom.plan.residency import Phase, Residency
from meshloom.plan.sharded_memory import model_holdings
from meshloom.plan.stays import Part, Stay, stays
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.residency import ResidentModel, _tensors
from tests.lesson_runs import (
    REWARD,
    assert_same_run,
    command,
    kill,
    start,
    train_settings,
    wait_until,
    whole_checkpoints,
    write_inputs,
)
from tests.models import CONFIGS, tiny_model

BRIEF = ("batch.steps=2", "validation.samples_per_prompt=1", "checkpoint.keep_last=1", "checkpoint.keep_best=0")
fetch = ResidentModel.fetch
EVERYTHING = {"actor.parameters", "actor.optimizer", "reference.parameters"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """A run that moves nothing."""
    assert run_training(train_settings(inputs, inputs / "whole", *BRIEF), resume=False) == 0
    return inputs / "whole"


def away(place: str) -> list[str]:
    return [f"offload.{name}={place}" for name in sorted(EVERYTHING)]


def boundaries(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "memory.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_run_that_moves_everything_is_the_run_that_moves_nothing(inputs: Path, whole: Path, place: str) -> None:
    run_dir = inputs / place
    assert run_training(train_settings(inputs, run_dir, *BRIEF, *away(place)), resume=False) == 0
    assert_same_run(whole, run_dir)
    assert not (run_dir / "offload").exists()
    lines = boundaries(run_dir)
    assert [(line["step"], line["phase"]) for line in lines] == [
        (0, "validate"),
        *((1, phase) for phase in ("generate", "log-prob", "update", "sync", "save")),
        *((2, phase) for phase in ("generate", "log-prob", "update", "sync", "validate", "save")),
    ]
    here = {
        phase: {name for name, at in line["at"].items() if at == "device"} for line in lines if (phase := line["phase"])
    }
    assert here == {
        # The engine samples from the actor's weights.
        "generate": {"actor.parameters"},
        "validate": {"actor.parameters"},
        "log-prob": {"actor.parameters", "reference.parameters"},
        "update": {"actor.parameters", "actor.optimizer"},
        "sync": {"actor.parameters"},
        "save": {"actor.parameters", "actor.optimizer"},
    }
    assert all(set(line["at"]) == EVERYTHING and line["resident_bytes"] > 0 for line in lines)
    assert {at for line in lines for at in line["at"].values()} == {"device", place}


def test_a_run_that_moves_nothing_says_so(whole: Path) -> None:
    assert {at for line in boundaries(whole) for at in line["at"].values()} == {"device"}


@pytest.mark.parametrize(
    "more", [["model.lora={rank: 2, dropout: 0.3}"], ["model.dtype=bfloat16", "algorithm.kl=none"]]
)
def test_adapters_and_masters_leave_too(inputs: Path, tmp_path: Path, more: list[str]) -> None:
    """With adapters the actor is its own reference, so its weights are there for log-probs."""
    for name, moved in (("here", []), ("away", away("host"))):
        settings = train_settings(inputs, tmp_path / name, *BRIEF, *more, *moved)
        assert run_training(settings, resume=False) == 0
    assert_same_run(tmp_path / "here", tmp_path / "away")


def test_a_killed_run_goes_on_and_leaves_no_file(inputs: Path, whole: Path, tmp_path: Path) -> None:
    """Files of the process that was killed are removed by the one that goes on."""
    nvme = tmp_path / "nvme"
    moved = (*away("disk"), f"offload.folder={nvme}")
    slow = train_settings(inputs, tmp_path / "killed", *BRIEF, *moved, f"reward.function={slow_reward(tmp_path)}:score")
    process = start(command(slow), tmp_path / "out")
    assert wait_until(lambda: whole_checkpoints(tmp_path / "killed"), process), (tmp_path / "out").read_text()
    assert kill(process)
    (left,) = nvme.iterdir()
    assert sorted(file.name for file in left.iterdir()) == ["actor.optimizer.0", "reference.parameters.0"]
    (left / "of an earlier process").write_text("")
    assert run_training(slow, resume=True) == 0
    assert_same_run(whole, tmp_path / "killed", only_last=True)
    assert list(nvme.iterdir()) == []
    found = [(line["step"], line["phase"]) for line in boundaries(tmp_path / "killed")]
    assert len([at for at in found if at == (2, "update")]) == 1


def slow_reward(folder: Path) -> Path:
    """The reward of the inputs, slow enough for a run to be killed between its checkpoints."""
    (folder / "reward.py").write_text(REWARD.replace("slow=0.0", "slow=0.1"))
    return folder / "reward.py"


def test_a_run_that_is_not_where_the_plan_has_it_stops(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update while the optimizer is away must not compute with nothing."""
    forgotten = RLStage.enter
    monkeypatch.setattr(RLStage, "enter", lambda self, phase: phase is Phase.UPDATE or forgotten(self, phase))
    settings = train_settings(inputs, tmp_path / "run", *BRIEF, "offload.actor.optimizer=host", "algorithm.kl=none")
    with pytest.raises(RunFault, match="the optimizer of the actor"):
        run_training(settings, resume=False)


def test_a_folder_that_cannot_be_used_is_told(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = train_settings(inputs, tmp_path / "run", *away("disk"), f"offload.folder={tmp_path / 'file'}")
    with pytest.raises(UserError, match=r"offload\.folder"):
        run_training(settings, resume=False)


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TrainedModel(
        tiny_model("qwen3"), load_settings(TrainSettings, None, [*DATA]).model, MicrobatchBound(9), None
    )
    stay = Stay(role="reference", part=Part.PARAMETERS, phases=(Phase.LOGPROB,), otherwise=Residency.DISK)
    check_room(tmp_path / "new" / "folder", [stay], {"reference": model})
    needed = sum(parameter.nbytes for parameter in model.module.parameters())
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2 * needed}))
    check_room(tmp_path / "new" / "folder", [stay], {"reference": model}, {"reference": 2})
    with pytest.raises(UserError, match="no room for what goes to disk"):
        check_room(tmp_path / "new" / "folder", [stay], {"reference": model}, {"reference": 3})
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="no room for what goes to disk"):
        check_room(tmp_path / "new" / "folder", [stay], {"reference": model})
    assert list(tmp_path.iterdir()) == []


DATA = ["run_dir=r", "model.path=m", "data.train.files=[x]", "reward.function=x"]


def test_the_folder_is_the_settings_then_verls_then_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(*changes: str) -> Path:
        return folder_of(load_settings(TrainSettings, None, [*DATA, "run_dir=/runs/a", *changes]))

    monkeypatch.delenv("VERL_OFFLOAD_DIR", raising=False)
    assert folder() == Path("/runs/a/offload")
    monkeypatch.setenv("VERL_OFFLOAD_DIR", "/nvme")
    assert folder().parent == Path("/nvme")
    assert folder() != folder("run_dir=/runs/b")
    assert folder("offload.folder=/other").parent == Path("/other")


def test_parts_are_where_the_memory_ledger_counts_them() -> None:
    model = count_parameters(CONFIGS["qwen3"]().to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    choices = {
        "devices": ["cluster.devices_per_node=1", "cluster.devices_per_node=2"],
        "engine": ["rollout.engine=torch", "rollout.engine=vllm"],
        "kl": ["algorithm.kl=none", "algorithm.kl=loss", "algorithm.kl=reward"],
        "lora": ["model.lora=null", "model.lora={rank: 2}"],
        "updates": ["batch.prompts_per_update=null", "batch.prompts_per_update=4"],
    }
    for chosen in itertools.product(*choices.values()):
        settings = load_settings(TrainSettings, None, [*DATA, *chosen, "batch.prompts_per_step=8", *away("host")])
        layout = lay_out(settings, None, 0).layout
        adapters = None if settings.model.lora is None else 1000
        roles = count_roles(settings, model, layout, recompute=False, adapters=adapters).models
        holdings = {(h.role, h.name): h.phases for role in roles.values() for h in model_holdings(role)}
        names = {Part.PARAMETERS: "weights", Part.OPTIMIZER: "optimizer moments"}
        for stay in stays(settings, layout):
            assert holdings[stay.role, names[stay.part]] == stay.phases, (chosen, stay)


def test_samples_of_a_file_may_need_the_actor_before_the_update() -> None:
    """Without log-probs in the file they are computed, and the weights were not there."""
    for changes, there in (((), False), (("rollout.from_samples=f",), True)):
        settings = load_settings(TrainSettings, None, [*DATA, *changes, "offload.actor.parameters=host"])
        (actor, _) = stays(settings, lay_out(settings, None, 0).layout)
        assert (actor.at(Phase.LOGPROB) is Residency.DEVICE) == there


def test_leaving_makes_room_before_others_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that take turns are never both on the device while they change places."""
    settings = load_settings(TrainSettings, None, [*DATA])
    models = {
        role: TrainedModel(tiny_model("qwen3"), settings.model, MicrobatchBound(9), None)
        for role in ("actor", "reference")
    }
    planned = [
        Stay(role="actor", part=Part.PARAMETERS, phases=(Phase.LOGPROB,), otherwise=Residency.HOST),
        Stay(role="reference", part=Part.PARAMETERS, phases=(Phase.UPDATE,), otherwise=Residency.HOST),
    ]

    def held(role: str) -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in models[role].module.parameters())

    both: list[int] = []
    monkeypatch.setattr(
        ResidentModel, "fetch", lambda self, part: (both.append(sum(map(held, models))), fetch(self, part))
    )
    residents = Residents(planned, models, folder=tmp_path, log=lambda record: None)
    whole = held("actor")
    for phase in (Phase.GENERATE, Phase.LOGPROB, Phase.UPDATE, Phase.LOGPROB):
        residents.enter(phase, step=1)
        residents.enter(phase, step=1)
    assert (held("actor"), held("reference")) == (whole, 0)
    assert both == [0, 0, 0]


def test_tensors_that_share_memory_across_parts_are_counted_once() -> None:
    """Float32 weights are their own masters: only moments are the optimizer's."""
    settings = load_settings(TrainSettings, None, [*DATA])
    model = TrainedModel(tiny_model("qwen2"), settings.model, MicrobatchBound(9), settings.optimizer)
    storages = [
        {tensor.untyped_storage().data_ptr() for _, tensor in _tensors(model, part)}
        for part in (Part.PARAMETERS, Part.OPTIMIZER)
    ]
    assert not storages[0] & storages[1]


def test_the_plan_of_one_device_shows_what_leaves_it_and_what_each_phase_holds(inputs: Path) -> None:
    given = train_settings(inputs, inputs / "planned", *away("host"))
    plan = build_plan(given, 8)
    plan.require()
    assert plan.value("actor: optimizer") == "host"
    assert {line.formula for line in plan.lines if line.name == "reference: parameters"} == {
        "on the device in log-prob; else on the host"
    }
    moments = plan.value("actor: optimizer moments")
    everything = build_plan(
        train_settings(inputs, inputs / "planned", *away("host"), "offload.actor.optimizer=none"), 8
    )
    assert everything.value("held in generate") == plan.value("held in generate") + moments
    assert build_plan(train_settings(inputs, inputs / "planned"), 8).outlook is None


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "disk"])
def test_on_many_devices_sharded_parts_leave_too(inputs: Path, tmp_path: Path, place: str) -> None:
    """Engines have copies, so the actor's weights leave while they generate; samples are those of one device."""
    brief = (*BRIEF, "checkpoint.every_steps=0", "validation.every_steps=0")
    for name, more in (("alone", ()), ("two", ("cluster.devices_per_node=2", *away(place)))):
        assert run_training(train_settings(inputs, tmp_path / name, *brief, *more), resume=False) == 0

    ids = [[s["response_ids"] for s in read_samples(tmp_path / name)] for name in ("alone", "two")]
    assert ids[0] == ids[1]
    lines = boundaries(tmp_path / "two")
    assert {line["at"]["actor.parameters"] for line in lines if line["phase"] == "generate"} == {place}
    assert not (tmp_path / "two" / "offload").exists()
