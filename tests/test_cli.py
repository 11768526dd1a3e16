"""The command line: parsing, exit codes, and what happens without torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import meshloom
from meshloom.cli import main

HEAVY = "sorted({'torch', 'transformers', 'numpy', 'pyarrow', 'peft'} & set(sys.modules))"
SETTINGS = """\
run_dir: runs/a
model:
  path: nowhere
data:
  train:
    files: [rows.jsonl]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SETTINGS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n\n' * 10)
    return tmp_path


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "meshloom", *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 0
    out = capsys.readouterr().out
    for name in (
        "train",
        "sft",
        "eval",
        "rollout",
        "export",
        "fetch-model",
        "quickstart",
        "plan",
        "doctor",
        "schema",
        "report",
    ):
        assert f"meshloom {name} " in out


@pytest.mark.parametrize(
    "name", ["train", "sft", "eval", "export", "fetch-model", "quickstart", "plan", "doctor", "schema", "report"]
)
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: meshloom {name}" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshloom {meshloom.__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["trian"], "did you mean train?"),
        (["zzz"], "commands: quickstart, plan, train"),
        (["train"], "the following arguments are required"),
        (["train", "run.yaml", "--resum"], "unrecognized arguments: --resum"),
        (["train", "run.yaml", "--optimizer.lr=1"], "overrides have the form a.b=c, without dashes"),
        (["train", "run.yaml", "--steps", "3"], "overrides have the form a.b=c, without dashes; usage: meshloom train"),
        (["train", "run.yaml", "other.yaml"], "more than one settings file: run.yaml, other.yaml"),
        (["train", "rum.yaml"], "files nearby: run.yaml"),
        (["train", "run.yaml", "lr=1"], "did you mean optimizer.lr or critic.optimizer.lr?"),
        (["train", "run.yaml", "--resume", "optimizer.lr=fast"], "a number ≥ 0"),
        (["sft", "run.yaml", "rollout.stop=[a]"], "there is no key 'rollout'"),
        (["eval", "run.yaml", "batch.steps=1"], "there is no key 'batch'"),
        (["schema", "trian"], "invalid choice: 'trian'"),
        (["export", "a", "b", "--adapter", "--merge-lora"], "not allowed with argument"),
        (["quickstart", "--seed", "x"], "invalid int value: 'x'"),
        (["report", "no-such-run"], "no-such-run"),
    ],
)
def test_bad_input_is_told_without_a_traceback_and_ends_with_2(
    args: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert sorted(folder.rglob("*")) == before


def test_overrides_may_stand_around_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "batch.steps=3", "--json", "batch.prompts_per_step=5"]) == 2
    values = {line["name"]: line["value"] for line in json.loads(capsys.readouterr().out)["lines"]}
    assert (values["steps"], values["prompts per step"]) == (3, 5)


def test_a_settings_file_may_have_an_equals_sign_in_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").rename(folder / "lr=1.yaml")
    assert main(["plan", "lr=1.yaml", "--json"]) == 2
    assert '"lines"' in capsys.readouterr().out


def test_overrides_alone_are_settings_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run_dir=r", "model.path=m", "data.train.files=[rows.jsonl]", "--json"]) == 2
    assert '"M001"' in capsys.readouterr().out


def test_the_plan_counts_the_rows_and_says_what_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "batch.prompts_per_step=4"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "prompts of the data 10 prompts" in out
    assert "steps 3 steps" in out
    assert "[M001] there is no model folder nowhere" in out


def test_a_plan_that_can_work_ends_with_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.test_plan_memory import make_folder

    make_folder(folder / "nowhere")
    with (folder / "run.yaml").open("a") as file:
        file.write("reward: {function: exact_match}\n")
    assert main(["plan", "run.yaml", "batch.prompts_per_step=4", "--settings"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert 'model.path "nowhere" run.yaml:3' in out
    assert "optimizer.lr 1e-06 default" in out
    assert "peak while updating" in out
    assert "Problems" not in out
    assert main(["plan", "run.yaml", "--kind", "eval"]) == 0
    (folder / "run.yaml").write_text(SETTINGS)
    assert main(["plan", "run.yaml", "--kind", "sft", "data.response_column=answer"]) == 0


@pytest.mark.parametrize("kind", ["train", "sft", "eval"])
def test_the_schema_is_json(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", kind]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == f"{kind.capitalize()}Settings"


def test_parquet_rows_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 7}), folder / "rows.parquet")
    args = ["plan", "run.yaml", "data.train.files=[rows.parquet, rows.jsonl]", "--json"]
    counts = []
    for more in ([], ["data.train.max_rows=12"], ["data.train.files=[no.parquet]"]):
        main([*args, *more])
        counts.append(counted(capsys))
    assert counts == [17, 12, None]
    (folder / "rows.parquet").write_bytes(b"PAR1")
    main(args)
    assert counted(capsys) is None


def counted(capsys: pytest.CaptureFixture[str]) -> int | None:
    lines = json.loads(capsys.readouterr().out)["lines"]
    return next(line["value"] for line in lines if line["name"] == "prompts of the data")


def test_ctrl_c_ends_with_130(folder: Path) -> None:
    os.mkfifo(folder / "slow.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "meshloom", "train", "slow.yaml"], stderr=subprocess.PIPE, text=True
    )
    try:
        writer = os.open(folder / "slow.yaml", os.O_WRONLY)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        os.close(writer)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "stopped\n")


