"""The tokenizer of a Hugging Face folder.

Owns: loading it, and whether its tokens are the model's. Refuses to know: the model's weights, which take seconds to import
what loads them. Always holds: nothing is fetched; no code of the folder runs.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meshloom.config.errors import UserError
from meshloom.data.tokenizer_checks import check_tokenizer
from meshloom.plan.model_folder import read_model_folder


def load_tokenizer(path: str | Path, *, needs_weights: bool = True) -> PreTrainedTokenizerBase:
    """The folder's tokenizer.

    Args:
        path: the folder.
        needs_weights: whether a folder without the model's weights is refused.

    Raises:
        UserError: if there is none, it has no end token, or it cuts what are tokens (``check_tokenizer``).
    """
    folder = Path(path)
    read_model_folder(folder, needs_weights=needs_weights)
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise UserError(
            f"{folder} has no tokenizer", where="model.path", fix="copy tokenizer.json and tokenizer_config.json there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error}", where="model.path") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {folder} has no end token",
            where="model.path",
            fix="set eos_token in tokenizer_config.json",
        )
    check_tokenizer(tokenizer, f"model.path ({folder})")
    return tokenizer


def require_tokens(rows: int, samples: Iterable[Sequence[int]], setting: str = "model.path") -> None:
    """Check that a model of so many tokens has every token of the data.

    Raises:
        UserError: if the tokenizer gives tokens that the model does not have.
    """
    if (highest := max(map(max, samples))) >= rows:
        raise UserError(
            f"the tokenizer gives token {highest}, the model has {rows} tokens, counted from 0",
            where=setting,
            fix="use the tokenizer the model was made with, or resize the model's embeddings",
        )
