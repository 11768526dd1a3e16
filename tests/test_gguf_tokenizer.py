"""Tokenizers built from the tables of a GGUF file, and the check that a tokenizer is not a broken one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meshloom.config.errors import UserError
from meshloom.data.tokenizer_checks import check_tokenizer
from meshloom.train.gguf_tokenizer import read_gguf_tokenizer

WORDS = ("the sum of twelve and three is less than that of two large numbers which have more digits each " * 2).split()


def write(path: Path, model: str, tokens: dict[str, TokenType], more: Callable[[GGUFWriter], None]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    writer.add_eos_token_id(1)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_file(path: Path, num_scores: int | None = None, *, add_space: bool = False) -> Path:
    """Ranks as scores, as Gemma's file has them: the first word that was learned has the highest."""
    tokens = dict.fromkeys(("<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"), TokenType.CONTROL)
    tokens |= dict.fromkeys(("\n\n", "  ", "   "), TokenType.USER_DEFINED)
    tokens |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    letters = "abcdefghijklmnopqrstuvwxyz▁\n.12"
    grown = [f"▁{word}"[:end] for word in WORDS for end in range(2, len(word) + 2)]
    tokens |= dict.fromkeys((*grown, *letters), TokenType.NORMAL)
    normal = [token for token, kind in tokens.items() if kind == TokenType.NORMAL]
    scores = [-float(normal.index(token)) if token in normal else -1000.0 for token in tokens]

    def more(writer: GGUFWriter) -> None:
        writer.add_token_scores(scores[:num_scores])
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)
        writer.add_pad_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(add_space)

    return write(path, "llama", tokens, more)


def byte_level_file(path: Path, rule: str = "smollm") -> Path:
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = ByteLevel(add_prefix_space=False)
    specials = ["<|im_start|>", "<|im_end|>"]
    learned.train_from_iterator(
        [" ".join(WORDS), "12 12 12"],
        trainers.BpeTrainer(special_tokens=specials, initial_alphabet=ByteLevel.alphabet(), show_progress=False),
    )
    table = json.loads(learned.to_str())["model"]
    tokens = {token: TokenType.CONTROL if token in specials else TokenType.NORMAL for token in table["vocab"]}

    def more(writer: GGUFWriter) -> None:
        writer.add_token_merges([" ".join(merge) for merge in table["merges"]])
        writer.add_tokenizer_pre(rule)
        writer.add_bos_token_id(0)
        writer.add_chat_template("{{ '<|im_start|>' + messages[0]['content'] + '<|im_end|>' }}")

    return write(path, "gpt2", tokens, more)


def reloaded(gguf_file: Path, folder: Path) -> PreTrainedTokenizerFast:
    read_gguf_tokenizer(gguf_file).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_words_of_a_sentencepiece_file_are_single_tokens(tmp_path: Path) -> None:
    """transformers 5.17 took the ranks for log-probabilities and cut words into letters: a model then answered nonsense."""
    tokenizer = reloaded(sentencepiece_file(tmp_path / "m.gguf"), tmp_path / "folder")
    text = "the sum of three   numbers.\n\nthe 12é<end_of_turn>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    spelt = ["t", "h", "e", "▁sum", "▁of", "▁three", "▁▁▁", "n", "u", "m", "b", "e", "r", "s", ".", "\n\n"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *spelt, *("t", "h", "e", "▁", "1", "2", "<0xC3>", "<0xA9>", "<end_of_turn>")
    ]  # fmt: skip
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<end_of_turn>")
    assert tokenizer(" sum").tokens() == ["<bos>", "▁sum"]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == ("<eos>", "<pad>", "<unk>")
    check_tokenizer(tokenizer, "here")


def test_byte_level_file_keeps_its_merges_and_end_token(tmp_path: Path) -> None:
    """transformers 5.17 named the begin token as the end token."""
    tokenizer = reloaded(byte_level_file(tmp_path / "m.gguf"), tmp_path / "folder")
    text = " sum of 12 12é\n<|im_end|>"
    ids = tokenizer(text).input_ids
    digits = ["Ġ", "1", "2"] * 2
    assert tokenizer.convert_ids_to_tokens(ids) == ["Ġsum", "Ġof", *digits, "Ã", "©", "Ċ", "<|im_end|>"]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": " sum"}], tokenize=False)
    assert tokenizer(chat).tokens() == ["<|im_start|>", "Ġsum", "<|im_end|>"]
    check_tokenizer(tokenizer, "here")


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for message, file in (
        ("scores", sentencepiece_file(tmp_path / "a.gguf", num_scores=7)),
        ("a space before each text", sentencepiece_file(tmp_path / "b.gguf", add_space=True)),
        ("'llama-bpe', not smollm", byte_level_file(tmp_path / "c.gguf", rule="llama-bpe")),
        ("'t5', not gpt2 or llama", write(tmp_path / "d.gguf", "t5", {"a": TokenType.NORMAL, "b": 1}, lambda _: None)),
    ):
        with pytest.raises(UserError, match=message):
            read_gguf_tokenizer(file)


def test_a_tokenizer_that_cuts_its_own_words_is_refused(tmp_path: Path) -> None:
    """A tokenizer of the right vocabulary and no merges was taken, and a run of nonsense begun."""
    tokenizer = reloaded(sentencepiece_file(tmp_path / "m.gguf"), tmp_path / "folder")
    table = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    table["model"]["merges"] = []
    broken = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(table)), eos_token="<eos>")
    with pytest.raises(UserError, match="cuts words that it has tokens for"):
        check_tokenizer(broken, "here")
    check_tokenizer(tokenizer, "here")


def test_a_marker_of_the_template_that_is_a_token_must_not_be_cut(tmp_path: Path) -> None:
    reloaded(byte_level_file(tmp_path / "m.gguf"), tmp_path / "folder")
    table = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    table["added_tokens"] = []
    broken = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(table)), eos_token="<|im_start|>")
    check_tokenizer(broken, "here")
    broken.chat_template = "{{ messages[0]['content'] + '<|im_end|>' }}"
    with pytest.raises(UserError, match=r"cuts <\|im_end\|>"):
        check_tokenizer(broken, "here")
