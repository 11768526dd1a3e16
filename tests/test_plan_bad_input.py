"""Nonsense for ``meshloom plan``: each ends as a plan or as one clear error with exit code 2, never as a traceback."""

import copy
import json
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshloom.cli import main
from meshloom.config.schema import Keys
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from tests.test_plan_outlook import PUBLIC, folder
from tests.test_plan_page import TINY

BASE = ("run_dir=r", "model.path=m", "data.train.reasoning_gym=basic_arithmetic")
TRAIN = ("plan", "--kind", "train", *BASE)
HUGE = "9" * 400
WORDS = """
    null 0 -1 1 7 3.5 -2.5 1e30 1000000000000000000000000000000 .nan .inf -.inf true abc [] [1] [a,b] {} 80GB 80GiB cuda
    cuda:99 cpu [[1]] ~ 2026-01-01 [1, {a: host disk [-1] [node1:0] all [0,0] 9223372036854775807 65536 1e-320 nan
"""
TEXTS = WORDS.split()
TEXTS += ['""', '" "', "{a: 1}", r'"\0"', r'"\ud800"', "!!python/object:os.system x", "&a [*a]", "'", '"node[1-"', HUGE]
TEXTS += ['"node[1-99999999999]:all"', f"node{HUGE}:0", f'"{"9" * 5000}"', f"0x{'f' * 5000}", "[" * 500]
VALUES: list[Any] = [
    None,
    0,
    -1,
    1,
    3,
    2.5,
    float("nan"),
    float("inf"),
    1e30,
    10**30,
    2**63,
    True,
    "abc",
    "",
    "80GB",
    [],
    [1],
]
VALUES += [{}, {"a": 1}, "\ud800", [None], {"rope_type": "dynamic"}, [["x"]]]

Plan = Callable[..., str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "m", TINY, 100)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n' * 4)
    return tmp_path


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command line and gives what it says, after looking whether that is an answer."""

    def run(*args: str, code: int | None = None) -> str:
        capsys.readouterr()
        given = main(list(args))
        out, err = capsys.readouterr()
        assert given in (0, 2) and code in (None, given), (args, out, err)
        assert "Traceback" not in err
        if given == 0:
            assert ("Plan: " in out or '"lines"' in out) and err == "", args
            # A text that is given as ``nan`` is told as it was given; a number is written ``.nan``.
            words = "inf" if any(arg.endswith("=nan") for arg in args) else "nan|inf"
            assert not re.search(rf"(?<![\w/-])({words})(?![\w/-])", out.partition("Plan: ")[2]), (args, out)
        else:
            assert err.startswith("error: ") or "Problems" in out or '"problems": [' in out, (args, out, err)
        return out + err

    return run


def paths(kind: type[TrainSettings]) -> list[str]:
    keys = Keys(kind)
    return sorted(path for path in keys._nodes if path)


def test_a_path_that_no_file_system_takes_is_told(planned: Plan) -> None:
    """Python's own error for it was a traceback."""
    assert "has 5000 letters" in planned(*TRAIN, f"data.train.files={'n' * 5000}", code=2)


def test_nonsense_for_any_setting(planned: Plan) -> None:
    pick = random.Random(3)
    keys = paths(TrainSettings)
    for _ in range(200):
        chosen = [f"{pick.choice(keys)}={pick.choice(TEXTS)}" for _ in range(pick.choice([1, 1, 2]))]
        more = pick.choice(
            [(), (), ("cluster.devices_per_node=4", "device=cuda"), ("--device-kind", "h200"), ("--json",)]
        )
        planned(*TRAIN, *chosen, *more)
    for kind, settings in (("sft", SftSettings), ("eval", EvalSettings)):
        keys = paths(settings)
        for _ in range(20):
            planned("plan", "--kind", kind, *BASE, f"{pick.choice(keys)}={pick.choice(TEXTS)}")


