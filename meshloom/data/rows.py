"""Records that prompt sources produce."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem, before templates and tokens.

    Args:
        index: number of the row in its source, counted from 0 over all files.
        prompt: a string, or a chat as a list of {role, content}.
        answer: ground truth, a JSON value; none where the reward needs none.
        response: a worked response, for supervised fine-tuning.
        data_source: name that tells reward functions where the row is from.
        extra: further columns (``extra_info`` in verl's format).
    """

    index: int
    prompt: str | list[dict[str, Any]]
    answer: Any = None
    response: str | None = None
    data_source: str = ""
    extra: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row rendered and tokenised: exactly the ids the model will see."""

    row: Row
    ids: list[int]
    text: str