def test_ctrl_c_ends_a_process_that_still_loads() -> None:
    """Within an import of PyTorch the exception used to abort it: `terminate called after throwing …`."""
    source = "import time\nfrom meshloom.loading import loading\nwith loading():\n    print(flush=True)\n    time.sleep(600)\n"
    terminal, its_end = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=its_end, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert os.read(terminal, 1000).split() == [b"loading", b"PyTorch", b"stopped"]
    finally:
        process.kill()
        os.close(terminal)
        os.close(its_end)


def test_the_module_is_the_command() -> None:
    assert command("--version").stdout == f"meshloom {meshloom.__version__}\n"
    refused = command("train", "rum.yaml")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "args",
    [["--help"], ["schema"], ["train", "run.yaml", "lr=1"], ["plan", "run.yaml"]],
)
def test_what_needs_no_model_imports_nothing_heavy_and_is_quick(args: list[str]) -> None:
    """Modules are counted, because seconds are the machine's: those of pydantic alone are 150, of torch 1,500 more."""
    code = (
        f"import sys; from meshloom.cli import main; main({args!r}); print(len(sys.modules), {HEAVY}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, heavy = done.stderr.splitlines()[-1].split(" ", 1)
    assert heavy == "[]"
    assert int(modules) < 500


def test_output_without_unicode_ends_nothing() -> None:
    """A dash in a table used to end a run where the locale has none."""
    plain = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for args in (["--help"], ["plan", "run.yaml"]):
        told = subprocess.run([sys.executable, "-m", "meshloom", *args], capture_output=True, timeout=60, env=plain)
        assert told.returncode in (0, 2)
        assert b"?" in told.stdout and b"Traceback" not in told.stderr


def test_a_reader_that_has_gone_is_no_fault() -> None:
    """``meshloom schema | head`` used to end in a traceback."""
    read, write = os.pipe()
    os.close(read)
    told = subprocess.run(
        [sys.executable, "-m", "meshloom", "schema"], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (told.returncode, told.stderr) == (1, b"")


def test_a_full_disk_of_the_output_itself_keeps_the_exit_code() -> None:
    """What was told could not be written either, and that it could not was the end."""
    with open("/dev/full", "w") as full:
        told = subprocess.run([sys.executable, "-m", "meshloom", "schema"], stdout=full, stderr=full, timeout=300)
    assert told.returncode == 3


@pytest.mark.parametrize("library", [False, True])
def test_a_full_disk_is_told_without_a_traceback(
    library: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full refuses every write as a full disk does. A library in Rust raises no ``OSError``."""
    from meshloom import cli

    def write(args: object) -> int:
        if library:
            Tokenizer(WordLevel({"a": 0}, unk_token="a")).save("/dev/full")
        with open("/dev/full", "w") as file:
            file.write("x")
        return 0

    monkeypatch.setitem(cli._COMMANDS, "schema", ("", lambda parser: None, write))
    assert main(["schema"]) == 3
    assert "the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        (["batch.samples_per_update=2"], "sft"),
        (["batch.steps=3", "data.max_response_tokens=9"], "sft"),
        (["batch.steps=3"], "train"),
        (["algorithm.kl=loss"], "train"),
        (["rollout.max_response_tokens=9", "optimizer.lr=1e-5"], "train"),
        (["validation.samples_per_prompt=2"], "eval"),
        (["batch.samples_per_update=2", "--kind", "train"], "train"),
    ],
)
def test_a_plan_tells_the_kind_of_a_file_by_its_keys(
    more: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan of a supervised run advised to rename its keys to those of reinforcement learning."""
    main(["plan", "run.yaml", *more, "--json"])
    told = capsys.readouterr()
    if "--kind" in more:
        assert "there is no key 'batch.samples_per_update'" in told.err
    else:
        assert json.loads(told.out)["title"] == f"{kind} runs/a"


def test_a_plan_that_is_piped_breaks_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines used to be broken after 80 columns."""
    main(["plan", "run.yaml", "batch.steps=3", "--settings"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("never changes the result") and line.startswith("microbatches") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_the_folder_of_a_run_stands_for_its_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "."]) == 2
    assert "it has no settings.yaml" in capsys.readouterr().err
    (folder / "run.yaml").rename(folder / "settings.yaml")
    assert main(["plan", ".", "batch.steps=3", "--json"]) == 2
    assert '"M001"' in capsys.readouterr().out
    assert main(["train", ".", "--resume"]) == 2
    assert "there is no model folder nowhere" in capsys.readouterr().err


def test_an_override_longer_than_a_file_name_may_be_is_an_override(tmp_path: Path, capsys) -> None:
    """Asking the disk whether it is a file was an error of the system."""
    files = ",".join(f"{i:040d}.jsonl" for i in range(20))
    assert main(["plan", f"run_dir={tmp_path / 'run'}", "model.path=none", f"data.train.files=[{files}]"]) == 2
    assert f"{0:040d}.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "keys", "meant"), [
    ("train", "batch: {samples_per_update: 8}", "sft"),
    ("sft", "algorithm: {clip_high: 0.3}", "train"),
    ("eval", "optimizer: {lr: 1.0e-5}", "train"),
])  # fmt: skip
def test_a_file_of_another_command_is_told_as_such(tmp_path: Path, capsys, command: str, keys: str, meant: str) -> None:
    """Each key was told as unknown, with a guess at another."""
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: x\nmodel: {{path: m}}\ndata: {{train: {{files: [a.jsonl]}}}}\n{keys}\n")
    assert main([command, str(file)]) == 2
    told = capsys.readouterr()
    assert f"keys of `meshloom {meant}`, not of `meshloom {command}`" in " ".join((told.out + told.err).split())