def test_a_key_that_is_misspelt_is_told_with_the_one_that_is_meant(planned: Plan) -> None:
    pick = random.Random(5)
    for path in pick.sample(
        [path for path in paths(TrainSettings) if len(path.rpartition(".")[2]) > 6 and "*" not in path], 25
    ):
        at = pick.randrange(len(path) - 4, len(path) - 1)
        said = planned(*TRAIN, f"{path[:at]}{path[at + 1 :]}=1", code=2)
        assert "there is no key" in said and path in said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"\xef\xbb\xbfrun_dir: r",
        b"run_dir: r\nrun_dir: s",
        b"run_dir",
        b"- a",
        b"3",
        b"a: [",
        b"\0",
        b"a: *b",
        b"a: &a [*a]",
        b"? {a: 1}\n: 2",
        b"model: 3",
        b"<<: 3",
        b"a: !!binary x",
        b"a: !!python/object:os.system {}",
        b"{a: " * 400,
        b"---\na: 1\n---\nb: 2",
        b"1: 2",
        b"null: 2",
        b"\tx: 1",
        b"a: 'x",
        b'a: "\\xzz"',
        b"%YAML 9.9\n---\na: 1",
        b"seed: " + b"9" * 5000,
        b'run_dir: "a\\0b"',
        b'run_dir: "\\ud800"',
        b"run_dir: " + b"x" * 5000,
    ],
)
def test_a_settings_file_of_nonsense(planned: Plan, content: bytes) -> None:
    Path("run.yaml").write_bytes(content)
    planned("plan", "run.yaml", code=2)
    planned("plan", "run.yaml", *BASE)


@pytest.mark.parametrize(
    "path", ["nowhere.yaml", "/", "/dev/null", "m", "rows.jsonl", "", "=", "a=", "=b", "a..b=1", "\udcff=1"]
)
def test_what_is_no_settings_file(planned: Plan, path: str) -> None:
    planned("plan", path, code=2)


AMOUNTS = (
    "0",
    "-1",
    "abc",
    "1.5",
    "1e9",
    "99999999999999999999",
    "",
    "80GB",
    "80GiB",
    "nan",
    "inf",
    "-5GB",
    "0x10",
    "٣",
    HUGE,
)


@pytest.mark.parametrize(
    "option", ["--nodes", "--devices-per-node", "--device-memory", "--device-kind", "--device-map", "--prompts"]
)
def test_options_of_nonsense(planned: Plan, option: str) -> None:
    fine = {"--device-memory": {"80GB", "80GiB", "99999999999999999999"}}.get(option, set())
    for text in (*AMOUNTS, "9" * 5000):
        said = planned("plan", "--kind", "train", *BASE, option, text)
        if text in fine - {"99999999999999999999"}:
            assert "no amount of memory" not in said
    planned(*TRAIN, option, "abc", code=2)


def test_amounts_of_memory_are_what_they_say(planned: Plan) -> None:
    for text, shown in (
        ("80GB", "74.51 GiB"),
        ("80GiB", "80.00 GiB"),
        ("80g", "74.51 GiB"),
        ("85899345920", "80.00 GiB"),
    ):
        assert shown in planned(*TRAIN, "--device-memory", text, code=0)
    for text in ("abc", "0", "80XB", "80GiB80", HUGE):
        assert "no amount of memory" in planned(*TRAIN, "--device-memory", text, code=2)


def test_a_cluster_of_nothing_or_of_too_much(planned: Plan) -> None:
    for given in (
        "nodes=0",
        "nodes=-1",
        "devices_per_node=0",
        "nodes=99999999999",
        "devices_per_node=1000000",
        "nodes=1.5",
    ):
        assert "[K003] cluster." in planned(*TRAIN, f"cluster.{given}", code=2)
    assert "[P002]" in planned(*TRAIN, "placement.actor=[9223372036854775807]", code=2)
    assert "names no device" in planned(*TRAIN, f'placement.actor=["{"9" * 5000}"]', code=2)


MAPS = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"a",
    b"actor: &a {devices: *a}",
    b"actor: {devices: [0, 0]}",
    b"actor: {devices: [-1]}",
    b'actor: {devices: ["node1:0", "node1:0"]}',
    b'actor: {devices: ["node[1-99999999]:0"]}',
    b"actor: {devices: [99999999999999999999999]}",
    b"actor: {devices: []}",
    b"actor: {devices: [cuda:0]}",
    b"actor: 3",
    b"actor: {devices: {a: 1}}",
    b"aktor: {devices: [0]}",
    b"actor: {devices: [0], parallelism: 3}",
    b"actor: {devices: [0], parallelism: {fsdp_size: abc}}",
    b"actor: {devices: [0], parallelism: {tensor_parallel_size: 0}}",
    b"actor: {devices: [0], tensor_parallel_size: 1000000000000}",
    b"actor: {devices: [0]}\nactor: {devices: [1]}",
    b"[" * 500,
]


