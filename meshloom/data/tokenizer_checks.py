"""Whether a tokenizer can be right: a broken one makes a model answer nonsense, and nothing else tells.

Owns: what is asked of it. Refuses to know: the model, where the tokenizer came from. Always holds: only what no working
tokenizer does is refused; a vocabulary with too few words to tell is let be.
"""

import re
from typing import TYPE_CHECKING

from meshloom.config.errors import UserError
from meshloom.plan.markers import markers_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = re.compile(r"[Ġ▁][a-z]{3,12}")
"""A token of one word with the space before it, as byte-level BPE and SentencePiece write it."""
_LOOKED_AT, _FEWEST = 4096, 20
_FIX = "copy all files of the model's own tokenizer there; a folder of fetch-model: fetch it again"


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", where: str) -> None:
    """Check that words and markers which are tokens are not cut.

    Args:
        tokenizer: with its chat template.
        where: the setting or folder that names it.

    Raises:
        UserError: if most words of the vocabulary are cut, or a marker of the chat template is.
    """
    _check_words(tokenizer, where)
    _check_markers(tokenizer, where)


def _check_words(tokenizer: "PreTrainedTokenizerBase", where: str) -> None:
    """Ask for some words that are tokens, spread over the vocabulary."""
    num_tokens = len(tokenizer)
    looked_at = range(0, num_tokens, -(-num_tokens // _LOOKED_AT))
    found = zip(looked_at, tokenizer.convert_ids_to_tokens(list(looked_at)), strict=True)
    words = [i for i, token in found if token is not None and _WORD.fullmatch(token)]
    if len(words) < _FEWEST:
        return
    texts = [tokenizer.decode([i]) for i in words]
    read = tokenizer(texts, add_special_tokens=False).input_ids
    cut = [(text, ids) for text, i, ids in zip(texts, words, read, strict=True) if ids != [i]]
    if 2 * len(cut) > len(words):
        text, ids = cut[0]
        raise UserError(
            "the tokenizer cuts words that it has tokens for",
            where=where,
            why=f"{len(cut)} of {len(words)} words, such as {text!r} into {tokenizer.convert_ids_to_tokens(ids)}; "
            "the model has not learned them so",
            fix=_FIX,
        )


def _check_markers(tokenizer: "PreTrainedTokenizerBase", where: str) -> None:
    """Ask for the chat template's markers that are in the vocabulary."""
    for marker in markers_in(str(tokenizer.chat_template or "")):
        known = tokenizer.convert_tokens_to_ids(marker)
        is_token = known is not None and tokenizer.convert_ids_to_tokens(known) == marker
        ids = tokenizer(marker, add_special_tokens=False).input_ids
        if is_token and ids != [known]:
            raise UserError(
                f"the tokenizer cuts {marker}, which the chat template writes, though it is a token",
                where=where,
                why=f"it becomes {tokenizer.convert_ids_to_tokens(ids)}; the model has not learned it so",
                fix=_FIX,
            )
