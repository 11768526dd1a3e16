"""The tokenizer that a GGUF file describes, built from the file's own tables.

The tables (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) are tokens, their types, and either merges, of byte-level
BPE, or scores, of a SentencePiece model. Owns: reading them, and the two kinds of tokenizer. Refuses to know: weights, the
meaning of a chat template. Always holds: a token keeps the file's id, and no id is added; the ``tokenizers`` library alone
decides how a text is cut, so it is cut alike under every version of transformers, whose own readers of these tables differ
(some take the ranks of a SentencePiece model for log-probabilities and cut words into letters; some name the begin token as the
end token).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meshloom.config.errors import UserError

_SPACE = "▁"
"""How a SentencePiece model writes a space."""

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
"""The file's names of the two kinds."""


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """What a file says of its tokenizer.

    Args:
        kind: ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece).
        rule: the name of how byte-level BPE cuts a text before merges.
        tokens: by id.
        types: by id.
        scores: by id, the higher the earlier a token is merged; none in byte-level BPE.
        merges: pairs with a space between, the first merged first; none in a SentencePiece model.
        named: the tokens that have a part to play, by its name, such as ``eos_token``.
        add_space: whether a space is put before a text.
        add_begin: whether the begin token is.
        chat_template: none if the file has none.
    """

    kind: str
    rule: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    named: dict[str, str]
    add_space: bool
    add_begin: bool
    chat_template: str | None

    def ids_of(self, kind: TokenType) -> list[int]:
        return [i for i, other in enumerate(self.types) if other == kind]


def read_gguf_tokenizer(gguf_file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, with the file's chat template.

    Raises:
        UserError: if it is of a kind that is not known here, or its tables do not fit each other.
    """
    tables = _read_tables(gguf_file)
    _check_tables(tables, gguf_file)
    backend = _byte_level(tables) if tables.kind == _BYTE_LEVEL else _sentencepiece(tables)
    for kind, add in ((TokenType.CONTROL, backend.add_special_tokens), (TokenType.USER_DEFINED, backend.add_tokens)):
        written = [tables.tokens[i] for i in tables.ids_of(kind)]
        add([AddedToken(token, normalized=False) for token in written if backend.token_to_id(token) is not None])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, add_bos_token=tables.add_begin, **tables.named
    )
    tokenizer.chat_template = tables.chat_template
    return tokenizer


def _read_tables(gguf_file: Path) -> _Tables:
    fields = GGUFReader(gguf_file).fields

    def field(name: str, default: Any) -> Any:
        return fields[name].contents() if name in fields else default

    tokens = field("tokenizer.ggml.tokens", [])
    parts = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: field(f"tokenizer.ggml.{part}_token_id", None) for name, part in parts.items()}
    return _Tables(
        kind=field("tokenizer.ggml.model", ""),
        rule=field("tokenizer.ggml.pre", "default"),
        tokens=tokens,
        types=field("tokenizer.ggml.token_type", []),
        scores=field("tokenizer.ggml.scores", []),
        merges=field("tokenizer.ggml.merges", []),
        named={name: tokens[i] for name, i in ids.items() if i is not None},
        add_space=field("tokenizer.ggml.add_space_prefix", True),
        add_begin=field("tokenizer.ggml.add_bos_token", False),
        chat_template=field("tokenizer.chat_template", None),
    )


def _check_tables(tables: _Tables, gguf_file: Path) -> None:
    num_tokens = len(tables.tokens)
    if tables.kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        why = f"its kind is {tables.kind!r}, not {_BYTE_LEVEL} or {_SENTENCEPIECE}"
    elif tables.kind == _BYTE_LEVEL and tables.rule not in _RULES:
        why = f"how it cuts a text is called {tables.rule!r}, not {' or '.join(_RULES)}"
    elif tables.kind == _SENTENCEPIECE and tables.add_space:
        why = "it puts a space before each text"
    elif not num_tokens or len(set(tables.tokens)) != num_tokens:
        why = f"of its {num_tokens} tokens, {len(set(tables.tokens))} differ"
    elif len(tables.types) != num_tokens:
        why = f"it has {num_tokens} tokens and {len(tables.types)} types of tokens"
    elif tables.kind == _SENTENCEPIECE and len(tables.scores) != num_tokens:
        why = f"it has {num_tokens} tokens and {len(tables.scores)} scores"
    elif tables.kind == _BYTE_LEVEL and not tables.merges:
        why = "it has no merges"
    else:
        return
    raise UserError("the GGUF file's tokenizer cannot be built", where=str(gguf_file), why=why)


_RULES = {"smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]}
"""How byte-level BPE cuts a text before merges, by the file's name of it."""


def _byte_level(tables: _Tables) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tables.tokens)}
    left_right = [tuple(merge.split(" ", 1)) for merge in tables.merges]
    backend = Tokenizer(BPE(vocabulary, left_right))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_RULES[tables.rule])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tables: _Tables) -> Tokenizer:
    """A SentencePiece model of the BPE kind: it has no merges but scores, which say which token is made first.

    A token that its author defined stands as it is written in a text, before all others. Those of spaces alone are found among
    the marks for spaces instead, as what else looks for them there has them so.
    """
    tokens = [_SPACE * len(token) if set(token) == {" "} else token for token in tables.tokens]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tables.named.get("unk_token")
    backend = Tokenizer(
        BPE(vocabulary, list(_merges(tables, tokens)), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges(tables: _Tables, tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each way to make a token of two others, in the order of the tokens' scores, for one token the longest left part first."""
    ordered = tables.ids_of(TokenType.USER_DEFINED)
    ordered += sorted(tables.ids_of(TokenType.NORMAL), key=lambda i: -tables.scores[i])
    made = [tokens[i] for i in ordered]
    parts = set(made)
    for token in made:
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in parts and token[cut:] in parts:
                yield token[:cut], token[cut:]
