"""Bad input through the real command: one clear error, exit code 2, and not a byte written anywhere."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from meshloom.cli import main
from meshloom.observe.records import read_metrics
from meshloom.observe.run_folder import read_settings, read_status
from tests.lesson_runs import command, sft_settings, train_settings, write_inputs, write_model, write_rows

Tree = dict[str, str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, and a run of two steps in ``run``."""
    folder = write_inputs(tmp_path_factory.mktemp("finished"))
    assert main(command(train_settings(folder, folder / "run", "batch.steps=2"))) == 0
    return folder


@pytest.fixture
def inputs(finished: Path, tmp_path: Path) -> Path:
    """A copy of the inputs, to be damaged; without the run."""
    for entry in ("model", "train.jsonl", "held_out.jsonl", "reward.py"):
        source = finished / entry
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / entry)
    return tmp_path


@pytest.fixture
def run(finished: Path, inputs: Path) -> Path:
    """A copy of the inputs with the run, whose settings name the copy."""
    shutil.copytree(finished / "run", inputs / "run")
    settings = inputs / "run" / "settings.yaml"
    settings.write_text(settings.read_text().replace(str(finished), str(inputs)))
    return inputs


def tree(folder: Path) -> Tree:
    """Every file and folder, with what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def refused(args: list[str], folder: Path, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command must end with 2, say all of this in one error without a traceback, and leave the folder as it was."""
    before = tree(folder)
    children = psutil.Process().children(recursive=True)
    capsys.readouterr()
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    if "its last lines" not in captured.err:
        assert captured.err.count("error: ") == 1
        assert "Traceback" not in captured.err
    for text in said:
        assert text in captured.err, captured.err
    assert captured.out == ""
    assert tree(folder) == before
    assert psutil.Process().children(recursive=True) == children


def take_out(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / "model" / name).unlink()

    return change