@pytest.mark.parametrize("content", MAPS)
def test_a_device_map_of_nonsense(planned: Plan, content: bytes) -> None:
    Path("map.yaml").write_bytes(content)
    for more in ((), ("--nodes", "2"), ("cluster.devices_per_node=4",)):
        planned(*TRAIN, "--device-map", "map.yaml", *more)


def test_device_maps_that_chance_makes(planned: Plan) -> None:
    pick = random.Random(11)
    words = [
        None,
        0,
        -1,
        1,
        10**30,
        2.5,
        True,
        "",
        "abc",
        "node1:0",
        "node1:-1",
        "node[1-3]:all",
        "node[3-1]:0",
        "cuda:0",
    ]
    words += [
        "all",
        "*",
        "0-3",
        "3-0",
        "node1:0-99",
        "vllm",
        "\x00",
        "é",
        ":",
        "::",
        "node1:",
        ":0",
        "node[",
        "-",
        [],
        [[0]],
    ]
    keys = ("devices", "parallelism", "backend", "tensor_parallel_size", "max_num_seqs", "dtype", "fsdp_size", "devces")
    good = {
        "actor": {"devices": ["node1:0", "node1:1"]},
        "rollout": {"devices": ["node1:0-1"], "tensor_parallel_size": 2},
    }
    for _ in range(40):
        made: dict[str, Any] = copy.deepcopy(good) if pick.random() < 0.6 else {}
        for _ in range(pick.randint(1, 3)):
            group = made.setdefault(pick.choice(["actor", "rollout", "critic", "reference", "reward", "Actor", ""]), {})
            group[pick.choice(keys)] = pick.choice(
                [pick.choice(words), pick.choices(words, k=3), {"fsdp": pick.choice(words)}]
            )
        Path("map.yaml").write_text(yaml.safe_dump(made, allow_unicode=True))
        planned(
            *TRAIN, "--device-map", "map.yaml", *pick.choice([(), ("cluster.nodes=2", "cluster.devices_per_node=4")])
        )


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(**changes: Any) -> bytes:
    return (
        header(json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2], **changes}}).encode()) + b"\0\0"
    )


WEIGHTS = [b"", b"\0", b"\0" * 8, header(b""), header(b"[]"), header(b"null"), header(b'{"w":1}'), header(b'{"w":{}}')]
WEIGHTS += [
    header(b"{}", 10**18),
    header(b"{}", 2**63 + 5),
    header(b"\xff{}"),
    header(b"[" * 20000),
    b"PK\x03\x04",
    b"version ",
]
WEIGHTS += [tensor(shape=shape) for shape in ([-1], ["a"], None, [1e3], [float("nan")], [10**30], [True], 3)]
WEIGHTS += [tensor(data_offsets=offsets) for offsets in (None, [0], [0, 10**9], ["a", "b"], [0, float("inf")])]


def test_a_name_of_the_hub_is_told_how_it_becomes_a_folder(planned: Plan) -> None:
    answer = planned("plan", "--kind", "train", *BASE, "model.path=Qwen/Qwen2.5-7B-Instruct", code=2)
    assert "hf download Qwen/Qwen2.5-7B-Instruct --local-dir Qwen/Qwen2.5-7B-Instruct" in " ".join(answer.split())


def test_of_a_file_without_rows_nothing_is_said_but_that(planned: Plan) -> None:
    """It also advised a step of 0 prompts."""
    Path("none.jsonl").write_text("")
    answer = planned("plan", "--kind", "train", *BASE, "data.train={files: [none.jsonl]}", code=2)
    assert "the data file is empty" in answer and "prompts repeat" not in answer


def test_a_path_into_a_folder_that_is_there_is_no_name_of_the_hub(planned: Plan) -> None:
    Path("kept/base").mkdir(parents=True)
    answer = " ".join(planned("plan", "--kind", "train", *BASE, "model.path=kept/Qwen2.5-7B", code=2).split())
    assert "kept has the folders base" in answer and "hf download" not in answer


