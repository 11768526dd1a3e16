"""What a run would be refused for before its first step, beside its plan: packages of loggers, code of the user.

Owns: which of that ``meshloom plan`` tries. Refuses to know: how it is tried. Always holds: what is wrong is said in the words
of the run; code of the user's is imported in processes that can be killed, and meets no data; what the plan refuses already is
not tried. The first rows of the data are rendered as prompts where the model's tokenizer is here.

Codes: U001 a logger, U002 a reward function, U003 an environment, U004 a function of the algorithm, U005 the first prompts;
a warning: D007 a model without a tokenizer.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

from meshloom.config.errors import UserError
from meshloom.config.own import OWN_CHOICES, OwnName
from meshloom.config.problems import Problem
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.killable.pool import START_DEADLINE_S

_RENDER_DEADLINE_S = 600.0
"""Seconds for a few prompts, most of them for what is imported: no code of the user's runs."""


class FirstPrompts:
    """The first prompts, rendered beside all else, as their process imports for seconds. Use it as a context manager.

    Args:
        settings: of the run, which may not be planned yet.
    """

    def __init__(self, settings: TrainSettings | SftSettings | EvalSettings) -> None:
        from meshloom.killable.pool import try_loading
        from meshloom.prompts_worker import PromptsWorker, Rendering, can_render

        self._dropped, self._thread = threading.Event(), ThreadPoolExecutor(1)
        self._rendered: Future[Mapping[str, Any]] | None = None
        if can_render(settings):
            given = PromptsWorker, Rendering(settings), _RENDER_DEADLINE_S, self._dropped.is_set
            self._rendered = self._thread.submit(try_loading, *given)

    def problems(self, known: set[str]) -> Iterator[Problem]:
        """What is wrong with them; nothing where it is known already.

        Args:
            known: settings that the plan refuses.
        """
        if self._rendered is None or any(path.startswith(("data", "model.path", "environment")) for path in known):
            return
        try:
            self._rendered.result()
        except UserError as error:
            yield _problem("U005", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._dropped.set()
        self._thread.shutdown()


def tried(
    settings: TrainSettings | SftSettings | EvalSettings,
    problems: Sequence[Problem],
    prompts: FirstPrompts,
    *,
    start_deadline_s: float = START_DEADLINE_S,
) -> Iterator[Problem]:
    """What is wrong besides.

    Args:
        settings: of the run.
        problems: that its plan has.
        prompts: that are being rendered.
        start_deadline_s: seconds that a file of the user's may take to be imported.
    """
    known = {problem.where.partition(" ")[0] for problem in problems}
    if not isinstance(settings, EvalSettings):
        yield from _loggers(settings)
    if isinstance(settings, SftSettings):
        yield from prompts.problems(known)
        return
    yield from _rewards(settings, known, start_deadline_s)
    of_environment = list(_environment(settings, known, start_deadline_s))
    yield from of_environment or prompts.problems(known)
    if isinstance(settings, TrainSettings):
        yield from _own_functions(settings, known, start_deadline_s)


def not_tried(settings: TrainSettings | SftSettings | EvalSettings, found: Sequence[Problem]) -> Iterator[Problem]:
    """What to warn of, as it could not be tried: prompts of a model without a tokenizer, whose weights are there.

    Args:
        settings: of the run.
        found: problems and warnings of its plan.
    """
    from meshloom.prompts_worker import can_render

    folder = Path(settings.model.path)
    if any(problem.where.startswith("model.path") for problem in found) or not (folder / "config.json").is_file():
        return
    if not can_render(settings):
        what = f"{folder} has no tokenizer: a run refuses it, and no prompt could be rendered beforehand"
        fix = "copy tokenizer.json and tokenizer_config.json there"
        yield Problem(code="D007", what=what, where="model.path", fix=fix)


def is_of_this_machine(problem: Problem) -> bool:
    """Whether it may well be right where the run will be: a package that is missing here."""
    return "No module named" in f"{problem.what} {problem.why}"


def _loggers(settings: TrainSettings | SftSettings) -> Iterator[Problem]:
    from meshloom.observe.loggers import look_for_loggers

    for name in dict.fromkeys(settings.logging.loggers):
        try:
            look_for_loggers([name])
        except UserError as error:
            yield _problem("U001", error)


def _rewards(settings: TrainSettings | EvalSettings, known: set[str], deadline_s: float) -> Iterator[Problem]:
    from meshloom.rewards.functions import refusals

    columns = partial(_columns, settings)
    for error in refusals(settings.reward, columns, known=known, start_deadline_s=deadline_s):
        yield _problem("U002", error)


def _columns(settings: TrainSettings | EvalSettings) -> Collection[str] | None:
    """What all of the first rows have beside the prompt; none where rows cannot be read here."""
    from meshloom.data.rows import RowNames
    from meshloom.data.sources import load_rows
    from meshloom.prompts_worker import some_of, sources_of

    sources = [source for _, source in sources_of(settings)]
    if any(source.dataset is not None for source in sources):
        return None
    try:
        rows = [row for source in sources for some in some_of(source) for row in load_rows(some, settings.data)]
    except UserError:  # told elsewhere
        return None
    return RowNames.of(rows).columns


def _environment(settings: TrainSettings | EvalSettings, known: set[str], deadline_s: float) -> Iterator[Problem]:
    if settings.environment is None or any(path.startswith("environment") for path in known):
        return
    from meshloom.environments.pool import EnvironmentWorker, tool_schemas, worker_setup
    from meshloom.killable.pool import try_loading

    try:
        if settings.environment.tools:
            tool_schemas(settings.environment, deadline_s)
        else:
            try_loading(EnvironmentWorker, worker_setup(settings.environment), deadline_s)
    except UserError as error:
        yield _problem("U003", error)


def _own_functions(settings: TrainSettings, known: set[str], deadline_s: float) -> Iterator[Problem]:
    given = [f"algorithm.{key}" for key in OWN_CHOICES if OwnName.of(getattr(settings.algorithm, key)) is not None]
    if not given or any(path in known for path in given):
        return
    from meshloom.killable.pool import try_loading
    from meshloom.own_worker import OwnWorker

    try:
        try_loading(OwnWorker, settings.algorithm, deadline_s)
    except UserError as error:
        yield _problem("U004", error)


def _problem(code: str, error: UserError) -> Problem:
    return Problem(code=code, what=error.what, where=error.where, why=error.why, fix=error.fix)
