"""Functions of the user's own, from their files.

Owns: loading them. Refuses to know: what they compute, whether it is any good (``algorithms.own_checks``). Always holds: a
file is run once in a process, with its own folder to import from; whatever is wrong with it is one user error that names the
setting, the file and the machine.
"""

import hashlib
import importlib.util
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from meshloom.config.errors import UserError
from meshloom.config.own import OWN_CHOICES, OwnName
from meshloom.config.settings import AlgorithmSettings


@cache
def load_own(name: str, setting: str) -> Callable[..., Any]:
    """The function that ``file.py:function`` names. Runs the file.

    Args:
        name: relative names are relative to the current directory.
        setting: that names it, for errors.

    Raises:
        UserError: if there is no such file or function, or the file raises.
    """
    own = OwnName.of(name)
    if own is None:
        raise ValueError(f"{name!r} names no file")
    if fault := own.fault():
        where = f"{setting}={name}, on {socket.gethostname()}"
        fix = f"paths are relative to the current directory, {Path.cwd()}; every node needs the file"
        raise UserError(fault, where=where, fix=fix)
    function = getattr(_module(own.path.resolve(), setting), own.function, None)
    if not callable(function):
        raise UserError(
            f"{own.function!r} in {own.path} is no function", where=f"{setting}={name}", fix="name a function"
        )
    return function


@cache
def _module(path: Path, setting: str) -> ModuleType:
    """The file as a module of a name of its own."""
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(f"meshloom_own_{digest}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported", where=setting, fix="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises is the reason it cannot be used
        raise UserError(
            f"{path} raises {type(error).__name__} when it is imported", where=setting, why=told(error)
        ) from error
    return module


def digests(settings: AlgorithmSettings) -> dict[str, str]:
    """What the files of functions of the user's own hold, by the setting's name: a digest."""
    names = {key: OwnName.of(getattr(settings, key)) for key in OWN_CHOICES}
    return {
        key: hashlib.blake2b(own.path.read_bytes(), digest_size=16).hexdigest()
        for key, own in names.items()
        if own is not None
    }


def told(error: BaseException) -> str:
    """The last lines of an error in a user's code."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n    ".join(["its last lines:", *(line[:300] for line in lines[-6:])])
