"""Constants of the cost model fitted to measured runs, and the file that carries them into a plan."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshloom.cli import main
from meshloom.config.errors import UserError
from meshloom.config.load import dump_yaml, load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.observe.measured_run import read_measured_run
from meshloom.plan.calibration import BESIDE, MeasuredRun, Seen, calibrate, compare
from meshloom.plan.constants import ASSUMED, NAMES, Cluster, Constants, bounds_of, unit_of
from meshloom.plan.constants_file import GivenConstants, constants_text, read_constants
from meshloom.plan.device_checks import lay_out
from meshloom.plan.forecast import Lengths
from meshloom.plan.hardware import find_device
from meshloom.plan.parameters import count_parameters
from tests.test_plan_outlook import PUBLIC, folder, public

TRUTH = Constants(
    training_matrix_share=0.55,
    weight_read_share=0.6,
    cache_read_share=0.4,
    decode_layer_s=70e-6,
    pass_layer_s=9e-3,
    update_start_s=0.05,
    beside_phases_s=0.2,
    copy_share=0.5,
)
GIVEN = ("device=cuda", "data.train.reasoning_gym=basic_arithmetic", "rollout.max_response_tokens=512", "run_dir=r")


def run_of(name: str, *given: str, truth: Constants = TRUTH, noise: float = 1.0) -> MeasuredRun:
    """A run of a public shape that took what the cost model says with other constants."""
    settings = load_settings(TrainSettings, None, [*GIVEN, f"model.path={name}", *given])
    device = find_device("H200")
    assert device is not None
    run = MeasuredRun(
        name=f"{name} {' '.join(given)}".strip(),
        settings=settings,
        model=count_parameters(PUBLIC[name]),
        adapters=None,
        layout=lay_out(settings, None, 1).layout,
        cluster=Cluster(device=device),
        recompute=False,
        lengths=Lengths(prompt=34, response=512, longest=512),
        parts={},
        step_s=0.0,
        steps=4,
    )
    seconds = {part: taken * noise for part, taken in run.predicted(truth).items()}
    return replace(
        run, parts={part: Seen(seconds=taken) for part, taken in seconds.items()}, step_s=sum(seconds.values())
    )


def ratios(run: MeasuredRun, constants: Constants) -> dict[str, float]:
    return {row.part: row.after / row.measured for row in compare(run, Constants(), constants) if row.measured}


def test_a_fit_to_one_size_predicts_the_others() -> None:
    """As a user does it: one run of 1.5B, then plans of 0.5B and 3B."""
    two_updates = "batch.prompts_per_update=32"
    # What the processor takes to launch kernels shows in runs of 0.5B alone, where kernels are shorter.
    truth = replace(TRUTH, pass_layer_s=Constants().pass_layer_s)
    found = calibrate([run_of("Qwen2.5-1.5B", two_updates, truth=truth)])
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"):
        run = run_of(name, two_updates, truth=truth)
        before, after = ratios(run, Constants()), ratios(run, found.constants)
        assert abs(before["step"] - 1) > 0.1
        assert after["step"] == pytest.approx(1, abs=0.1)
    assert after["generate"] == pytest.approx(1, abs=0.2) and after["update"] == pytest.approx(1, abs=0.1)


def test_runs_that_differ_tell_constants_apart() -> None:
    few = ("batch.prompts_per_step=2", "batch.samples_per_prompt=8")
    runs = [run_of(name, *more) for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B") for more in ((), few)]
    runs += [run_of("Qwen2.5-1.5B", "rollout.max_sequences=64", "batch.prompts_per_update=8")]
    found = calibrate(runs)
    for name in ("training_matrix_share", "weight_read_share", "cache_read_share", "decode_layer_s", "beside_phases_s"):
        assert getattr(found.constants, name) == pytest.approx(getattr(TRUTH, name), rel=0.1), name
        assert found.fitted[name] > 0.8
    for run in runs:
        assert ratios(run, found.constants)["step"] == pytest.approx(1, abs=0.02)
    assert found.unfitted["gather_share"] == "nothing that was measured depends on it"
    assert set(found.fitted) | set(found.unfitted) == set(NAMES)
    assert not set(found.fitted) & set(found.unfitted)
    assert all(getattr(found.constants, name) == getattr(Constants(), name) for name in found.unfitted)


def test_a_constant_stops_at_what_is_physically_possible() -> None:
    """A run that is ten times as fast as any of this device could be."""
    found = calibrate([run_of("Qwen2.5-7B", noise=0.1)])
    assert found.constants.training_matrix_share == 1.0
    assert "training_matrix_share" in found.at_bound
    for name in NAMES:
        least, most = bounds_of(name)
        assert least <= getattr(found.constants, name) <= most


def test_one_run_says_what_it_cannot_tell() -> None:
    found = calibrate([run_of("Qwen2.5-7B")])
    assert found.unfitted["host_share"] == "nothing that was measured depends on it"
    assert found.unfitted["prompt_matrix_share"].startswith("at most 0.")
    assert found.unfitted["attention_share"].startswith(("cannot be told apart", "at most"))
    apart = [why for why in found.unfitted.values() if why.startswith("cannot be told apart from ")]
    assert apart and all(why.split(":")[0].rpartition(" ")[2] in NAMES for why in apart)


def test_weights_that_are_copied_are_fitted_where_an_engine_has_its_own() -> None:
    # A copy takes milliseconds: only that of a large model can be told from the clock's own spread.
    found = calibrate([run_of("Qwen2.5-7B", "rollout.engine=vllm")])
    assert found.constants.copy_share == pytest.approx(TRUTH.copy_share, rel=0.25)


def write_run(folder: Path, model: Path, *given: str, seconds: Sequence[float] = (9.0, 1.0, 1.1, 1.2)) -> Path:
    """The folder of a run whose updates took so long, with a validation and a checkpoint between steps."""
    settings = load_settings(TrainSettings, None, [*GIVEN, f"run_dir={folder}", f"model.path={model}", *given])
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(dump_yaml(settings))
    plan = {"recompute": False, "lines": [], "machine": {"type": "cuda", "name": "NVIDIA H200"}}
    (folder / "plan.json").write_text(json.dumps(plan))
    now, records = 1000.0, []
    for step, update in enumerate(seconds, 1):
        phases = {"generate": 2.0, "score": 0.1, "update": update, "sync": 0.001}
        phases |= {"save": 50.0} if step == 3 else {}
        now += sum(phases.values()) + 0.2
        metrics = {"prompt_tokens_mean": 34.0, "response_tokens_mean": 500.0, "response_tokens_max": 512.0}
        records.append({"step": step, "kind": "train", "metrics": metrics, "phases": phases, "time": now})
        if step == 2:
            now += 30.0
            records.append({"step": 2, "kind": "validation", "metrics": {}, "phases": {"validate": 29.0}, "time": now})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_runs_folder_is_read_as_medians_of_its_steps(tmp_path: Path) -> None:
    """The first step, validations and checkpoints do not count; waiting for rewards counts beside the phases."""
    run = read_measured_run(write_run(tmp_path / "a", public(tmp_path, "Qwen2.5-1.5B")))
    assert run.steps == 3 and run.name == "a"
    assert run.parts["update"].seconds == pytest.approx(1.1)
    assert run.parts["update"].spread == pytest.approx(1.4826 * 0.1 / 1.1 / 3**0.5)
    assert run.parts[BESIDE].seconds == pytest.approx(0.3)
    assert run.step_s == pytest.approx(2 + 0.1 + 1.1 + 0.001 + 0.2)
    assert set(run.parts) == {"generate", "update", "sync", BESIDE}
    assert run.lengths == Lengths(prompt=34.0, response=500.0, longest=512)
    assert run.cluster.device.name == "H200"


def test_a_supervised_run_fits_what_updates_depend_on(tmp_path: Path) -> None:
    """A folder whose updates took twice what the plan says of them, at the lengths that its samples had."""
    run = write_run(tmp_path / "a", public(tmp_path, "Qwen2.5-7B"))
    given = [*GIVEN[:2], f"run_dir={run}", f"model.path={tmp_path / 'Qwen2.5-7B'}", "offload.actor.optimizer=host"]
    (run / "settings.yaml").write_text(dump_yaml(load_settings(SftSettings, None, given)))
    said = read_measured_run(run).predicted(Constants())
    assert {name for name, seconds in said.items() if seconds} == {"update", BESIDE}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record |= {
            "kind": "sft",
            "phases": {"update": 2 * said["update"]},
            "time": number * (2 * said["update"] + 0.06),
        }
        record["metrics"] |= {"prompt_tokens_mean": 34.0, "response_tokens_mean": 500.0, "response_tokens_max": 512.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    measured = read_measured_run(run)
    assert measured.lengths == Lengths(prompt=34.0, response=500.0, longest=512)
    found = calibrate([measured])
    assert ratios(measured, Constants())["update"] == pytest.approx(0.5)
    assert ratios(measured, found.constants)["update"] == pytest.approx(1, abs=0.05)
    assert "host_share" in found.fitted and found.constants.host_share < Constants().host_share


def test_the_command_writes_constants_that_a_plan_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = public(tmp_path, "Qwen2.5-1.5B")
    write_run(tmp_path / "a", model)
    write_run(tmp_path / "b", public(tmp_path, "Qwen2.5-0.5B"), seconds=(5.0, 0.4, 0.4))
    assert main(["calibrate", "a", "b", "--write", "constants.yaml"]) == 0
    out = capsys.readouterr().out
    assert "a: 3 steps on H200, prompts of 34 tokens, responses of 500, the longest 512" in out
    for words in ("update", BESIDE, "training_matrix_share", "nothing that was measured depends on it"):
        assert words in out
    written = read_constants("constants.yaml")
    assert written.device == "H200" and "training_matrix_share" in written.origins
    plan = ["plan", "b", "--device-kind", "h200", "--json"]
    answers = []
    for more in ([], ["--constants", "constants.yaml"]):
        assert main([*plan, *more]) == 0
        lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
        answers.append(lines)
    assert answers[0]["step"]["value"] != answers[1]["step"]["value"]
    assert answers[1]["training matrix share"]["value"] == written.constants.training_matrix_share
    assert answers[1]["training matrix share"]["formula"] == "fitted to a, b: 5 steps on H200"
    assert answers[0]["training matrix share"]["formula"] == "fitted to one H200"
    assert answers[1]["network share"]["formula"] == "assumed"
    assert main(["calibrate", "a", "--write", "constants.yaml"]) == 2
    assert "there is a file constants.yaml already" in capsys.readouterr().err
    assert main(["calibrate", "a", "--json", "--constants", "constants.yaml"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in found["compared"]} == {"generate", "update", "sync", BESIDE, "step"}
    assert found["left_out"] == {"sync of a": "by the cost model there is nothing to do in it"}


def test_the_documents_have_each_constant_as_it_is() -> None:
    text = (Path(__file__).parents[1] / "docs" / "cost-model.md").read_text(encoding="utf-8")
    for name in NAMES:
        how = "assumed" if name in ASSUMED else ""
        assert f"| `{name}` | {getattr(Constants(), name):.4g} | {unit_of(name)} | {how} |" in text


@pytest.mark.parametrize("fault", ["nothing", "eval", "one step", "no device", "no model"])
def test_what_cannot_be_calibrated_is_refused(tmp_path: Path, fault: str) -> None:
    model = public(tmp_path, "Qwen2.5-1.5B")
    run = tmp_path / "a"
    if fault == "nothing":
        run.mkdir()
        words = "is no run folder: it has no settings.yaml"
    else:
        write_run(
            run, tmp_path / "gone" if fault == "no model" else model, seconds=(1.0, 1.0)[: 1 + (fault != "one step")]
        )
        words = "there is no model folder"
    if fault == "eval":
        given = ["run_dir=r", f"model.path={model}", "data.train.files=a.jsonl"]
        (run / "settings.yaml").write_text(dump_yaml(load_settings(EvalSettings, None, given)))
        words = "is no run of `meshloom train`"
    elif fault == "one step":
        words = "has no step to be measured"
    elif fault == "no device":
        (run / "plan.json").unlink()
        words = "does not say what its devices were"
    with pytest.raises(UserError, match=words):
        read_measured_run(run)


def test_constants_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    origins = {name: "fitted to a" for name in NAMES if name != "hidden_part"}
    (tmp_path / "c.yaml").write_text(constants_text(GivenConstants(constants=TRUTH, origins=origins, device="H200")))
    found = read_constants(tmp_path / "c.yaml")
    assert found.origins == origins and found.device == "H200"
    for name in NAMES:
        assert getattr(found.constants, name) == pytest.approx(getattr(TRUTH, name), rel=1e-5)
        assert (f"unit: {unit_of(name)}" in (tmp_path / "c.yaml").read_text()) is (unit_of(name) != "of a pass")
    (tmp_path / "d.yaml").write_text("constants: {decode_layer_s: 5e-5}\n")
    short = read_constants(tmp_path / "d.yaml")
    assert short.constants == replace(Constants(), decode_layer_s=5e-5)
    assert short.origins == {"decode_layer_s": f"{tmp_path / 'd.yaml'}:1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("constants: {decode_layers_s: 1e-5}", "did you mean decode_layer_s"),
        ("constants: {memory_share: 1.2}", "a number from 1e-09 to 1 (of the bandwidth)"),
        ("constants: {memory_share: much}", "memory_share cannot be 'much'"),
        ("constants: {memory_share: {value: 0.5, units: x}}", "has no key 'units'"),
        ("memory_share: 0.5", "has no group 'constants'"),
        ("constants: {}\nkind: h200", "there is no key 'kind'"),
        ("constants: {a: 1", "this is not YAML"),
    ],
)
def test_a_wrong_file_of_constants_is_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as told:
        read_constants(tmp_path / "c.yaml")
    assert words in str(told.value) and "c.yaml:" in str(told.value)


def codes(capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    main(["plan", "run.yaml", "--json", *more])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    given = [each["code"] for each in (*found["problems"], *found["warnings"])]
    return [code for code in given if code != "D007"]  # the folder has weights alone, no tokenizer


def test_a_plan_refuses_constants_that_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "m", PUBLIC["Qwen2.5-1.5B"], count_parameters(PUBLIC["Qwen2.5-1.5B"]).total)
    settings = load_settings(TrainSettings, None, [*GIVEN, "model.path=m"])
    Path("run.yaml").write_text(dump_yaml(settings))
    Path("c.yaml").write_text("device: h100\nconstants: {memory_share: 0.5}\n")
    assert codes(capsys, "--device-kind", "h200", "--constants", "nothing.yaml") == ["T006"]
    assert codes(capsys, "--device-kind", "h200", "--constants", "c.yaml") == ["T007"]
    assert codes(capsys, "--device-kind", "h100", "--constants", "c.yaml") == []
    assert codes(capsys, "--constants", "c.yaml") == ["T007"]
