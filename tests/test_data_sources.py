"""Reading rows: every known form is read, every broken one is an error that says where."""

import builtins
import json
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import DataSettings, SftDataSettings, SourceSettings
from meshloom.data.columns import Place, to_row
from meshloom.data.sources import load_rows

CHAT = [{"role": "user", "content": "2+2?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 3, "nested": {"tags": ["a", "b"]}},
}


def load(source, kind=DataSettings, **settings):
    source = SourceSettings(**source)
    return load_rows(source, kind(train=source, **settings))


def jsonl(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return {"files": (str(path),)}


def parquet(path, *records):
    pq.write_table(pa.Table.from_pylist(list(records)), path)
    return {"files": (str(path),)}


def refused(source, kind=DataSettings, **settings):
    with pytest.raises(UserError) as caught:
        load(source, kind, **settings)
    return str(caught.value)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_verl_rows_keep_their_nested_columns(tmp_path, write):
    (row,) = load(write(tmp_path / f"a.{write.__name__}", VERL))
    assert (row.prompt, row.answer, row.data_source) == (CHAT, "4", "openai/gsm8k")
    assert row.extra == {"ability": "math", "split": "train", "index": 3, "nested": {"tags": ["a", "b"]}}


def test_messages_lose_the_empty_keys_parquet_gives_them(tmp_path):
    tool = [{"role": "user", "content": "x"}, {"role": "tool", "content": "y", "name": "search"}]
    (row,) = load(parquet(tmp_path / "a.parquet", {"prompt": tool, "answer": "1"}))
    assert row.prompt == tool


def test_chats_come_as_json_strings_or_numpy_arrays_too():
    record = {
        "prompt": json.dumps(CHAT),
        "reward_model": json.dumps({"ground_truth": [1, 2]}),
        "extra_info": '{"k": 1}',
    }
    row = to_row(record, 0, Place("a", "row", 0), DataSettings(train=SourceSettings()))
    assert (row.prompt, row.answer, row.extra) == (CHAT, [1, 2], {"k": 1})
    record = {"prompt": np.array(CHAT, dtype=object), "answer": np.float64(1.5), "extra_info": {"v": np.array([1, 2])}}
    row = to_row(record, 0, Place("a", "row", 0), DataSettings(train=SourceSettings()))
    assert (row.prompt, row.answer, row.extra) == (CHAT, 1.5, {"v": [1, 2]})
    assert type(row.answer) is float


def test_plain_rows_have_the_columns_that_settings_name(tmp_path):
    source = jsonl(
        tmp_path / "a.jsonl",
        {"question": "[not a chat]", "solution": 4, "level": 2},
        "",
        {"question": "b", "solution": None},
    )
    rows = load(source, prompt_column="question", answer_column="solution")
    assert [(r.index, r.prompt, r.answer, dict(r.extra)) for r in rows] == [
        (0, "[not a chat]", 4, {"level": 2}),
        (1, "b", None, {}),
    ]
    (row,) = load(jsonl(tmp_path / "b.jsonl", {"prompt": "a"}), answer_column="")
    assert row.answer is None


def test_rows_are_numbered_over_all_files_and_cut_at_max_rows(tmp_path):
    one = jsonl(tmp_path / "a.jsonl", *({"prompt": f"a{i}", "answer": i} for i in range(3)))
    two = parquet(tmp_path / "b.parquet", *({"prompt": f"b{i}", "answer": i} for i in range(3)))
    rows = load({"files": one["files"] + two["files"], "max_rows": 5})
    assert [(r.index, r.prompt) for r in rows] == [(0, "a0"), (1, "a1"), (2, "a2"), (3, "b0"), (4, "b1")]


def test_supervised_rows_take_a_response_column_or_the_last_message(tmp_path):
    answer = {"role": "assistant", "content": "4"}
    source = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "2+2?", "response": "4"},
        {"prompt": CHAT, "response": "4"},
        {"prompt": [*CHAT, answer]},
        {"messages": [*CHAT, answer]},
    )
    rows = load(source, SftDataSettings)
    assert [r.prompt for r in rows] == ["2+2?", CHAT, CHAT, CHAT]
    assert {r.response for r in rows} == {"4"}
    assert rows[3].extra == {}


