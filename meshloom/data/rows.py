"""Records that prompt sources produce."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem, before templates and tokens.

    Args:
        index: number of the row in its source, counted from 0 over all files.
        prompt: a string, or a chat as a list of {role, content}.
        answer: ground truth, a JSON value; none where the reward needs none.
        answer_name: what its column, or the last part of a dotted name, is called; empty where there is none.
        response: a worked response, for supervised fine-tuning.
        data_source: name that tells reward functions where the row is from.
        extra: further columns (``extra_info`` in verl's format).
    """

    index: int
    prompt: str | list[dict[str, Any]]
    answer: Any = None
    answer_name: str = ""
    response: str | None = None
    data_source: str = ""
    extra: Mapping[str, Any]

    @property
    def columns(self) -> dict[str, Any]:
        """What there is beside the prompt, by name: further columns, the answer, and where the row is from if it says so."""
        own = {self.answer_name: self.answer} if self.answer_name else {}
        source = {"data_source": self.data_source} if self.data_source else {}
        return {**self.extra, **source, **own}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row rendered and tokenised: exactly the ids the model will see."""

    row: Row
    ids: list[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class RowNames:
    """What a run's rows are called, and what they call what they hold.

    Args:
        sources: ``data_source`` of all rows.
        columns: those beside the prompt that every row has.
    """

    sources: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "RowNames":
        """Of some rows."""
        sources: set[str] = set()
        columns: set[str] | None = None
        for row in rows:
            sources.add(row.data_source)
            names = row.columns.keys()
            columns = set(names) if columns is None else columns & names
        return cls(sources=frozenset(sources), columns=frozenset(columns or ()))
