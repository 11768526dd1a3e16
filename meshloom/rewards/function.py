"""Which function scores.

Owns: the choice of a reward function from settings, the loading of a user's file. Refuses to know: pools, deadlines, how a
function is called (``forms``). Always holds: a user's file runs in worker processes only, and all of them run the text it had
when the run began; a function that cannot be called as announced is refused before the first sample.
"""

import difflib
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshloom.config.errors import UserError
from meshloom.config.names import RewardForm, Verifier
from meshloom.config.user_file import told
from meshloom.rewards.forms import Loaded, of_samples, with_form
from meshloom.rewards.verifiers import VERIFIERS

if TYPE_CHECKING:
    from meshloom.config.settings import RewardSettings

_CHOICES = f"reward.function: file.py:function, or one of {', '.join(VERIFIERS)}"
_MODULE = "meshloom_user_reward"
CODE_SHARE = 0.8
"""Share of a sample's deadline that the tests of a program may take; what is left is for starting and comparing."""


@dataclass(frozen=True, kw_only=True)
class FunctionSpec:
    """A reward function as it travels to workers.

    Args:
        name: a named verifier, or the function's name in the file.
        path: the user's file; none: a named verifier.
        source: the file's bytes, read once.
        kwargs: further keyword arguments of the function.
        form: how the function in the file is called; none: told by its parameters.
    """

    name: str
    path: str | None = None
    source: bytes = b""
    kwargs: Mapping[str, Any]
    form: RewardForm | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" if self.path else self.name


def choose_function(settings: "RewardSettings", data_sources: Iterable[str] = ()) -> FunctionSpec:
    """The function the settings ask for, or the verifier the data bring along. Runs none of the user's code.

    Args:
        settings: the function's name and arguments.
        data_sources: ``data_source`` of all rows, for the default.

    Raises:
        UserError: if no function is given and the data bring none; if its name or file does not exist.
    """
    kwargs = dict(settings.kwargs)
    if settings.form is not None and ":" not in (settings.function or ""):
        raise UserError(
            f"reward.form is {settings.form}, but no function of a file is named",
            where="reward.form",
            why="named functions and verifiers are called with one sample",
            fix="leave reward.form out, or set reward.function=file.py:function",
        )
    if settings.function is None:
        names = set(data_sources)
        if names and all(name.startswith("reasoning_gym/") for name in names):
            return FunctionSpec(name="reasoning_gym", kwargs=kwargs)
        raise UserError(
            "a reward function is needed",
            where="reward.function",
            why="only rows from reasoning-gym bring their own verifier",
            fix=f"set {_CHOICES}",
        )
    if settings.function == Verifier.CODE:
        return FunctionSpec(name=settings.function, kwargs=code_arguments(settings))
    if settings.function in VERIFIERS:
        return FunctionSpec(name=settings.function, kwargs=kwargs)
    path, colon, name = settings.function.rpartition(":")
    if not colon or not path or not name:
        near = difflib.get_close_matches(settings.function, VERIFIERS, n=1, cutoff=0.5)
        raise UserError(
            f"there is no verifier {settings.function!r}",
            where="reward.function",
            why="a function of your own is named with its file: rewards.py:score",
            fix=f"did you mean {near[0]}?" if near else f"set {_CHOICES}",
        )
    return FunctionSpec(
        name=name, path=str(Path(path).resolve()), source=_read(Path(path)), kwargs=kwargs, form=settings.form
    )


def code_arguments(settings: "RewardSettings") -> dict[str, Any]:
    """Arguments of the verifier ``code``: ``reward.code``, and the seconds for all tests of a sample.

    Raises:
        UserError: if running programs was not asked for, or arguments are given elsewhere.
    """
    if not settings.code.enabled:
        raise UserError(
            "the verifier code runs programs that the model wrote, and that was not asked for",
            where="reward.code.enabled",
            why="such programs may try anything; what separates them from this machine is in docs/code-rewards.md",
            fix="set reward.code.enabled=true",
        )
    if settings.kwargs:
        raise UserError(
            "the verifier code has settings of its own", where="reward.kwargs", fix="set them as reward.code.…"
        )
    return {**settings.code.model_dump(mode="json"), "budget_s": CODE_SHARE * settings.deadline_s}


def code_rewards(settings: "RewardSettings") -> "dict[str, RewardSettings]":
    """The rewards that run programs: as settings of their own, by the path of those they are from."""
    found = {"reward": settings} if settings.function == Verifier.CODE else {}
    for name, part in settings.components.items():
        if part.function == Verifier.CODE:
            own = {
                "function": part.function,
                "kwargs": part.kwargs,
                "deadline_s": part.deadline_s or settings.deadline_s,
            }
            found[f"reward.components.{name}"] = settings.model_copy(update=own)
    return found


def _read(path: Path) -> bytes:
    if path.suffix != ".py":
        raise UserError(
            "the reward file is no Python file", where=f"reward.function: {path}", fix="name a file that ends in .py"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            "the reward file cannot be read",
            where=f"reward.function: {path}",
            why=str(error),
            fix=f"paths are relative to {Path.cwd()}",
        ) from error


def load_function(spec: FunctionSpec) -> Loaded:
    """The scoring function, ready to be called. Runs the user's code: for worker processes only.

    Raises:
        UserError: if the file raises, has no such function, or the function takes other arguments.
    """
    if spec.path is None:
        return _load_verifier(spec)
    module = _run_file(spec)
    function = vars(module).get(spec.name)
    if not callable(function):
        raise UserError(
            f"the reward file has no function {spec.name!r}",
            where=f"reward.function: {spec}",
            why=_functions_in(module, spec.name),
            fix="name a function of the file",
        )
    return with_form(function, spec)


def _load_verifier(spec: FunctionSpec) -> Loaded:
    verifier = VERIFIERS[spec.name]
    try:
        inspect.signature(verifier).bind(**spec.kwargs)
        return of_samples(spec.name, verifier(**spec.kwargs))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the verifier {spec.name} cannot be used with these arguments",
            where="reward.kwargs",
            why=str(error),
            fix=f"it is {spec.name}{inspect.signature(verifier)}".split(" ->")[0],
        ) from error


def _run_file(spec: FunctionSpec) -> ModuleType:
    module = ModuleType(_MODULE)
    module.__file__ = spec.path
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(Path(str(spec.path)).parent))
    try:
        exec(compile(spec.source, str(spec.path), "exec"), vars(module))
    except BaseException as error:  # whatever a user's file raises, SystemExit too, is the reason it cannot be used
        raise UserError(
            f"the reward file raises {type(error).__name__} when it is imported",
            where=f"reward.function: {spec.path}",
            why=told(error, str(spec.path)),
            fix="make the file import without an error",
        ) from error
    return module


def _functions_in(module: ModuleType, wanted: str) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and _module_of(value) == _MODULE]
    if not names:
        return "it defines no function"
    names.sort(key=lambda name: -difflib.SequenceMatcher(None, wanted, name).ratio())
    return f"it has: {', '.join(names[:10])}"


def _module_of(value: object) -> str | None:
    """Name of the module a function or class was defined in."""
    return value.__module__ if inspect.isfunction(value) or inspect.isclass(value) else None