def pickled(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, folder / "model" / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def other_family(folder: Path) -> None:
    config = folder / "model" / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"nosuch"'))


def no_template(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    write_model(folder / "model", template=None)


def missing_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model" / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})


MODEL = {
    "no folder": (lambda folder: shutil.rmtree(folder / "model"), ["there is no model folder", "model.path"]),
    "no config": (take_out("config.json"), ["has no config.json", "model.path", "it holds: "]),
    "no weights": (take_out("model.safetensors"), ["has no weights", "model.path"]),
    "no tokenizer": (
        take_out("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        ["has no tokenizer", "tokenizer.json"],
    ),
    "half a tokenizer": (take_out("tokenizer.json"), ["the tokenizer in", "model.path"]),
    "no template": (no_template, ["the tokenizer has no chat template", "row 0", "chat_template.jinja"]),
    "pickle": (pickled, ["pytorch_model.bin is a pickle, not safetensors", "runs code", "save_pretrained"]),
    "another tokenizer": (
        lambda folder: (shutil.rmtree(folder / "model"), write_model(folder / "model", lacking=30)),
        ["the tokenizer gives token", "model.path", "use the tokenizer the model was made with"],
    ),
    "cut off": (cut_off, ["model.safetensors is cut off"]),
    "unknown family": (other_family, ["nosuch", "model.path"]),
    "a weight missing": (missing_weight, ["weights are missing", "model.norm.weight"]),
}


@pytest.mark.parametrize("case", MODEL)
def test_a_model_that_cannot_be_used(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = MODEL[case]
    change(inputs)
    args = command(train_settings(inputs, inputs / "new"))
    refused(args, inputs, said, capsys)


DATA = {
    "missing": (
        lambda file: file.unlink(),
        [],
        ["the data file does not exist", "train.jsonl", "there are: held_out.jsonl"],
    ),
    "empty": (lambda file: file.write_text(""), [], ["the data file is empty", "train.jsonl"]),
    "blank": (lambda file: file.write_text("\n\n"), [], ["the data file has no rows", "train.jsonl"]),
    "no JSON": (lambda file: file.write_text('{"prompt": "a", "answer": "b"}\n{"pro'), [], ["not JSON", "line 2"]),
    "no Parquet": (
        lambda file: file.with_name("rows.parquet").write_bytes(b"PAR1junk"),
        ["data.train.files=[{inputs}/rows.parquet]"],
        ["the Parquet file cannot be read", "rows.parquet"],
    ),
    "no prompt column": (
        lambda file: file.write_text('{"question": "a", "answer": "b"}\n'),
        [],
        ["there is no column 'prompt'", "the columns there are: answer, question", "data.prompt_column"],
    ),
    "no answer column": (
        lambda file: file.write_text('{"prompt": "a", "solution": "b"}\n'),
        [],
        ["there is no column 'answer'", "solution", "data.answer_column"],
    ),
    "long prompt": (
        lambda file: file.write_text(file.read_text() + json.dumps({"prompt": "1" * 99, "answer": "1"}) + "\n"),
        [],
        ["the prompt of row 14 has", "data.max_prompt_tokens=64", "overlong_prompts=drop"],
    ),
    "only long prompts": (
        lambda file: None,
        ["data.max_prompt_tokens=3", "data.overlong_prompts=drop"],
        ["no prompt is left", "all 14 prompts"],
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_used(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, overrides, said = DATA[case]
    change(inputs / "train.jsonl")
    changes = [override.format(inputs=inputs) for override in overrides]
    refused(command(train_settings(inputs, inputs / "new", *changes)), inputs, said, capsys)


def test_overlong_prompts_may_be_dropped_and_are_counted(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Supervised runs and evaluations dropped them without a word."""
    for name in ("train.jsonl", "held_out.jsonl"):
        row = json.dumps({"prompt": "1" * 99, "answer": "1", "response": "1"})
        (inputs / name).write_text((inputs / name).read_text() + row + "\n")
    drop = "data.overlong_prompts=drop"
    assert main(command(train_settings(inputs, inputs / "rl", drop, "batch.steps=1"))) == 0
    assert "2 prompts longer than data.max_prompt_tokens were dropped" in capsys.readouterr().out
    assert main(command(sft_settings(inputs, inputs / "sft", drop, "batch.steps=1"))) == 0
    assert "1 prompts longer than data.max_prompt_tokens were dropped" in capsys.readouterr().out
    evaluation = [
        *("eval", f"run_dir={inputs / 'eval'}", f"model.path={inputs / 'model'}", drop, "device=cpu"),
        *(f"data.train.files=[{inputs / 'held_out.jsonl'}]", "data.max_prompt_tokens=64"),
        *("reward.function=exact_match", "rollout.max_response_tokens=4"),
    ]
    assert main(evaluation) == 0
    assert "1 prompts longer than data.max_prompt_tokens were dropped" in capsys.readouterr().out


SETTINGS = {
    "unknown key": (["optimizer.learning_rate=1"], ["there is no key 'optimizer.learning_rate'", "optimizer.lr"]),
    "misspelt key": (["bach.steps=1"], ["there is no key", "did you mean batch"]),
    "wrong type": (["batch.steps=many"], ['batch.steps cannot be "many"', "expected: "]),
    "text for a number": (['batch.steps="6"'], ['batch.steps cannot be "6"']),
    "microbatch": (
        ["batch.tokens_per_microbatch=50"],
        ["a sample may have 72 tokens, a microbatch holds 50", "batch.tokens_per_microbatch=72"],
    ),
    "update": (
        ["batch.prompts_per_update=3"],
        ["batch.prompts_per_update (3) does not divide batch.prompts_per_step (4)", "batch.prompts_per_update=2 or 4"],
    ),
    "algorithm": (["algorithm.policy_loss=ppoo"], ["knows no 'ppoo'", "did you mean ppo?"]),
    "several": (
        ["batch.prompts_per_update=3", "algorithm.advantage=grop"],
        ["2 problems", "did you mean grpo?", "does not divide"],
    ),
    "device": (["device=cuda:9"], ["device cuda:9 is not there", "auto or cpu"]),
    "greedy": (["rollout.sampling.temperature=0"], ["training samples cannot be greedy"]),
    "adapters": (["model.lora.target_modules=[nosuch]"], ["no layer of the model is called 'nosuch'", "q_proj"]),
    "cache": (["rollout.kv_cache_bytes=1000"], ["does not fit the key-value cache", "rollout.kv_cache_bytes"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, said = SETTINGS[case]
    args = command(train_settings(inputs, inputs / "new"))
    refused([*args, *overrides], inputs, said, capsys)


SCORE = "\ndef score(request):\n    return 1\n"
REWARDS = {
    "no file": ("{inputs}/no.py:score", "", ["there is no file", "reward.function", "reward.py"]),
    "no function": ("{inputs}/reward.py:scor", None, ["no function or class 'scor'", "it has: score"]),
    "no name": ("{inputs}/reward.py", None, ["reward.function"]),
    "no verifier": ("exact_mach", None, ["there is no verifier 'exact_mach'", "did you mean exact_match?"]),
    "raises": (
        None,
        "import no_such_package" + SCORE,
        ["raises ModuleNotFoundError when it is imported", "no_such_package"],
    ),
    "syntax": (None, "def score(request):\n    return (\n", ["SyntaxError", "reward.py"]),
    "exits": (None, "raise SystemExit(3)" + SCORE, ["raises SystemExit"]),
    "dies": (None, "import os\nos._exit(3)" + SCORE, ["ends while it loads the function", "status 3"]),
    "signature": (
        None,
        "def score(text, gold):\n    return 1\n",
        ["cannot be called", "write it as def score(request"],
    ),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_that_cannot_be_used(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function, source, said = REWARDS[case]
    if source is not None:
        (inputs / "reward.py").write_text(source or (inputs / "reward.py").read_text())
    changes = [] if function is None else [f"reward.function={function.format(inputs=inputs)}"]
    refused(command(train_settings(inputs, inputs / "new", *changes)), inputs, said, capsys)


def test_a_logger_that_cannot_be_opened(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It used to be said after the run folder was made, which then was not empty for the next try."""
    train = command(train_settings(inputs, inputs / "new", "logging.loggers=[tensorbord]"))
    refused(train, inputs, ["there is no logger 'tensorbord'", "did you mean tensorboard?"], capsys)
    sft = command(sft_settings(inputs, inputs / "other", "logging.loggers=[tensorbord]"))
    refused(sft, inputs, ["did you mean tensorboard?"], capsys)


def test_no_reward_at_all(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = command(train_settings(inputs, inputs / "new", "reward.function=null"))
    refused(args, inputs, ["a reward function is needed", "reward.function"], capsys)


def test_a_folder_that_holds_something(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = command(train_settings(run, run / "run"))
    refused(args, run, ["the run folder is not empty", "checkpoints", "add --resume", "another run_dir"], capsys)


def test_a_folder_that_is_a_file(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = command(train_settings(inputs, inputs / "train.jsonl"))
    refused(args, inputs, ["the run folder is a file", "use another run_dir"], capsys)


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_folder_in_use(run: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    args = command(train_settings(run, run / "run"), *more)
    hold = "import sys, pathlib; from meshloom.observe.lock import FolderLock; lock = FolderLock(pathlib.Path(sys.argv[1])); "
    hold += "print(flush=True); sys.stdin.read()"
    python = [sys.executable, "-c", hold, str(run / "run")]
    holder = subprocess.Popen(python, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline()
        refused(args, run, [f"the run folder is in use by pid {holder.pid}", "wait until it ends"], capsys)
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_nothing_to_resume(inputs: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make = train_settings if kind == "train" else sft_settings
    args = command(make(inputs, inputs / "new"), "--resume")
    refused(args, inputs, ["there is no run to resume", "leave --resume out"], capsys)


def test_resume_with_settings_that_contradict_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = command(train_settings(run, run / "run", "batch.steps=2"), "--resume", "optimizer.lr=0.25", "seed=4")
    said = [
        "optimizer.lr: 0.005 in the checkpoint, 0.25 now (override optimizer.lr=0.25)",
        "seed: 3 in the checkpoint, 4",
    ]
    refused(args, run, said, capsys)


def test_without_a_checkpoint_nothing_is_decided_and_settings_may_change(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was stopped before its first checkpoint could only be resumed with its first settings."""
    shutil.rmtree(run / "run" / "checkpoints")
    (run / "run" / "status.json").unlink()  # which says that the run has finished
    assert main(["train", str(run / "run"), "--resume", "batch.steps=1", "optimizer.lr=0.25", "seed=4"]) == 0
    assert [record["step"] for record in read_metrics(run / "run") if record["kind"] == "train"] == [1]
    assert read_settings(run / "run")["seed"] == 4


def test_the_folder_of_a_run_is_enough_to_resume_it_where_it_is(run: Path) -> None:
    (run / "run").rename(run / "moved")
    assert main(["train", str(run / "moved"), "--resume", "batch.steps=3"]) == 0
    assert read_status(run / "moved")["step"] == 3
    assert not (run / "run").exists()


def test_resume_with_other_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The records after the checkpoint were dropped before this was found."""
    write_rows(run / "train.jsonl", 13)
    with (run / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"kind":"train","metrics":{},"time":0}\n')
    args = command(train_settings(run, run / "run", "batch.steps=9"), "--resume")
    refused(args, run, ["num_prompts", "14", "13", "resume with the same data"], capsys)


@pytest.mark.parametrize(
    "name", ["model/model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json"]
)
def test_resume_from_a_damaged_checkpoint(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "run" / "checkpoints" / "step-000002" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    args = command(train_settings(run, run / "run", "batch.steps=3"), "--resume")
    refused(args, run, [f"{name} is not what was written", str(file.parent), "remove", "an earlier checkpoint"], capsys)


def test_export_of_a_damaged_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that was named itself was copied without a look at it."""
    checkpoint = run / "run" / "checkpoints" / "step-000002"
    weights = checkpoint / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for source in (run / "run", checkpoint):
        refused(["export", str(source), str(run / "out")], run, ["model/model.safetensors is not what"], capsys)


def test_export_over_something(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["export", str(run / "run"), str(run / "model")], run, ["exists", "destination"], capsys)
    refused(["export", str(run / "model"), str(run / "out")], run, ["has no complete checkpoint"], capsys)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 16 MiB, which is less than what has to stay free."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("make", [train_settings, sft_settings])
def test_no_room_for_a_checkpoint(make, inputs: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = command(make(inputs, inputs / "new"))
    args += [f"run_dir={small_disk / 'runs' / 'a'}"]
    refused(
        args,
        inputs,
        ["there is no room for a checkpoint: it needs", "are free on that disk", "another run_dir"],
        capsys,
    )
