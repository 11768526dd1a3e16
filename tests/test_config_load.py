"""Reading settings: what wins, what is refused, and how it is said."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshloom.config import yaml_text
from meshloom.config.errors import UserError
from meshloom.config.load import dump_yaml, explain, load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings

REQUIRED = ["run_dir=runs/a", "model.path=models/a", "data.train.files=[a.jsonl]"]

FILE = """\
run_dir: runs/a
model:
  path: models/a
data:
  train:
    files: [a.jsonl]
optimizer:
  lr: 1e-5
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(kind: type, file: Path | None, overrides: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        load_settings(kind, file, overrides)
    return str(caught.value)


def test_an_override_beats_the_file_and_a_later_one_an_earlier_one(tmp_path: Path) -> None:
    settings = load_settings(
        TrainSettings, write(tmp_path, FILE), ["optimizer.lr=2e-5", "batch.steps=3", "optimizer.lr=3e-5"]
    )
    assert settings.optimizer.lr == 3e-5
    assert settings.batch.steps == 3
    assert settings.model.path == "models/a"
    assert settings.algorithm.clip_high == 0.2


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("rollout.stop=[a, b]", "rollout.stop", ("a", "b")),
        ('rollout.stop=["\\n"]', "rollout.stop", ("\n",)),
        ("optimizer.max_grad_norm=null", "optimizer.max_grad_norm", None),
        ("data.shuffle=false", "data.shuffle", False),
        ("data.system_prompt=yes", "data.system_prompt", "yes"),
        ("data.system_prompt=2026-01-01", "data.system_prompt", "2026-01-01"),
        ("data.system_prompt='7'", "data.system_prompt", "7"),
        ("data.system_prompt=a=b", "data.system_prompt", "a=b"),
        ("reward.function=my/file.py:score", "reward.function", "my/file.py:score"),
        ("data.train.task={min_digits: 2}", "data.train.task", {"min_digits": 2}),
        ("data.train.task.min_digits=2", "data.train.task", {"min_digits": 2}),
        ("model.lora.rank=4", "model.lora.rank", 4),
        ("optimizer.eps=1", "optimizer.eps", 1.0),
        ("algorithm.kl=loss", "algorithm.kl", "loss"),
    ],
)
def test_override_values_are_yaml(text: str, path: str, value: Any) -> None:
    found: Any = load_settings(TrainSettings, None, [*REQUIRED, text])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_group_given_as_an_override_replaces_the_group_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, FILE.replace("lr: 1e-5", "lr: 1e-5\n  eps: 1e-6"))
    settings = load_settings(TrainSettings, file, ["optimizer={weight_decay: 0.5}"])
    assert (settings.optimizer.lr, settings.optimizer.eps, settings.optimizer.weight_decay) == (1e-6, 1e-8, 0.5)
    assert settings.provenance.of("optimizer.lr") == "default"


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("lr=1", "optimizer.lr"),
        ("model.lr=1", "optimizer.lr"),
        ("learning_rate=1", "optimizer.lr"),
        ("optimizer.lrr=1", "optimizer.lr"),
        ("optim.lr=1", "optimizer"),
        ("optimizer.adam.lr=1", "optimizer.lr"),
        ("batch.step=1", "batch.steps"),
        ("model.lora.rnk=1", "model.lora.rank"),
        ("rollout.sampling.temprature=1", "rollout.sampling.temperature"),
        ("checkpoint.every_step=1", "checkpoint.every_steps"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_one(wrong: str, nearest: str) -> None:
    message = refusal(TrainSettings, None, [*REQUIRED, wrong])
    unknown = wrong.partition("=")[0]
    if unknown in ("optim.lr", "optimizer.adam.lr"):
        unknown = unknown.removesuffix(".lr")  # the group is told, and not what is in it
    assert f"there is no key '{unknown}'" in message
    assert f"did you mean {nearest}" in message
    assert f"override {wrong}" in message


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    message = refusal(TrainSettings, None, [*REQUIRED, "zzzz=1"])
    assert "there is no key 'zzzz'" in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch.steps=1.5", "a whole number ≥ 1 or null"),
        ("batch.steps='3'", "a whole number ≥ 1 or null"),
        ("batch.steps=0", "a whole number ≥ 1 or null"),
        ("batch.epochs=true", "a whole number ≥ 1"),
        ("optimizer.lr='1e-5'", "a number ≥ 0"),
        ("optimizer.lr=-1", "a number ≥ 0"),
        ("optimizer.eps=0", "a number > 0"),
        ("optimizer.eps=.nan", "a number > 0"),
        ("optimizer.max_grad_norm=.inf", "a number > 0 or null"),
        ("optimizer.betas=[0.9, 1.5]", "a list of 2 values, each a number from 0 to 1"),
        ("optimizer.betas=[0.9]", "a list of 2 values, each a number from 0 to 1"),
        ("rollout.sampling.top_p=0", "a number > 0 and ≤ 1"),
        ("data.shuffle=yes", "true or false"),
        ("data.overlong_prompts=cut", "one of error, drop"),
        ("algorithm.reduction=mean", "one of token-mean, token-sum, seq-mean-token-sum"),
        ("model.path=3", "text"),
        ("data.train.files=3", "text or a list of values, each text"),
        ("validation=null", "a group with the keys every_steps"),
        ("data.train.task.a=[1]", "names with values, each a whole number"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_expected(override: str, expected: str) -> None:
    message = refusal(TrainSettings, None, [*REQUIRED, override])
    key, _, value = override.partition("=")
    assert key.removesuffix(".a") in message
    assert f"override {override}" in message
    assert f"expected: {expected}" in message
    assert "cannot be" in message


def test_an_engine_that_is_not_offered_is_refused_with_why_and_what_is_offered() -> None:
    message = refusal(TrainSettings, None, [*REQUIRED, "rollout.engine=sglang"])
    assert "  why: SGLang could not be run where meshloom is tested" in message and "one of torch, vllm" in message


def test_missing_keys_are_named_down_to_what_must_be_given(tmp_path: Path) -> None:
    message = refusal(TrainSettings, write(tmp_path, "data:\n  shuffle: false\n"), [])
    for key in ("run_dir", "model.path", "data.train"):
        assert f"the key '{key}' is missing" in message
    assert "run.yaml:1" in message
    assert "3 problems" in message


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = FILE.replace("lr: 1e-5", "lr: fast\n  lr: 2\n  epsilon: 1e-8") + "batch: {steps: 0}\n"
    message = refusal(TrainSettings, write(tmp_path, text), ["nonsense", "seed=1.5", "bach.steps=1"])
    assert "7 problems" in message
    assert f"the key 'optimizer.lr' is given twice; first in line 8\n  where: {tmp_path}/run.yaml:9" in message
    assert f'optimizer.lr cannot be "fast"\n  where: optimizer.lr ({tmp_path}/run.yaml:8)' in message
    assert f"there is no key 'optimizer.epsilon'\n  where: optimizer.epsilon ({tmp_path}/run.yaml:10)" in message
    assert f"batch.steps cannot be 0\n  where: batch.steps ({tmp_path}/run.yaml:11)" in message
    assert "override nonsense" in message
    assert "override seed=1.5" in message
    assert "there is no key 'bach'\n  where: bach (override bach.steps=1)" in message


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("optimizer.lr", "it has not the form a.b=value"),
        ("=3", "it has not the form a.b=value"),
        ("a..b=3", "it has not the form a.b=value"),
        ("--optimizer.lr=3", "it has not the form a.b=value"),
        ("optimizer.lr=", "it has no value"),
        ("rollout.stop=[a", "this is not YAML"),
        ("data.system_prompt=@home", "this is not YAML"),
        ("run_dir.a=1", "run_dir is a single value"),
        ("data.train.files.0=a", "data.train.files is a list; give it whole"),
        ("model.path=!!python/object:os.system {}", "the tag !!python/object:os.system is not read here"),
    ],
)
def test_a_malformed_override_is_refused(override: str, why: str) -> None:
    message = refusal(TrainSettings, None, [*REQUIRED, override])
    assert f"override {override}" in message
    assert why in message


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: [1\n", 2, "not YAML"),
        ("run_dir: a\n\tb: 1\n", 2, "not YAML"),
        ("run_dir: a\n---\nrun_dir: b\n", 2, "single document"),
        ("run_dir: a\nrun_dir: b\n", 2, "given twice; first in line 1"),
        ("seed: 1\n3: b\n", 2, "a key must be a name, not '3'"),
        ("seed: 1\nmodel: &m {path: *m}\n", 2, "inside its own anchor"),
        ("- run_dir\n", 1, "the file holds no keys"),
        ("run_dir: !!int a\n", 1, "not of the type !!int"),
        ("run_dir: !!python/name:os.system\n", 1, "tag !!python/name:os.system is not read"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    message = refusal(TrainSettings, write(tmp_path, text), [])
    assert what in message
    assert f"run.yaml:{line}" in message


def test_a_missing_file_is_refused_with_those_nearby(tmp_path: Path) -> None:
    write(tmp_path, FILE)
    message = refusal(TrainSettings, tmp_path / "rum.yaml", ["nonsense"])
    assert f"there is no file {tmp_path / 'rum.yaml'}" in message
    assert "files nearby: " + str(tmp_path / "run.yaml") in message
    assert "override nonsense" in message


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"run_dir: \xff\xfe")
    assert "is not UTF-8 text" in refusal(TrainSettings, tmp_path / "binary.yaml", [])
    assert "cannot be read: Is a directory" in refusal(TrainSettings, tmp_path, [])


def test_merged_anchors_keep_the_lines_of_their_values(tmp_path: Path) -> None:
    text = (
        FILE
        + "validation:\n  sampling: &s\n    top_k: 5\n    top_p: 0.5\nrollout:\n  sampling:\n    top_k: 7\n    <<: *s\n"
    )
    settings = load_settings(TrainSettings, write(tmp_path, text), [])
    assert (settings.rollout.sampling.top_k, settings.rollout.sampling.top_p) == (7, 0.5)
    assert settings.provenance.of("rollout.sampling.top_k").endswith("run.yaml:15")
    assert settings.provenance.of("rollout.sampling.top_p").endswith("run.yaml:12")


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    file = write(tmp_path, FILE)
    settings = load_settings(TrainSettings, file, ["batch.steps=3", "model.lora={rank: 4}", "reward.kwargs.a=1"])
    origins = {line.path: line.origin for line in explain(settings)}
    assert origins["optimizer.lr"] == f"{file}:8"
    assert origins["data.train.files"] == f"{file}:6"
    assert origins["batch.steps"] == "override batch.steps=3"
    assert origins["model.lora.rank"] == "override model.lora={rank: 4}"
    assert origins["model.lora.alpha"] == "default"
    assert origins["reward.kwargs"] == "override reward.kwargs.a=1"
    assert origins["optimizer.eps"] == "default"
    assert len(origins) > 70
    assert {line.path: line.value for line in explain(settings)}["model.lora.rank"] == 4


@pytest.mark.parametrize("kind", [TrainSettings, SftSettings, EvalSettings])
def test_written_settings_read_back_equal(tmp_path: Path, kind: type) -> None:
    extra = [
        "model.lora.rank=4",
        "data.system_prompt='1e-6'",
        "data.train.task={a: 1, b: 0.5, c: x, d: true}",
        "seed=5",
    ]
    settings = load_settings(kind, None, [*REQUIRED, *extra])
    again = load_settings(kind, write(tmp_path, dump_yaml(settings)), [])
    assert again == settings
    assert again.data.system_prompt == "1e-6"
    assert settings != load_settings(kind, None, [*REQUIRED, *extra, "seed=6"])


texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "1e-6",
        "yes",
        "no",
        "null",
        "~",
        "0o17",
        "0x1f",
        "017",
        "1_000",
        "1:30",
        ".5",
        "<<",
        "=",
        "2026-01-01",
        "- a",
        "a: b",
        "#",
        "",
    ]
)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts


