"""The process in which a few prompts are rendered before there is a run.

Owns: which rows those are. Refuses to know: how a row becomes tokens (``data.prompts``, ``loop.environments``), deadlines,
sockets (``killable.serving``). Always holds: what is wrong is said in the words of the run, whose code renders them; nothing is
refused that the run would drop; torch is loaded there alone. The setup is the settings of the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.config.errors import UserError
from meshloom.config.settings import EvalSettings, Overlong, SftDataSettings, SftSettings, SourceSettings, TrainSettings
from meshloom.data.rows import Row
from meshloom.killable import serving
from meshloom.killable.process import Worker
from meshloom.plan.count import count_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from meshloom.loop.environments import RunPrompts

AnySettings = TrainSettings | SftSettings | EvalSettings
ROWS = 16
"""Rows of each file that are rendered."""
_NO_BOUND = 2**31
_ANY = Row(index=0, prompt="a", response="b", extra={})
"""Stands for the rows of a dataset, which is not read beforehand: settings of the template are tried with it."""


@dataclass(frozen=True)
class Rendering:
    """What is to be rendered: the prompts of a run."""

    settings: AnySettings

    def __str__(self) -> str:
        return self.settings.model.path


class PromptsWorker(Worker):
    """A process that renders a few prompts while it loads."""

    module = "prompts_worker"
    called, setting, loading = (
        "the tokenizer with the first prompts",
        "model.path",
        "while it renders the first prompts",
    )


def can_render(settings: AnySettings) -> bool:
    """Whether the tokenizer of a run is there."""
    folder = Path(settings.model.path)
    there = (folder / name for name in ("tokenizer.json", "tokenizer_config.json"))
    return isfile(folder / "config.json") and any(map(isfile, there))  # Path's own fails for names that are too long


def serve(descriptor: int) -> None:
    """Render the prompts of a setup, and wait for the end."""
    serving.serve(descriptor, _Rendered)


class _Rendered(serving.LoadOnly):
    """Answers nothing once its prompts were rendered."""

    def __init__(self, rendering: Rendering) -> None:
        render_some(rendering.settings)


def render_some(settings: AnySettings) -> None:
    """Render the first rows of each file as the run would.

    Raises:
        UserError: as the run would.
    """
    from meshloom.data.tokenizer import load_tokenizer, require_tokens
    from meshloom.loop.environments import run_prompts
    from meshloom.plan.model_folder import read_model_folder

    tokenizer = load_tokenizer(settings.model.path, needs_weights=False)
    prompts = None if isinstance(settings, SftSettings) else run_prompts(settings, tokenizer)
    tokens = read_model_folder(Path(settings.model.path), needs_weights=False).text_config.get("vocab_size")
    for place, source in sources_of(settings):
        for some in some_of(source):
            with _said_of(some, among=source, place=place if isinstance(settings, SftSettings) else ""):
                found = _rendered(settings, some, prompts, tokenizer, bounded=_is_whole(source))
            if isinstance(tokens, int):
                require_tokens(tokens, found)


def _rendered(
    settings: AnySettings,
    source: SourceSettings,
    prompts: "RunPrompts | None",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    bounded: bool,
) -> list[list[int]]:
    """Tokens of a source's rows; where some rows were left out, overlong ones are not dropped, which may leave none."""
    from meshloom.data.prompts import render_supervised
    from meshloom.data.sources import load_rows

    data = settings.data
    if data.overlong_prompts is Overlong.DROP and not bounded:
        data = data.model_copy(update={"max_prompt_tokens": _NO_BOUND})
    rows = [_ANY] if source.dataset is not None else load_rows(source, settings.data)
    if prompts is None:
        assert isinstance(data, SftDataSettings)
        return [example.ids for example in render_supervised(rows, tokenizer, data)]
    return [prompt.ids for prompt in replace(prompts, data=data).render(rows).prompts]


@contextmanager
def _said_of(source: SourceSettings, *, among: SourceSettings, place: str) -> Iterator[None]:
    """Tell what is wrong with a source with its file, where there are several, and with the setting where the run does."""
    try:
        yield
    except UserError as error:
        file = f"{source.files[0]}, " if len(among.files) > 1 and error.where.startswith("row") else ""
        setting = f"{place}, " if place == "data.validation" else ""
        where = f"{setting}{file}{error.where}"
        raise UserError(error.what, where=where, why=error.why, fix=error.fix) from error


def sources_of(settings: AnySettings) -> list[tuple[str, SourceSettings]]:
    """The sources of a run's rows, each with its setting."""
    given = (
        {settings.source_path: settings.source}
        if isinstance(settings, EvalSettings)
        else {"data.train": settings.data.train, "data.validation": settings.data.validation}
    )
    return [(place, source) for place, source in given.items() if source is not None]


def some_of(source: SourceSettings) -> list[SourceSettings]:
    """The first rows of a source, those of each file apart; files that ``max_rows`` leaves out are left out here."""
    bound = ROWS if source.max_rows is None else min(ROWS, source.max_rows)
    if not source.files:
        return [source.model_copy(update={"max_rows": bound})]
    found, before = [], 0
    for name in source.files:
        left = None if source.max_rows is None else source.max_rows - before
        if left is None or left > 0:
            rows = bound if left is None else min(bound, left)
            found.append(source.model_copy(update={"files": (name,), "max_rows": rows}))
        before += count_rows(SourceSettings(files=(name,))) or 0
    return found


def _is_whole(source: SourceSettings) -> bool:
    """Whether all rows of a source are rendered together."""
    count = count_rows(source)
    return len(source.files) < 2 and count is not None and count <= ROWS
