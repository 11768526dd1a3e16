"""The frame of a run: folder, clock, display, loggers, checkpoints, and the wish to stop.

Owns: everything about a run that is the same whatever it trains. Refuses to know: models' insides, algorithms. Always
holds: a record is written before it is shown; a checkpoint is a consistent cut at the end of a step, and records after
it are dropped on resume.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshloom.config.errors import UserError
from meshloom.config.settings import CheckpointSettings, LoggingSettings, SftSettings, TrainSettings
from meshloom.loop.interrupt import Interrupt
from meshloom.observe.display import open_display
from meshloom.observe.ending import finished_lines, has_records, interrupted_lines, report_line, stopped_lines
from meshloom.observe.loggers import LoggerContext, open_loggers
from meshloom.observe.peaks import PhaseMemory
from meshloom.observe.records import read_metrics
from meshloom.observe.report import write_report
from meshloom.observe.run_folder import RunFolder, RunState
from meshloom.observe.timing import PhaseClock, peak_memory
from meshloom.train.checkpoint_store import CheckpointStore, latest_checkpoint

STATE, TENSORS = "state.json", "state.safetensors"
_CPU_STATE, _GPU_STATE = "torch_random_state", "torch_cuda_random_state"


class Snapshot(Protocol):
    """A model between two steps: see ``train.snapshot.ModelSnapshot``."""

    @property
    def num_bytes(self) -> int: ...

    def write(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Cut:
    """What a checkpoint holds besides the model: JSON values and tensors."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


def read_cut(checkpoint: Path) -> Cut:
    """The cut a checkpoint holds."""
    return Cut(json.loads((checkpoint / STATE).read_text()), load_file(checkpoint / TENSORS))