@pytest.mark.parametrize("content", WEIGHTS)
def test_weights_that_are_damaged(planned: Plan, content: bytes) -> None:
    Path("m/model.safetensors").write_bytes(content)
    assert "[M001]" in planned(*TRAIN, code=2)
    Path("m/model.safetensors").rename("m/other.safetensors")
    Path("m/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "other.safetensors"}}))
    assert "[M001]" in planned(*TRAIN, code=2)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "[" * 20000, *(f'{{"weight_map": {value}}}' for value in ("3", "[]", "{}", '{"a": 3}'))]
)
def test_an_index_that_is_damaged(planned: Plan, content: str) -> None:
    Path("m/model.safetensors").unlink()
    for text in (content, '{"weight_map": {"a": "../m/config.json"}}', '{"weight_map": {"a": "x\\u0000"}}'):
        Path("m/model.safetensors.index.json").write_text(text)
        assert "[M001]" in planned(*TRAIN, code=2)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"a"', b"\xff", b"[" * 20000, b'{"text_config": 3}', b'{"hidden_size": 1e999}', b"NaN"]
    + [
        b'{"hidden_size": 2, "num_attention_heads": 4}',
        b'{"num_hidden_layers": 1e30}',
        b'{"rope_parameters": [1]}',
        b'{"text_config": {"vocab_size": "a"}}',
    ],
)
def test_a_config_that_is_damaged(planned: Plan, content: bytes) -> None:
    Path("m/config.json").write_bytes(content)
    assert "[M001]" in planned(*TRAIN, code=2)


def test_configs_that_chance_damages(planned: Plan) -> None:
    pick = random.Random(17)
    names = ("Qwen2.5-0.5B", "Qwen3-30B-A3B", "gemma-3-4b", "DeepSeek-V3", "gpt-oss-20b", "Mixtral-8x7B-v0.1")
    spread = ("cluster.devices_per_node=4", "parallel.actor.tensor=2", "device=cuda")
    for _ in range(60):
        config = copy.deepcopy(PUBLIC[pick.choice(names)])
        for _ in range(pick.choice([1, 1, 2])):
            group = config
            key = pick.choice(sorted(group))
            while isinstance(group[key], dict) and group[key] and pick.random() < 0.8:
                group = group[key]
                key = pick.choice(sorted(group))
            group[key] = pick.choice(VALUES)
        folder(Path("m"), config, 1000)
        planned(*TRAIN, *pick.choice([(), spread, ("cluster.device=h100",), ("model.lora={rank: 4}", "device=cuda")]))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json", "chat_template.jinja"])
def test_files_of_a_model_that_are_none(planned: Plan, name: str) -> None:
    file = Path("m") / name
    for make in (Path.mkdir, lambda path: path.write_bytes(b"\xff\xfe\0junk"), lambda path: path.symlink_to(path.name)):
        file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)
        make(file)
        planned(*TRAIN)
        planned("plan", "--kind", "train", "run_dir=r", "model.path=m", "data.train.files=rows.jsonl")


@pytest.mark.parametrize(
    "path", ["/dev/null", "/", "", "m/config.json", "x" * 5000, "a\\nb", "~nobody/x", "/proc/self/mem"]
)
def test_a_model_folder_that_is_none(planned: Plan, path: str) -> None:
    assert "[M001]" in planned("plan", "--kind", "train", *BASE, f'model.path="{path}"', code=2)


ROWS = [b"", b"\n\n", b"{}", b"[]", b"\xff", b"null", b"\0", b"PAR1", b"{" * 20000, b'{"prompt": 3, "answer": 4}']
ROWS += [b'{"prompt": []}', b'{"prompt": [{"role": 3}]}', b'{"prompt": "a"}', b'{"prompt": "\\ud800", "answer": "x"}']
ROWS += [b'{"prompt": {"a": 1}, "answer": "b"}', b'{"data_source": 3, "prompt": "x", "reward_model": 3}']


@pytest.mark.parametrize("content", ROWS)
def test_rows_of_nonsense(planned: Plan, content: bytes) -> None:
    for name in ("rows.jsonl", "rows.parquet", "rows.txt"):
        Path(name).write_bytes(content)
        for kind, source in (("train", "train"), ("sft", "train"), ("eval", "validation")):
            given = (f"data.{source}.files={name}", "reward.function=exact_match")
            planned("plan", "--kind", kind, "run_dir=r", "model.path=m", *(given if kind != "sft" else given[:1]))
    assert planned("plan", "--kind", "train", "run_dir=r", "model.path=m", "data.train.files=rows.txt", code=2)


