"""Who is where in a phase: moves each part of each model as the plan says, and checks that it is there.

Owns: the moves at the boundaries of phases, and the line about memory that each boundary leaves. Refuses to know: how bytes are
copied, what a phase computes. Always holds: after ``enter`` every part is where the plan has it in that phase, by its state and
by its bytes, or the run stops and names the part.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from meshloom.config.environment import offload_folder
from meshloom.config.errors import UserError
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.observe.format import bytes_text
from meshloom.observe.memory import memory_now
from meshloom.plan.residency import Phase, Residency
from meshloom.plan.stays import Part, Stay
from meshloom.train.model import TrainedModel

if TYPE_CHECKING:  # it brings torch.distributed, which a run that moves nothing does without
    from meshloom.train.residency import ResidentModel
    from meshloom.train.streaming import OptimizerStream

_DEFAULT_FOLDER = "offload"
_RAW = (Phase.GENERATE, Phase.SYNC)
"""Phases in which weights are read without a pass of the model that would wait for them."""


class Residents:
    """The models of this process and where they are; a context, which leaves no file behind.

    Args:
        planned: every part that the plan knows of.
        models: of this process, by role. Parts of other roles are not looked at.
        folder: for what goes to disk; it is this run's own, and what an earlier process left in it is removed.
        log: takes a record at each boundary: ``step``, ``phase``, ``at`` (each part's place), seconds and bytes; may be
            changed.
        rank: of this process among those that share the folder; all of them are made before one of them enters a phase.
    """

    def __init__(
        self,
        planned: Sequence[Stay],
        models: Mapping[str, TrainedModel],
        *,
        folder: Path,
        log: Callable[[Mapping[str, Any]], None],
        rank: int = 0,
    ) -> None:
        self._planned = [stay for stay in planned if stay.role in models]
        self._folder, self.log, self._rank = folder, log, rank
        self._goes_to_disk = any(stay.moves and stay.otherwise is Residency.DISK for stay in self._planned)
        self._residents: dict[str, ResidentModel | OptimizerStream] = {}
        if moving := [stay for stay in self._planned if stay.moves]:
            self._residents = self._take_in(moving, models)

    def _take_in(
        self, moving: Sequence[Stay], models: Mapping[str, TrainedModel]
    ) -> "dict[str, ResidentModel | OptimizerStream]":
        from meshloom.train.residency import ResidentModel
        from meshloom.train.streaming import OptimizerStream

        if self._goes_to_disk:
            self._clear_folder()
        places: dict[str, dict[Part, Residency]] = {}
        for stay in moving:
            places.setdefault(stay.role, {})[stay.part] = stay.otherwise
        streamed = {stay.role: stay.otherwise for stay in moving if stay.is_streamed}
        where = {"folder": self._folder, "rank": self._rank}
        return {
            role: OptimizerStream(role, models[role].optimizer, streamed[role], device=models[role].device, **where)
            if role in streamed
            else ResidentModel(role, models[role], of_role, **where)
            for role, of_role in places.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_moving(self) -> bool:
        """Whether anything is ever moved."""
        return bool(self._residents)

    def is_away(self, role: str, part: Part, phase: Phase) -> bool:
        """Whether the plan has a part away from the device in a phase."""
        found = (stay for stay in self._planned if (stay.role, stay.part) == (role, part))
        return any(stay.at(phase) is not Residency.DEVICE for stay in found)

    def enter(self, phase: Phase, *, step: int, why: str = "") -> None:
        """Make everything be where the plan has it in a phase: first away, then here. Returns while what is fetched still
        arrives, where only passes and updates read it.

        Args:
            phase: that begins.
            step: that it belongs to.
            why: name of the boundary in the log, if it is not the phase's.

        Raises:
            RunFault: if something is elsewhere than its state says, or cannot be moved.
        """
        began = time.monotonic()
        changed = [stay for stay in self._planned if stay.moves and self._at(stay) is not stay.at(phase)]
        # What leaves first makes room.
        for stay in sorted(changed, key=lambda stay: stay.at(phase) is Residency.DEVICE):
            resident = self._residents[stay.role]
            if stay.at(phase) is Residency.DEVICE:
                resident.fetch(stay.part)
            else:
                resident.park(stay.part)
        for stay in self._planned:
            if stay.moves:
                self._residents[stay.role].require(stay.part, stay.at(phase))
                if phase in _RAW or why:
                    self._residents[stay.role].wait(stay.part)
        if phase is Phase.GENERATE:  # the cache takes what is free
            for resident in self._residents.values():
                resident.settle()
        self.log(
            {
                "step": step,
                "phase": why or str(phase),
                "at": {f"{stay.role}.{stay.part}": str(self._at(stay)) for stay in self._planned},
                "seconds": time.monotonic() - began,
                **memory_now(),
                "time": time.time(),
            }
        )

    def changed(self, role: str) -> None:
        """The parameters of a model, which are on the device, have other values that no update made."""
        if role in self._residents:
            self._residents[role].changed(Part.PARAMETERS)

    def close(self) -> None:
        """Give up host memory and files."""
        for resident in self._residents.values():
            resident.close()
        if self._goes_to_disk:
            with suppress(OSError):  # other processes still have files in it
                self._folder.rmdir()

    def _at(self, stay: Stay) -> Residency:
        return self._residents[stay.role].at[stay.part] if stay.moves else Residency.DEVICE

    def _clear_folder(self) -> None:
        """Remove what an earlier process left; the folder is made when something goes there."""
        there = _nearest(self._folder)
        try:
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it cannot be written to", str(there))
            if self._rank == 0 and self._folder.is_dir():
                shutil.rmtree(self._folder)
        except OSError as error:
            raise UserError(
                "the folder for what goes to disk cannot be used",
                where=f"offload.folder: {self._folder}",
                why=f"{there}: {error.strerror}",
                fix="another offload.folder",
            ) from error


def folder_of(settings: TrainSettings | SftSettings) -> Path:
    """The folder of a run's offloaded parts: in the settings' folder, else in ``VERL_OFFLOAD_DIR``, else in the run folder.
    Where several runs may share it, a folder of this run's own is in it."""
    run_dir = Path(settings.run_dir).absolute()
    shared = settings.offload.folder or offload_folder()
    if shared is None:
        return run_dir / _DEFAULT_FOLDER
    return Path(shared) / f"meshloom-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]}"


def check_room(
    folder: Path, planned: Sequence[Stay], models: Mapping[str, TrainedModel], ranks: Mapping[str, int] | None = None
) -> None:
    """Do nothing if a disk has room for what goes to it.

    Args:
        folder: of the run, which need not be there yet.
        planned: every part that the plan knows of.
        models: by role.
        ranks: by role, how many of this machine have a part like this one of it, and write to the same disk. Default: one.

    Raises:
        UserError: if there is too little, before anything is written.
    """
    needed = sum(
        _bytes_of(models[stay.role], stay.part) * (1 if ranks is None else ranks[stay.role])
        for stay in planned
        if stay.moves and stay.otherwise is Residency.DISK and stay.role in models
    )
    if needed and (free := shutil.disk_usage(_nearest(folder)).free) < needed:
        raise UserError(
            f"there is no room for what goes to disk: {bytes_text(needed)}",
            where=f"offload.folder: {folder}",
            why=f"{bytes_text(free)} are free there",
            fix="another offload.folder, or the host's memory (offload.ROLE.parameters=host)",
        )


def _nearest(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def _bytes_of(model: TrainedModel, part: Part) -> int:
    if part is Part.PARAMETERS:
        return sum(_own_bytes(parameter) for parameter in model.module.parameters())
    if model.optimizer is None:
        return 0
    masters = model.optimizer.masters.items()
    return sum(
        (2 if model.optimizer.parameters[name] is master else 3) * _own_bytes(master) for name, master in masters
    )


def _own_bytes(tensor: Tensor) -> int:
    """Bytes that this rank has of a tensor."""
    from torch.distributed.tensor import DTensor

    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
