"""Code of the user that worker processes run: a function or class of a file.

Owns: how such a thing is named, read and loaded. Refuses to know: what it is for. Always holds: the file is read once, when the
run begins, and all workers run that text; it is executed in worker processes only.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshloom.config.errors import UserError
from meshloom.config.user_file import lacking, told


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """A function or class as it travels to workers.

    Args:
        setting: that names it, for errors.
        path: of the file.
        name: in the file.
        source: the file's bytes.
    """

    setting: str
    path: str
    name: str
    source: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def read_code(place: str, setting: str) -> UserCode:
    """The code that ``file.py:name`` names. Runs none of it.

    Raises:
        UserError: if that is no such name, or the file cannot be read or has no such thing.
    """
    path, colon, name = place.rpartition(":")
    if not colon or not path.endswith(".py") or not name:
        raise UserError(
            f"{place!r} names no function of a file",
            where=setting,
            fix=f"write it as file.py:name: {setting}=code.py:name",
        )
    if (fault := lacking(Path(path), name)) is not None:
        raise UserError(fault.what, where=setting, why=fault.why, fix=fault.fix)
    source = Path(path).read_bytes()
    return UserCode(setting=setting, path=str(Path(path).resolve()), name=name, source=source)


def load_code(code: UserCode, loaded: dict[str, ModuleType]) -> Callable[..., Any]:
    """The function or class. Runs the user's code: for worker processes only.

    Args:
        code: to load.
        loaded: modules of files that were run before; a file is run once.

    Raises:
        UserError: if the file raises, or has no such thing.
    """
    if code.path not in loaded:
        loaded[code.path] = _run_file(code, f"meshloom_user_{len(loaded)}")
    found = vars(loaded[code.path]).get(code.name)
    if not callable(found):
        names = [name for name, value in vars(loaded[code.path]).items() if _is_own(value, loaded[code.path])]
        raise UserError(
            f"the file has no function or class {code.name!r}",
            where=f"{code.setting}: {code}",
            why=f"it has: {', '.join(names[:10])}" if names else "it has none",
            fix="name one of the file",
        )
    return found


def _is_own(value: object, module: ModuleType) -> bool:
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__


def _run_file(code: UserCode, name: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = code.path
    sys.modules[name] = module
    folder = str(Path(code.path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        exec(compile(code.source, code.path, "exec"), vars(module))
    except BaseException as error:  # whatever a user's file raises, SystemExit too, is the reason it cannot be used
        raise UserError(
            f"the file raises {type(error).__name__} when it is imported",
            where=f"{code.setting}: {code.path}",
            why=told(error, code.path),
            fix="make the file import without an error",
        ) from error
    return module


def require_call(function: Callable[..., Any], code: UserCode, arguments: Mapping[str, Any]) -> None:
    """Check that a function or class takes keyword arguments.

    Raises:
        UserError: with its signature.
    """
    try:
        signature = inspect.signature(function)
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{code.name!r} cannot be called with environment.arguments",
            where=f"{code.setting}: {code}",
            why=str(error),
            fix=f"arguments given: {sorted(arguments) or 'none'}",
        ) from error