@pytest.mark.parametrize(
    "source",
    [
        "{files: m}",
        "{files: []}",
        "{files: nowhere.jsonl}",
        "{files: rows.jsonl, dataset: x}",
        "{files: ['']}",
        "{files: /dev/null}",
        '{files: "a\\0.jsonl"}',
        "{dataset: m}",
        "{reasoning_gym: nope}",
        "{reasoning_gym: ''}",
        "{reasoning_gym: basic_arithmetic, task: {a: 1}}",
    ],
)
def test_sources_of_nonsense(planned: Plan, source: str) -> None:
    planned("plan", "--kind", "train", "run_dir=r", "model.path=m", f"data.train={source}")
    planned("plan", "--kind", "eval", "run_dir=r", "model.path=m", f"data.validation={source}")


@pytest.mark.parametrize(
    "command",
    [[], [""], ["'"], ["\udcff"], ["a" * 100_000], ["x=[", "=", "a..b=1"], ["python3", "-m", "nothing"], ["{" * 3000]],
)
def test_verl_commands_of_nonsense(planned: Plan, command: list[str]) -> None:
    planned("plan", "--verl", "--", *command, code=2)


def test_hardware_that_is_not_here_is_noted(planned: Plan) -> None:
    note = "this machine has no GPU: planned for one elsewhere"
    there = any(Path(file).exists() for file in ("/dev/nvidia0", "/dev/kfd"))
    for given in (("device=cuda",), ("--device-kind", "h200"), ("--device-memory", "80GiB")):
        assert (note in planned(*TRAIN, *given, code=0)) != there
    assert note not in planned(*TRAIN, "device=cpu", code=0)
    assert ('"notes": [' in planned(*TRAIN, "device=cuda", "--json", code=0)) != there


def test_options_are_told_as_they_were_given(planned: Plan) -> None:
    """``device=cuda`` stood in messages though nobody had written it, and options as overrides that nobody had written."""
    given = ("--device-memory", "1GiB", "--devices-per-node", "2")
    there = any(Path(file).exists() for file in ("/dev/nvidia0", "/dev/kfd"))
    said = planned(*TRAIN, *given, "--settings")
    assert "option --device-memory 1GiB" in said and "option --devices-per-node 2" in said
    note = "--device-kind h200, and this machine has no GPU"
    assert there or note in planned(*TRAIN, "--device-kind", "h200")
    assert "device=cuda" not in said and "override device" not in said and "override cluster" not in said
    assert "override device_memory_bytes=2147483648" in planned(*TRAIN, *given, "device_memory_bytes=2147483648")


def test_a_setting_and_an_option_say_the_same_of_memory(planned: Plan) -> None:
    """The setting counted for nothing without ``device=cuda``; both counted for nothing on a processor, and nobody said so."""
    ways = (("--device-memory", "80GiB"), ("device_memory_bytes=85899345920",))
    numbers = [json.loads(planned(*TRAIN, *way, "--json"))["lines"] for way in ways]
    option, setting = ([(line["name"], line["value"]) for line in lines] for lines in numbers)
    assert option == setting and ("memory of the GPU", 80 * 2**30) in option
    for way in ways:
        assert "[T008] device_memory_bytes is not used" in planned(*TRAIN, *way, "device=cpu")
    assert "T008" not in planned(*TRAIN, "device=cpu") + planned(*TRAIN, *ways[0])


def test_settings_of_another_command_are_told_as_such(planned: Plan) -> None:
    Path("sft.yaml").write_text(
        "run_dir: r\nmodel: {path: m}\nbatch: {samples_per_update: 4}\ndata: {train: {files: rows.jsonl}}"
    )
    assert "has keys of `meshloom sft`, not of `meshloom train`" in planned("train", "sft.yaml", code=2)
    assert "meshloom sft sft.yaml" in planned("plan", "--kind", "train", "sft.yaml", code=2)
    assert "model.path, which of a run's checkpoint is RUN_DIR" in planned("eval", "sft.yaml", code=2)
    Path("eval.yaml").write_text("run_dir: r\nmodel: {path: m}\ndata: {validation: {files: rows.jsonl}}")
    told = planned("eval", "eval.yaml", "cluster.devices_per_node=2", code=2)  # the file was said to be one of train
    assert "there is no key 'cluster'" in told and "has keys of" not in told
