"""Functions of the user's own, from their files.

Owns: loading and calling them. Refuses to know: what they compute, whether it is any good (``algorithms.own_checks``). Always
holds: a file is run once in a process, with its own folder to import from; whatever is wrong with it is one user error that
names the setting, the file and the machine, and shows none of our own frames.
"""

import hashlib
import importlib.util
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meshloom.config.errors import RunFault, UserError
from meshloom.config.own import OWN_CHOICES, OwnName
from meshloom.config.settings import AlgorithmSettings
from meshloom.config.user_file import Lack, told

_FORMS = {
    "advantage": "def f(batch): of a meshloom.algorithms.advantages.Batch; gives advantages_M, or (advantages_M, returns_M)",
    "policy_loss": "def f(inputs, settings): of PolicyInputs and PolicySettings; gives the loss of each token, [T]",
    "kl_estimator": "def f(logprob_T, reference_logprob_T, mask_T): gives the divergence of each token, [T]",
}
_SHOWN = 200
"""Characters of what a function returned."""


class OwnFunction:
    """A function of the user's own, and how its faults are told.

    Args:
        name: ``file.py:function``.
        setting: that names it.
        kind: of its faults.
        when: of a call, for its faults.

    Raises:
        UserError: as ``load_own``.
    """

    def __init__(self, name: str, setting: str, kind: type[UserError] = RunFault, when: str = "in the run") -> None:
        self.function = load_own(name, setting)
        self._name, self._setting, self._kind, self._when = name, setting, kind, when

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives.

        Raises:
            RunFault: or another kind, if it raises; it shows the user's frames.
        """
        try:
            return self.function(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a user's function raises is the reason it cannot be used
            file = self._name.rpartition(":")[0]
            why = told(error, Path(file).resolve())
            raise self.fault(f"it raises {type(error).__name__} {self._when}", why) from error

    def fault(self, what: str, why: str = "") -> UserError:
        fix = _FORMS[self._setting.rpartition(".")[2]]
        return self._kind(f"{self._name}: {what}", where=f"{self._setting}={self._name}", why=why, fix=fix)

    def require(self, values: Any, count: int, what: str) -> Tensor:
        """The values, if they are so many floats.

        Raises:
            RunFault: or another kind, if they are not; it shows what was returned.
        """
        if not isinstance(values, Tensor):
            raise self._wrong(f"it gives {type(values).__name__} for {what}, not a tensor", values)
        if values.shape != (count,):
            raise self._wrong(f"it gives the shape {tuple(values.shape)} for {what}, on {count} tokens", values)
        if not values.is_floating_point():
            raise self._wrong(f"it gives {values.dtype} for {what}, not floats", values)
        return values

    def require_finite(self, values: Any, count: int, what: str) -> Tensor:
        """The same, and that each is finite. Waits for the device."""
        checked = self.require(values, count, what)
        if not bool(torch.isfinite(checked).all()):
            raise self._wrong(f"it gives NaN or infinity for {what}", values)
        return checked

    def _wrong(self, what: str, returned: Any) -> UserError:
        text = " ".join(repr(returned).split())
        return self.fault(what, f"it returned {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}")


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
    if (fault := own.lacking()) is not None:
        where = f"{setting}={name}, on {socket.gethostname()}"
        fix = f"{fault.fix}; every node needs the file" if fault.lack is Lack.FILE else fault.fix
        raise UserError(fault.what, where=where, why=fault.why, fix=fix)
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
            f"{path} raises {type(error).__name__} when it is imported",
            where=setting,
            why=told(error, path),
            fix="make the file import without an error",
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