def test_a_dotted_name_is_a_column_within_structs(tmp_path):
    """Fine-tuning on verl's rows of GSM8K, whose question and answer are in extra_info, was refused."""
    nested = {"extra_info": {"question": "2+2?", "deep": {"answer": "4"}}}
    source, prompt = jsonl(tmp_path / "a.jsonl", nested), "extra_info.question"
    [row] = load(source, SftDataSettings, prompt_column=prompt, response_column="extra_info.deep.answer")
    assert (row.prompt, row.response) == ("2+2?", "4")
    said = refused(source, SftDataSettings, prompt_column=prompt, response_column="extra_info.answer")
    assert "extra_info has no 'answer'" in said and "question, deep" in said


def test_generated_rows_carry_what_their_verifier_needs():
    source = {"reasoning_gym": "chain_sum", "task": {"min_terms": 2, "max_terms": 2}, "size": 5, "seed": 3}
    rows = load(source)
    assert rows == load(source)
    assert rows != load(source | {"seed": 4})
    assert [r.index for r in rows] == list(range(5))
    assert rows[0].data_source == "reasoning_gym/chain_sum"
    assert rows[0].extra["task"] == "chain_sum"
    assert rows[0].extra["question"] == rows[0].prompt
    assert eval(rows[0].extra["metadata"]["expression"]) == int(rows[0].answer)
    assert len(load(source | {"max_rows": 2})) == 2


def test_a_datasets_folder_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    jsonl(tmp_path / "train.jsonl", VERL, VERL)
    assert load({"dataset": str(tmp_path)})[1].answer == "4"
    assert "unknown split" in refused({"dataset": str(tmp_path), "split": "tset"}).lower()
    datasets.DatasetDict({"test": datasets.Dataset.from_list([VERL])}).save_to_disk(str(tmp_path / "saved"))
    assert load({"dataset": str(tmp_path / "saved"), "split": "test"})[0].prompt == CHAT
    assert "['test']" in refused({"dataset": str(tmp_path / "saved")})
    assert "cannot be loaded" in refused({"dataset": str(tmp_path / "nothing")})


def test_a_dataset_with_subsets_wants_one_by_name(tmp_path):
    """``openai/gsm8k`` could not be loaded: nothing in the settings named its subset."""
    datasets = pytest.importorskip("datasets")
    for name, answer in (("main", "4"), ("hard", "44")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "2 + 2", "answer": answer}) + "\n")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "hard"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert load({"dataset": str(tmp_path), "subset": "hard"})[0].answer == "44"
    said = refused({"dataset": str(tmp_path)})
    assert "subset: none given" in said and "['main', 'hard']" in said
    datasets.DatasetDict({"train": datasets.Dataset.from_list([VERL])}).save_to_disk(str(tmp_path / "saved"))
    assert "has no subsets" in refused({"dataset": str(tmp_path / "saved"), "subset": "main"})


def test_a_missing_datasets_package_is_one_line(monkeypatch):
    real = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    assert "pip install datasets" in refused({"dataset": "openai/gsm8k"})