@given(
    st.dictionaries(
        texts, st.recursive(values, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=8)
    )
)
def test_what_is_written_as_yaml_is_read_back_as_the_same_values(data: dict[str, Any]) -> None:
    document = yaml_text.read(yaml_text.write(data))
    assert document.faults == []
    assert repr(document.data) == repr(data)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_as_python_prints_them(number: float) -> None:
    assert yaml_text.read(repr(number)).data == number
    assert math.isclose(yaml_text.read(f"{number:e}").data, number, rel_tol=1e-5)


def test_settings_load_without_torch() -> None:
    code = (
        "import sys; from meshloom.config.load import load_settings; from meshloom.config.settings import TrainSettings\n"
        f"load_settings(TrainSettings, None, {REQUIRED!r})\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run used to go into a folder called ``~``; a shell does not replace it after ``a.b=``."""
    monkeypatch.setenv("HOME", "/home/ada")
    given = ["run_dir=~/runs/a", "model.path=~/m", "data.train.files=[~/a.jsonl, b.jsonl]", "reward.function=~/r.py:f"]
    loaded = load_settings(TrainSettings, None, given)
    assert (loaded.run_dir, loaded.model.path) == ("/home/ada/runs/a", "/home/ada/m")
    assert loaded.data.train.files == ("/home/ada/a.jsonl", "b.jsonl")
    assert loaded.reward.function == "/home/ada/r.py:f"


def test_one_file_is_a_list_of_one() -> None:
    one, several = (
        load_settings(TrainSettings, None, [*REQUIRED, f"data.train.files={files}"])
        for files in ("a.jsonl", "[a.jsonl]")
    )
    assert one == several
    assert one.data.train.files == ("a.jsonl",)
