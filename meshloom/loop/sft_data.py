"""The worked examples of a supervised run: those that are learned, and those that are held out.

Owns: reading both, and making samples of them. Refuses to know: models, losses, what comes after what. Always holds: a row of
either source is rendered alike; what is wrong with one is told with the setting that names its source.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedTokenizerBase

from meshloom.config.errors import UserError
from meshloom.config.settings import SftSettings, SourceSettings
from meshloom.data.prompts import Supervised, render_supervised
from meshloom.data.sources import load_rows
from meshloom.samples import Samples


@dataclass(frozen=True, kw_only=True)
class SftData:
    """What a supervised run reads.

    Args:
        examples: that are learned.
        held_out: that are not; empty where the settings name none.
        dropped: rows of both whose prompts were too long.
    """

    examples: list[Supervised]
    held_out: list[Supervised]
    dropped: int

    @property
    def ids(self) -> Iterator[list[int]]:
        """Tokens of each."""
        return (example.ids for example in chain(self.examples, self.held_out))

    def notices(self) -> Iterable[str]:
        """What the user is told of it."""
        if self.dropped:
            yield f"{self.dropped} prompts longer than data.max_prompt_tokens were dropped"


def load_examples(settings: SftSettings, tokenizer: PreTrainedTokenizerBase) -> SftData:
    """Read and render all rows.

    Raises:
        UserError: as ``load_rows`` and ``render_supervised``.
    """
    examples, dropped = _rendered(settings.data.train, settings, tokenizer)
    held_out: list[Supervised] = []
    if settings.data.validation is not None:
        try:
            held_out, more = _rendered(settings.data.validation, settings, tokenizer)
        except UserError as error:
            where = f"data.validation, {error.where}" if error.where else "data.validation"
            raise UserError(error.what, where=where, why=error.why, fix=error.fix) from error
        dropped += more
    return SftData(examples=examples, held_out=held_out, dropped=dropped)


def _rendered(
    source: SourceSettings, settings: SftSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Supervised], int]:
    rows = load_rows(source, settings.data)
    examples = render_supervised(rows, tokenizer, settings.data)
    return examples, len(rows) - len(examples)


def as_samples(examples: Sequence[Supervised]) -> Samples:
    """Worked examples, end to end."""
    return Samples(
        lengths=torch.tensor([len(example.ids) for example in examples]),
        tokens={
            "ids": torch.tensor([token for example in examples for token in example.ids]),
            "mask": torch.tensor([learned for example in examples for learned in example.mask]),
        },
    )


def lengths_of(examples: Sequence[Supervised]) -> dict[str, float]:
    """Tokens of prompts and of what is learned, as a run with rollouts counts them."""
    learned = [sum(example.mask) for example in examples]
    total = sum(len(example.ids) for example in examples)
    return {
        "prompt_tokens_mean": (total - sum(learned)) / len(examples),
        "response_tokens_mean": sum(learned) / len(examples),
        "response_tokens_max": float(max(learned)),
    }