def test_exactly_one_source_is_wanted():
    assert "none is given" in refused({})
    assert "both files and reasoning_gym" in refused({"files": ("a.jsonl",), "reasoning_gym": "chain_sum"})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"[]", ["unknown kind", ".json", ".jsonl"]),
        ("a", b"{}", ["no extension"]),
        ("a.pkl", pickle.dumps([1]), [".pkl", "any code", ".parquet"]),
        ("a.pt", b"x", [".pt", "any code"]),
        ("a.jsonl", b"", ["empty", "a.jsonl"]),
        ("a.jsonl", b"\n\n", ["no rows", "a.jsonl"]),
        ("a.parquet", b"", ["empty"]),
        ("a.parquet", b"PAR1 not really PAR1", ["cannot be read", "a.parquet"]),
        ("a.jsonl", b'{"prompt": "a", "answer": 1}\n{"prompt": \n', ["not JSON", "line 2"]),
        ("a.jsonl", b'{"prompt": "a", "answer": 1}\n\n\xff\xfe\n', ["not JSON", "line 3"]),
        ("a.jsonl", b"[" * 100_000, ["not JSON", "line 1"]),
        ("a.jsonl", b"[1, 2]\n", ["a JSON list", "line 1"]),
        ("a.jsonl", b'{"Prompt": "a", "answer": 1, "id": 3}\n', ["no column 'prompt'", "line 1", "Prompt, answer"]),
        ("a.jsonl", b'{"prompt": "a", "id": 1, "answers": 3}\n', ["no column 'answer'", "answers, ", "data.answer_column"]),
        ("a.jsonl", b'{"prompt": "a", "answer": 1}\n{"prompt": 7, "answer": 1}\n', ["nor a chat", "line 2", "int", "7"]),
        ("a.jsonl", b'{"prompt": null, "answer": 1}\n', ["neither a string nor a chat", "null"]),
        ("a.jsonl", b'{"prompt": [], "answer": 1}\n', ["an empty list"]),
        ("a.jsonl", b'{"prompt": [{"content": "no role"}], "answer": 1}\n', ["neither a string nor a chat", "line 1"]),
        ("a.jsonl", b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": 1}\n', ["ends with an assistant"]),
        ("a.jsonl", b'{"prompt": "a", "answer": 1, "extra_info": 3}\n', ["extra_info", "int"]),
        ("a.jsonl", b'{"prompt": "a", "answer": 1, "extra_info": "no struct"}\n', ["extra_info", "str"]),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_clear_error(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    message = refused({"files": (str(tmp_path / name),)})
    for word in words:
        assert word in message


def test_a_cut_parquet_file_is_an_error(tmp_path):
    source = parquet(tmp_path / "a.parquet", VERL)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refused(source)


def test_a_parquet_error_counts_rows_from_zero(tmp_path):
    message = refused(parquet(tmp_path / "a.parquet", {"prompt": "a", "answer": 1}, {"prompt": None, "answer": 1}))
    assert "a.parquet, row 1" in message


def test_a_missing_file_names_its_neighbours(tmp_path):
    jsonl(tmp_path / "gsm8k.jsonl", VERL)
    message = refused({"files": (str(tmp_path / "gsm8.jsonl"),)})
    assert "does not exist" in message
    assert "gsm8k.jsonl" in message
    assert "folder" in refused({"files": (str(tmp_path / "no" / "a.jsonl"),)})
    (tmp_path / "folder.jsonl").mkdir()
    assert "not a file" in refused({"files": (str(tmp_path / "folder.jsonl"),)})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "reponse": "b"}, ["no column 'response'", "reponse, prompt", "data.response_column"]),
        ({"prompt": "a", "response": None}, ["response is not a string"]),
        ({"messages": [{"role": "assistant", "content": "b"}]}, ["no message before"]),
        ({"messages": [{"role": "user", "content": "b"}]}, ["no column 'response'", "assistant message"]),
    ],
)
def test_a_supervised_row_without_response_is_an_error(tmp_path, record, words):
    message = refused(jsonl(tmp_path / "a.jsonl", record), SftDataSettings)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"reasoning_gym": "chain_sums"}, ["no task 'chain_sums'", "chain_sum,"]),
        ({"reasoning_gym": "chain_sum", "task": {"max_term": 2}}, ["no argument 'max_term'", "it has: max_terms"]),
        ({"reasoning_gym": "chain_sum", "task": {"seed": 2}}, ["seed", "beside reasoning_gym"]),
        (
            {"reasoning_gym": "chain_sum", "task": {"min_terms": 9, "max_terms": 2}},
            ["refuses the arguments", "max_terms"],
        ),
        ({"reasoning_gym": "chain_sum", "task": {"min_terms": "two"}}, ["refuses the arguments"]),
    ],
)
def test_a_wrong_task_is_one_clear_error(source, words):
    message = refused(source)
    for word in words:
        assert word in message


def test_the_room_imports_without_torch():
    code = (
        "import sys, meshloom.data.sources, meshloom.data.prompts, meshloom.data.order;"
        "print({'torch', 'transformers', 'datasets', 'reasoning_gym'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
