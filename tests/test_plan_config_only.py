"""Plans of a model of which only config.json is there."""

import json
from pathlib import Path

import pytest

from meshloom.cli import main
from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.plan import Plan, build_plan
from meshloom.plan.model_folder import read_model_folder
from tests.models import CONFIGS, tiny_model
from tests.test_plan_outlook import DATA, PUBLIC, public


def bare(path: Path, config: dict) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def plan(path: Path, *given: str) -> Plan:
    return build_plan(load_settings(TrainSettings, None, [*DATA, f"model.path={path}", *given]), 1000)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B", "gemma-3-1b", "DeepSeek-V3"])
def test_a_plan_without_weights_is_that_with_them_and_says_so(tmp_path: Path, name: str) -> None:
    eight = ("cluster.devices_per_node=8", "cluster.device=h200", "cluster.nodes=16", "batch.prompts_per_step=512")
    without, whole = plan(bare(tmp_path / "bare", PUBLIC[name]), *eight), plan(public(tmp_path, name), *eight)
    (note,) = [warning for warning in without.warnings if warning.code == "M009"]
    assert "config.json alone" in note.what
    assert [warning for warning in without.warnings if warning is not note] == list(whole.warnings)
    assert [(line.name, line.value) for line in without.lines] == [(line.name, line.value) for line in whole.lines]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_family_is_planned_from_its_config(tmp_path: Path, name: str) -> None:
    found = plan(bare(tmp_path / "m", PUBLIC[name]), "cluster.devices_per_node=8", "cluster.device=h200")
    assert "M002" not in [warning.code for warning in found.warnings]
    assert {line.section for line in found.lines} >= {"time"}


@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_attach_to_the_same_layers_as_with_weights(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    whole = read_model_folder(tmp_path / "whole")
    without = read_model_folder(bare(tmp_path / "bare", config), needs_weights=False)
    assert without.num_parameters == whole.num_parameters
    for targets in (("all-linear",), ("q_proj", "down_proj")):
        shapes = [{name: tensor.shape for name, tensor in it.linear_layers(targets).items()} for it in (whole, without)]
        assert shapes[0] == shapes[1]


def test_one_device_and_supervised_runs_are_planned_too(tmp_path: Path) -> None:
    path, whole = bare(tmp_path / "m", PUBLIC["Qwen2.5-1.5B"]), public(tmp_path, "Qwen2.5-1.5B")
    for kind in (TrainSettings, SftSettings):
        given = ["run_dir=r", "data.train.reasoning_gym=basic_arithmetic", "device=cuda"]
        found, other = (build_plan(load_settings(kind, None, [*given, f"model.path={it}"]), 9) for it in (path, whole))
        assert found.value("peak while updating") == other.value("peak while updating")
        (line,) = (line for line in found.lines if line.name == "parameters")
        assert line.formula == "counted by config.json"


def test_training_refuses_what_has_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = bare(tmp_path / "m", PUBLIC["Qwen2.5-0.5B"])
    given = [f"model.path={path}", *DATA]
    assert main(["plan", "--kind", "train", *given]) == 0
    for more in ([], ["placement=auto"]):
        capsys.readouterr()
        assert main(["train", *given, *more]) == 2
        assert "has no weights: model.safetensors is missing" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_what_is_neither_weights_nor_a_known_config_is_refused(tmp_path: Path) -> None:
    path = bare(tmp_path / "m", {"model_type": "unheard_of"})
    with pytest.raises(UserError, match="no weights.*\n.*\n.*cannot be counted by config.json either"):
        read_model_folder(path, needs_weights=False)
    (path / "config.json").write_text(json.dumps(PUBLIC["Qwen2.5-0.5B"]))
    (path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(UserError, match="pickle"):
        read_model_folder(path, needs_weights=False)