class Session:
    """A run while it is on; a context.

    Args:
        folder: the run folder, held by this process.
        settings: of the run.
        steps: of the whole run.
        first_step: steps done before, by the checkpoint resumed from.

    ``saved_step`` is the step of the newest checkpoint, 0 before the first.
    """

    def __init__(
        self, folder: RunFolder, settings: TrainSettings | SftSettings, *, steps: int, first_step: int
    ) -> None:
        self.folder, self.settings, self.steps, self.saved_step = folder, settings, steps, first_step
        self._first_step, self._began = first_step, time.monotonic()
        checkpoint: CheckpointSettings = settings.checkpoint
        logging: LoggingSettings = settings.logging
        self._resources = ExitStack()
        try:
            self._resources.enter_context(folder)
            # Left before the folder is closed: what was given to be written is written.
            self._writer = self._resources.enter_context(ThreadPoolExecutor(1, thread_name_prefix="samples"))
            self._writing: Future[None] | None = None
            self.store = CheckpointStore(
                folder.checkpoints, keep_last=checkpoint.keep_last, keep_best=checkpoint.keep_best
            )
            self._resources.callback(self.store.close)
            title = folder.path.name
            self.display = self._resources.enter_context(
                open_display(
                    title,
                    steps=steps,
                    table=logging.table,
                    first_step=first_step,
                    earlier=read_metrics(folder.path) if first_step else (),
                )
            )
            context = LoggerContext(
                run_dir=folder.path,
                project=logging.project,
                settings=settings.model_dump(mode="json"),
                resume_step=first_step if first_step else None,
            )
            self.loggers = open_loggers(logging.loggers, context)
            self._resources.callback(self.loggers.close)
            self._memory = PhaseMemory()
            self._resources.callback(self._memory.close)
            self.clock = PhaseClock(on_phase=self._enter_phase)
            self.measure_memory: Callable[[], dict[str, float]] = lambda: {"peak_memory_bytes": peak_memory()}
            """What records say of memory; a run on workers asks them instead."""
            self._interrupt = self._resources.enter_context(Interrupt(self.display.notice))
        except BaseException:
            self._resources.close()
            raise
        folder.set_status(RunState.RUNNING, step=first_step, steps=steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, trace)
        if kind is None:
            return
        path = self.folder.path
        with suppress(OSError, UserError):  # what ended the run is on its way and tells more
            if has_records(path):
                self._say([report_line(write_report(path))])
        if issubclass(kind, KeyboardInterrupt):
            newest = latest_checkpoint(self.folder.checkpoints)
            saved_step = 0 if newest is None else int(read_cut(newest).values["step"])
            self._say(interrupted_lines(self._command, self.folder.path, saved_step=saved_step))

    @property
    def stop_wanted(self) -> bool:
        return self._interrupt.wanted

    def log(self, kind: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Write, show and send a record, with the seconds of each phase since the last one."""
        record = {
            "step": step,
            "kind": kind,
            "metrics": {**metrics, **self.measure_memory(), **self._memory.take()},
            "phases": self.clock.take(),
            "time": time.time(),
        }
        self.folder.log_metrics(record)
        self.loggers.log(record)
        self.display.record(record)

    def _enter_phase(self, phase: str | None) -> None:
        self._memory.enter(phase)
        self.display.phase(phase)

    def log_samples(self, records: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Make and write a step's samples while the next step runs; the step after that waits for them."""
        self._wait_for_samples()
        self._writing = self._writer.submit(lambda: self.folder.log_samples(records()))

    def _wait_for_samples(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def save(self, take: Callable[[], Snapshot], cut: Cut, *, step: int, score: float | None) -> None:
        """Make a checkpoint; in the background if the settings say so.

        Args:
            take: copies the models, once the checkpoint before this one is written: ranks hold one copy at a time.
            cut: what a checkpoint holds beside them.
            step: that it is of.
            score: of the validation after this step, if there was one.
        """
        self._wait_for_samples()
        self.store.wait()
        snapshot = take()
        self.folder.sync()
        tensors = {**cut.tensors, **_random_states()}

        def write(aside: Path) -> None:
            snapshot.write(aside)
            save_file(tensors, aside / TENSORS)
            (aside / STATE).write_text(json.dumps(cut.values))

        self.store.save(
            step,
            write,
            score=score,
            asynchronous=self.settings.checkpoint.asynchronous,
            estimated_bytes=snapshot.num_bytes + sum(t.nbytes for t in tensors.values()),
        )
        self.saved_step = step

    def end(self, *, step: int, stopped: bool) -> int:
        """Wait for the last checkpoint, note how the run ended, write the report, say how to go on; the exit code."""
        self.store.wait()
        self._wait_for_samples()
        state, path = RunState.STOPPED if stopped else RunState.FINISHED, self.folder.path
        self.folder.set_status(state, step=step, steps=self.steps)
        if has_records(path):
            write_report(path)
        self.display.close()
        if stopped:
            self._say(stopped_lines(self._command, path, step=step, steps=self.steps))
            return 130
        seconds = time.monotonic() - self._began
        self._say(finished_lines(path, steps=self.steps, first_step=self._first_step, seconds=seconds))
        return 0

    @property
    def _command(self) -> str:
        return "train" if isinstance(self.settings, TrainSettings) else "sft"

    def _say(self, lines: Sequence[str]) -> None:
        console = Console()
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _random_states() -> dict[str, Tensor]:
    """States of torch's generators: the processor's, and each GPU's where one is in use."""
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {_CPU_STATE: torch.get_rng_state()} | {f"{_GPU_STATE}/{i}": state for i, state in enumerate(states)}


def set_random_states(cut: Cut | None, seed: int) -> None:
    """Set torch's generators as a checkpoint has them, or by the run's seed if there is none."""
    torch.manual_seed(seed)
    if cut is None:
        return
    torch.set_rng_state(cut.tensors[_CPU_STATE])
    for index in range(torch.cuda.device_count()):
        if (state := cut.tensors.get(f"{_GPU_STATE}/{index}")) is not None:
            torch.cuda.set_rng_state(state, index)
